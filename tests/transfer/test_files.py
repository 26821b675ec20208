"""Files: what one layout wrote, another reads, each rank its own bytes; safetensors and torch's checkpoints too."""

import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from safetensors.torch import save_file
from tests.transfer import brute, live
from tests.transfer.strategies import pairs, world_of

import rankmesh as rm
from rankmesh.errors import TransferError
from rankmesh.transfer import files


def _saved(folder, shardings, world):
    """Every rank's file; rank 0, who writes the index, comes last."""
    return sum(
        files.save(folder, live.shards(shardings, rank), shardings, rank=rank, meet_all=lambda: None)
        for rank in reversed(range(world))
    )


def _loaded(folder, shardings, rank, **how):
    into = rm.Transfer(shardings, shardings).allocate(rank)
    read = files.load(folder, into, shardings, rank=rank, **how)
    return read, live.wrong(into, shardings, rank)


@settings(max_examples=25)
@given(pairs(max_names=2))
def test_any_layout_reads_what_any_other_wrote(tmp_path_factory, both):
    """Each element is written once, and each rank reads exactly the bytes of its own shards."""
    source, target = both
    folder = tmp_path_factory.mktemp("checkpoint")
    written = _saved(folder, source, world_of(source, target))
    once = {name: set().union(*(brute.held(s, r) for r in range(world_of(source)))) for name, s in source.items()}
    assert written == sum(len(once[name]) * sharding.itemsize for name, sharding in source.items())
    for rank in range(world_of(source, target)):
        read, wrong = _loaded(folder, target, rank)
        assert wrong == []
        assert read == sum(len(brute.held(s, rank)) * s.itemsize for s in target.values())


def test_whole_tensors_of_safetensors_under_other_names(tmp_path):
    """Files as Hugging Face has them: two of them, names by a dictionary, another dtype converted."""
    shardings = live.model(rm.Mesh(tp=2, dp=2))
    whole = {
        name: live.numbered(rm.Sharding(rm.Mesh(dp=1), None, s.shape), 0, n)
        for n, (name, s) in enumerate(sorted(shardings.items()))
    }
    names = {name: f"model.layers.{name}.weight" for name in whole}
    half = len(whole) // 2
    for number, part in enumerate((sorted(whole)[:half], sorted(whole)[half:])):
        save_file({names[name]: whole[name].double() for name in part}, tmp_path / f"model-{number}.safetensors")
    for rank in range(4):
        read, wrong = _loaded(tmp_path, shardings, rank, names=names)
        assert wrong == []
        assert read == 2 * sum(s.of(rank).size * s.itemsize for s in shardings.values())


def test_what_is_not_there_is_told(tmp_path):
    """No checkpoint, a name that it lacks, another shape, a file that is gone, one that is cut off."""
    source = {"w": rm.Sharding(rm.Mesh(tp=2), ("tp", None), (8, 4))}
    into = {"w": torch.empty(8, 4)}
    whole = {"w": rm.Sharding(rm.Mesh(dp=1), (None, None), (8, 4))}
    with pytest.raises(TransferError, match="which holds no checkpoint"):
        files.load(tmp_path, into, whole, rank=0)
    _saved(tmp_path, source, 2)
    with pytest.raises(TransferError, match=r"'v', which .* does not have"):
        files.load(tmp_path, into, {"v": whole["w"]}, rank=0)
    with pytest.raises(TransferError, match=r"of shape \(8, 5\), which has shape \(8, 4\)"):
        files.load(tmp_path, into, {"w": rm.Sharding(rm.Mesh(dp=1), None, (8, 5))}, rank=0)
    path = tmp_path / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(TransferError, match=r"rank-00001.safetensors', of which 'w@4:8,0:4' cannot be read"):
        files.load(tmp_path, into, whole, rank=0)
    path.unlink()
    with pytest.raises(TransferError, match="cannot be read"):
        files.load(tmp_path, into, whole, rank=0)
    index = json.loads((tmp_path / files.INDEX).read_text())
    index["tensors"]["w"]["boxes"].pop()
    (tmp_path / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(TransferError, match="holds 16 of the 32 elements of 'w' that rank 0 needs"):
        files.load(tmp_path, into, whole, rank=0)
    (tmp_path / files.INDEX).write_text("{")
    with pytest.raises(TransferError, match="whose index cannot be read"):
        files.load(tmp_path, into, whole, rank=0)


def test_torchs_distributed_checkpoint(ranks, tmp_path):
    """4 ranks, gloo: DTensors that torch saved under one layout are read under another, and by one process."""
    assert ranks(4, _saved_by_torch, str(tmp_path)) == [[]] * 4
    shardings = {"w": rm.Sharding(rm.Mesh(dp=1), None, (10, 6)), "b": rm.Sharding(rm.Mesh(dp=1), None, (7,))}
    assert _loaded(tmp_path, shardings, 0)[1] == []


def _saved_by_torch(me, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = {"w": torch.arange(60.0).reshape(10, 6) + 1, "b": torch.arange(7.0)}
    placed = {"w": [Shard(0), Shard(0)], "b": [Replicate(), Shard(0)]}
    dcp.save({name: distribute_tensor(whole[name], mesh, placed[name]) for name in whole}, checkpoint_id=folder)
    dist.barrier()
    shardings = {
        "w": rm.Sharding(rm.Mesh(tp=4), (None, "tp"), (10, 6)),
        "b": rm.Sharding(rm.Mesh(tp=4), ("tp",), (7,)),
    }
    return _loaded(folder, shardings, me.rank)[1]
