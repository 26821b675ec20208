"""Conversion of checkpoints: what is written has every bit of what was read, and what cannot be is refused by name."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.limits import LONG
from tests.sockets import free_port
from tests.transfer import live, megatron_saves
from tests.transfer.strategies import pairs, world_of

import rankmesh as rm
from rankmesh.errors import TransferError
from rankmesh.transfer import files
from rankmesh.transfer.convert import convert


def _whole(folder):
    """Every tensor of a checkpoint, loaded at once."""
    checkpoint = files.Checkpoint.open(folder)
    whole = {name: rm.Sharding(rm.Mesh(dp=1), None, one.shape, one.dtype) for name, one in checkpoint.tensors.items()}
    into = rm.Transfer(whole, whole).allocate(0)
    files.load(checkpoint, into, whole, rank=0)
    return dict(into)


def _same(one, other):
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and torch.equal(live.bytes_of(one[name]), live.bytes_of(other[name]))
        for name in one
    )


@settings(max_examples=10)
@given(pairs(max_names=3), st.integers(1, 200))
def test_every_format_holds_the_bits_of_what_any_layout_saved(tmp_path_factory, both, budget):
    """Sharded files, to safetensors and to torch's, with any budget, and from each to the other: equal, bit for bit."""
    source, target = both
    folder, world = tmp_path_factory.mktemp("convert"), world_of(source, target)
    for rank in reversed(range(world)):
        files.save(folder / "ranks", live.shards(source, rank), source, rank=rank, meet_all=lambda: None)
    expected, seen = _whole(folder / "ranks"), []
    ways = [("ranks", "safetensors"), ("ranks", "dcp"), ("safetensors", "dcp"), ("dcp", "safetensors")]
    for number, (read, to) in enumerate(ways):
        place = folder / (to if number < 2 else f"again-{to}")
        sizes = convert(folder / read, place, to, budget=budget, progress=lambda *of: seen.append(of))
        assert _same(_whole(place), expected)
        assert sizes == {name: tensor.nbytes for name, tensor in expected.items()}
        assert seen[-1] == (sum(sizes.values()),) * 2
    assert sorted(path.name for path in folder.iterdir()) == ["again-dcp", "again-safetensors", "dcp", "ranks",
                                                              "safetensors"]  # fmt: skip


def test_others_read_what_is_written(tmp_path):
    """Safetensors' own reader, and torch's: numbers, not-a-numbers with their payload, scalars, empty tensors."""
    import torch.distributed.checkpoint as dcp

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (40, 6), dtype=torch.int16, generator=generator)
    whole = {"layers.0.w": bits.view(torch.bfloat16), "layers.1.w": bits.t().contiguous().view(torch.float16),
             "scale": torch.tensor(3.0), "none": torch.empty(0, 4)}  # fmt: skip
    (tmp_path / "from").mkdir()
    save_file(whole, tmp_path / "from" / "model.safetensors")
    convert(tmp_path / "from", tmp_path / "dcp", "dcp", budget=100)
    into = {name: torch.zeros_like(tensor) for name, tensor in whole.items() if name != "none"}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert _same(into, {name: whole[name] for name in into})
    convert(tmp_path / "dcp", tmp_path / "back", "safetensors", leave_out=["scale"])
    assert _same(load_file(tmp_path / "back" / "model.safetensors"), {n: t for n, t in whole.items() if n != "scale"})


def test_several_files_have_an_index(tmp_path, monkeypatch):
    """Hugging Face's names of files, and which tensor is in which."""
    monkeypatch.setattr("rankmesh.transfer.convert._FILE", 100)
    whole = {f"w{number}": torch.full((10,), float(number)) for number in range(5)}
    (tmp_path / "from").mkdir()
    save_file(whole, tmp_path / "from" / "model.safetensors")
    convert(tmp_path / "from", tmp_path / "to", "safetensors")
    index = (tmp_path / "to" / "model.safetensors.index.json").read_text(encoding="utf-8")
    assert '"w4": "model-00003-of-00003.safetensors"' in index
    assert _same(_whole(tmp_path / "to"), whole)


def _refused(*given, **how):
    """What the error of a conversion that is refused names."""
    with pytest.raises(TransferError) as caught:
        convert(*given, **how)
    return caught.value.values


def _torchs(folder, **tensors):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model.w": torch.arange(32.0).reshape(8, 4), **tensors}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("more", "to", "names"),
    [
        ({"rng": {"a": [1]}}, "dcp", ("rng.a",)),
        ({"c": torch.zeros(2, dtype=torch.complex128)}, "safetensors", ("c",)),
        ({"decoder.layers.mlp.linear_fc1.weight": torch.zeros(2, 4, 4)}, "safetensors",
         ("decoder.layers.mlp.linear_fc1.weight",)),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_by_name(tmp_path, more, to, names):
    """Objects, dtypes, and Megatron's fused layers: before a byte is written; the rest is converted without them."""
    source = _torchs(tmp_path / "from", **more)
    assert _refused(source, tmp_path / "to", to)["names"] == names
    assert [path.name for path in tmp_path.iterdir()] == ["from"]
    convert(source, tmp_path / "to", to, leave_out=names)
    assert list(_whole(tmp_path / "to")) == ["model.w"]


def test_a_truncated_source_and_a_target_that_is_there(tmp_path):
    """Refused before a byte is written; an error in between leaves nothing behind."""
    source = _torchs(tmp_path / "from")
    _refused(source, source, "dcp")
    _refused(source, tmp_path / "to", "pt")
    _refused(source, tmp_path / "to", "dcp", leave_out=["*"])

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "to", "safetensors", progress=stop)
    path = source / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301  - torch wrote it above
    huge = torch.Size([2**40, 4])
    entry = metadata.state_dict_metadata["model.w"]
    entry.size = entry.chunks[0].sizes = huge
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / ".metadata").write_bytes(pickle.dumps(metadata))
    shutil.copy(next(source.glob("*.distcp")), tmp_path / "huge")
    assert _refused(tmp_path / "huge", tmp_path / "to", "safetensors")["names"] == ("model.w",)
    shutil.rmtree(tmp_path / "huge")
    chunk = next(source.glob("*.distcp"))
    chunk.write_bytes(chunk.read_bytes()[:-9])
    assert _refused(source, tmp_path / "to", "dcp")["names"] == ("model.w",)
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_the_current_folder_is_not_a_new_one(tmp_path, monkeypatch):
    """Whoever is in it would be in a folder that was replaced; any other empty folder may be the target."""
    source = _torchs(tmp_path / "from")
    for name in ("here", "empty"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert _refused(source, ".", "safetensors")["folder"] == Path()
    convert(source, tmp_path / "empty", "safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "from", "here"]


def test_the_plans_that_megatron_keeps_in_its_metadata(tmp_path):
    """torch_dist is torch's format, with what each rank planned to save: read as plain data."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    source = _torchs(tmp_path / "from")
    path = source / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301  - written above
    entry = metadata.state_dict_metadata["model.w"]
    data = TensorWriteData(entry.chunks[0], entry.properties, entry.size)
    item = WriteItem(MetadataIndex("model.w", torch.Size([0, 0])), WriteItemType.SHARD, tensor_data=data)
    metadata.all_local_plans = [SavePlan([item], planner_data={})]
    path.write_bytes(pickle.dumps(metadata))
    convert(source, tmp_path / "to", "safetensors")
    assert torch.equal(_whole(tmp_path / "to")["model.w"], torch.arange(32.0).reshape(8, 4))


@pytest.mark.long
def test_a_checkpoint_that_megatron_writes(tmp_path):
    """Its own torch_dist, as a run saves it: objects are refused by name, tensors are converted under its names."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("psutil")  # what it writes with waits without end for processes that miss it
    (tmp_path / "from").mkdir()
    command = [sys.executable, "-m", "tests.transfer.megatron_saves", str(tmp_path / "from"), str(free_port())]
    subprocess.run(command, check=True, timeout=LONG, capture_output=True)
    extra = "decoder.layers.mlp.linear_fc2._extra_state/shard_0_1"
    assert _refused(tmp_path / "from", tmp_path / "to", "dcp")["names"] == (extra,)
    others = _refused(tmp_path / "from", tmp_path / "to", "safetensors", leave_out=["*_extra_state*"])
    assert len(others["names"]) == 2
    convert(tmp_path / "from", tmp_path / "to", "dcp", leave_out=["*_extra_state*"], budget=50)
    found = _whole(tmp_path / "to")
    stacked = torch.stack([megatron_saves.layer(number) for number in range(megatron_saves.LAYERS)])
    assert torch.equal(found["decoder.layers.mlp.linear_fc2.weight"], stacked)
    assert torch.equal(found["embedding.word_embeddings.weight"], torch.arange(40.0).reshape(10, 4))


def _anonymous():
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


@pytest.mark.few(1)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_memory_is_bounded_whatever_the_model(tmp_path, to):
    """128 MiB in four tensors, a budget of 4 MiB: what is mapped is the kernel's, the rest does not grow with these."""
    (tmp_path / "from").mkdir()
    save_file({f"w{n}": torch.full((8192, 1024), float(n)) for n in range(4)}, tmp_path / "from" / "model.safetensors")
    convert(_torchs(tmp_path / "small"), tmp_path / "first", to)  # what is loaded on the first use
    most, before = [], _anonymous()
    convert(tmp_path / "from", tmp_path / "to", to, budget=4 << 20, progress=lambda *_: most.append(_anonymous()))
    assert max(most) - before < 32 << 20
    assert len(most) == 32


def test_what_stands_beside_the_tensors_is_copied(tmp_path):
    """The configuration and the tokenizer of a model come along, so that it can be loaded; other files do not."""
    (tmp_path / "model").mkdir()
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model" / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "merges.txt", "README.md", "training_args.bin"):
        (tmp_path / "model" / name).write_text(name, encoding="utf-8")
    for source, target, to in (("model", "dcp", "dcp"), ("dcp", "again", "safetensors")):
        convert(tmp_path / source, tmp_path / target, to)
        names = {path.name for path in (tmp_path / target).iterdir()}
        assert {"config.json", "tokenizer.json", "merges.txt"} <= names
        assert names.isdisjoint({"README.md", "training_args.bin"})
    assert (tmp_path / "again" / "merges.txt").read_text(encoding="utf-8") == "merges.txt"
