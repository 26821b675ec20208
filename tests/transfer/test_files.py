"""Files: what one layout wrote, another reads, each rank its own bytes; safetensors and torch's checkpoints too."""

import json
import os
import pickle
import re
import stat
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests import limits
from tests.transfer import brute, live
from tests.transfer.strategies import one as one_sharding
from tests.transfer.strategies import pairs, world_of

import rankmesh as rm
from rankmesh.core.boxes import size
from rankmesh.core.sharding import DTYPES
from rankmesh.errors import MissingExtra, TransferError
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


@given(pairs(max_names=2))
def test_any_layout_reads_what_any_other_wrote(tmp_path_factory, both):
    """Each element is written once, and each rank reads exactly the bytes of its own shards."""
    source, target = both
    folder = tmp_path_factory.mktemp("checkpoint")
    written = _saved(folder, source, world_of(source, target))
    once = {name: set().union(*(brute.kept(s, r) for r in range(world_of(source)))) for name, s in source.items()}
    assert written == sum(len(once[name]) * sharding.itemsize for name, sharding in source.items())
    for rank in range(world_of(source, target)):
        read, wrong = _loaded(folder, target, rank)
        assert wrong == []
        assert read == sum(len(brute.kept(s, rank)) * s.itemsize for s in target.values())


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


def test_what_is_missing_is_an_error(tmp_path):
    """No checkpoint, another name, shape or target, files that are torn, gone or a FIFO, an index torn or gone."""
    source = {"w": rm.Sharding(rm.Mesh(tp=2), ("tp", None), (8, 4))}
    into = {"w": torch.empty(8, 4)}
    whole = {"w": rm.Sharding(rm.Mesh(dp=1), (None, None), (8, 4))}

    def refused(into=into, shardings=whole):
        with pytest.raises(TransferError) as caught:
            files.load(tmp_path, into, shardings, rank=0)
        return caught.value.values

    assert refused() == {"folder": tmp_path}
    _saved(tmp_path, source, 2)
    assert refused(shardings={"v": whole["w"]}) == {"name": "v", "folder": tmp_path}
    other = {"w": rm.Sharding(rm.Mesh(dp=1), None, (8, 5))}
    assert refused(shardings=other) == {"name": "w", "folder": tmp_path}
    for target in ({}, {"w": torch.zeros(8, 8)}):
        assert refused(target) == {"name": "w"}
    path = tmp_path / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    for change in (lambda: None, path.unlink, lambda: os.mkfifo(path)):
        change()
        assert refused() == {"file": path.name, "folder": tmp_path}
    (tmp_path / files.INDEX).write_text("{")
    assert refused() == {"folder": tmp_path}
    (tmp_path / files.INDEX).unlink()
    with pytest.raises(TransferError, match="it was never finished"):
        files.Checkpoint.open(tmp_path)


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


# -- files that others wrote ----------------------------------------------------------------------------------------

WHOLE = {"w": rm.Sharding(rm.Mesh(dp=1), None, (8, 4))}


def _by_torch(folder, **more):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.arange(32.0).reshape(8, 4), **more}, checkpoint_id=folder)


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_opening_a_checkpoint_runs_no_code(tmp_path):
    """A pickle in place of torch's metadata, or inside of it, is refused by the name that it asks for."""
    from torch.distributed.checkpoint.metadata import Metadata

    ran = tmp_path / "ran"
    for number, output in enumerate((_Runs(ran), Metadata({}, planner_data=_Runs(ran)), Metadata({"w": _Runs(ran)}))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(output))
        with pytest.raises(TransferError, match=r"asks for posix.mkdir, which is none of the classes"):
            files.Checkpoint.open(folder)
    assert not ran.exists()


# A tuple of the tuple before, twice, 60 times.
_NESTED = b")\x94" + b"".join(b"h%c\x86\x94" % number for number in range(60))


_GETATTR = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93"
_ENUM = b"\x8c\x26torch.distributed.checkpoint.planner\x8c\x0dWriteItemType\x93"


PICKLES = [
    b"cos\nsystem\n(S'true'\ntR.",
    b"\x80\x04\x8c\x05torch\x8c\x0bhub.os.path\x93.",
    b"\x80\x04\x8c\x05torch\x8c\x04Size\x93}b.",  # state for a function
    b"\x80\x04\x8c\x05torch\x8c\x04Size\x93N}\x8c\x08__code__K\x01s\x86b.",
    b"\x80\x04}]K\x01a)R.",  # a call of a list
    b"\x80\x04}" + _NESTED + b"K\x01s.",  # a key that takes 2**60 steps to hash
    b"\x80\x04\x8c\x07pathlib\x8c\x09PosixPath\x93" + _NESTED + b"\x85R.",  # a path as long
    _GETATTR + b"\x8c\x05torch\x8c\x04Size\x93\x8c\x05count\x86R.",  # an attribute of what is no enum
    _GETATTR + _GETATTR[2:] + _ENUM + b"\x8c\x05SHARD\x86R\x8c\x09__class__\x86R.",  # one of a member
    _GETATTR + _ENUM + b"K\x01\x86R.",
    b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    b"\x80\x04\x8b\xff\xff\xff\x7f.",
    b"\x80\x04N.",
    b"",
]
# Fewer than eight bytes, a length beyond the file, and JSON of another form.
HEADERS = [b"", b"1234", b"\xff" * 8, b"\2\0\0\0\0\0\0\0[]", b"\x0c" + b"\0" * 7 + b'{"w": "none"}']


@pytest.mark.parametrize(
    ("name", "data"), [*((".metadata", one) for one in PICKLES), *(("model.safetensors", one) for one in HEADERS)]
)
def test_what_is_no_metadata_and_no_header_is_refused(tmp_path, name, data):
    """Instructions that torch does not use, states of what is no object, endless keys, and nothing at all."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TransferError, match="the index of checkpoint"):
        files.Checkpoint.open(tmp_path)


def test_what_torch_saves_is_read(tmp_path):
    """Every dtype, scalars, nested values, planner data and objects beside tensors: all that is a tensor is found."""
    numbers = [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64, torch.uint16]
    _by_torch(tmp_path, nested={"a": [torch.ones(2), 3, "x"], "b": b"x"}, scalar=torch.tensor(2.0), none=None)
    _by_torch(tmp_path / "more", **{str(dtype): torch.ones(3).to(dtype) for dtype in numbers})
    kept = files.Checkpoint.open(tmp_path)
    assert {name: one.shape for name, one in kept.tensors.items()} == {"w": (8, 4), "nested.a.0": (2,), "scalar": ()}
    into = {"scalar": torch.empty(())}
    files.load(kept, into, {"scalar": rm.Sharding(rm.Mesh(dp=1), None, ())}, rank=0)
    assert into["scalar"] == 2
    found = files.Checkpoint.open(tmp_path / "more").tensors
    assert {f"torch.{one.dtype}" for name, one in found.items() if name != "w"} == set(map(str, numbers))


def test_what_python_3_11_2_saved_is_read(tmp_path):
    """Python 3.11.0 to 3.11.3 writes a member of an enum as ``getattr(enum, name)``: its checkpoints are read, too."""
    source = Path(__file__).with_name("saved_by_python_3_11_2")
    data = (source / ".metadata").read_bytes()
    assert {b"getattr", b"TORCH_CONTIGUOUS_FORMAT", b"SHARD"} <= set(re.findall(rb"\w+", data))
    found = torch.empty(4, 3)
    files.load(source, {"w": found}, {"w": rm.Sharding(rm.Mesh(dp=1), None, (4, 3))}, rank=0)
    assert torch.equal(found, torch.arange(12.0).reshape(4, 3))


def test_a_torn_metadata_is_refused(tmp_path):
    """Whatever the length at which a download of .metadata ends, the error is ours."""
    _by_torch(tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    for length in range(0, len(data), 7):
        (tmp_path / ".metadata").write_bytes(data[:length])
        with pytest.raises(TransferError, match=r"the index of checkpoint .* is truncated or no pickle"):
            files.Checkpoint.open(tmp_path)


def test_a_chunk_is_what_its_metadata_says(tmp_path):
    """A truncated file, a tensor of another shape, a compressed archive, a file outside of the folder are refused."""
    _by_torch(tmp_path)
    into = {"w": torch.zeros(8, 4)}
    (file,) = tmp_path.glob("*.distcp")
    whole, metadata = file.read_bytes(), (tmp_path / ".metadata").read_bytes()
    file.write_bytes(whole[: len(whole) // 4])
    with pytest.raises(TransferError, match="shorter than its metadata says"):
        files.load(tmp_path, into, WHOLE, rank=0)
    torch.save(torch.ones(1, 1), tmp_path / "one")
    packed = zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED)
    packed.writestr("archive/data.pkl", b"0" * 100_000)
    packed.close()
    for name, why in (("one", "no tensor of torch.float32"), ("packed", "compressed")):
        data = (tmp_path / name).read_bytes()
        file.write_bytes(data + b"\0" * (len(whole) - len(data)))
        output = pickle.loads(metadata)  # noqa: S301  - what torch has just saved
        for info in output.storage_data.values():
            info.length = len(data)
        (tmp_path / ".metadata").write_bytes(pickle.dumps(output))
        with pytest.raises(TransferError, match=why):
            files.load(tmp_path, into, WHOLE, rank=0)
    (tmp_path / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(TransferError, match="outside of the folder"):
        files.load(tmp_path, into, WHOLE, rank=0)
    assert not into["w"].any()


def test_a_hole_is_no_checkpoint(tmp_path):
    """The same box twice in place of another covers nothing more; what was filled is complete, and the rest is not."""
    both = {**WHOLE, "v": rm.Sharding(rm.Mesh(dp=1), None, (3,))}
    _saved(tmp_path, {**both, "w": rm.Sharding(rm.Mesh(tp=2), ("tp", None), (8, 4))}, 2)
    into = rm.Transfer(both, both).allocate(0)
    files.load(tmp_path, into, WHOLE, rank=0)
    assert into.incomplete == ("v",)
    files.load(tmp_path, into, both, rank=0)
    assert into.complete
    index = json.loads((tmp_path / files.INDEX).read_text())
    index["tensors"]["w"]["boxes"][1] = index["tensors"]["w"]["boxes"][0]
    (tmp_path / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(TransferError, match="holds 16 of the 32 elements of 'w' that rank 0 needs"):
        files.load(tmp_path, into, WHOLE, rank=0)
    assert into.incomplete == ("w",)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(schema=2),
        lambda index: index.pop("schema"),
        lambda index: index.update(tensors=[]),
        lambda index: index["tensors"]["w"].update(shape=None),
        lambda index: index["tensors"]["w"].update(boxes=[[0, [[0, 9], [0, 4]]]]),
        lambda index: index["tensors"]["w"].update(boxes=5),
    ],
)
def test_an_index_of_another_schema_or_form_is_refused(tmp_path, change):
    """Its schema is that of this version, and shapes, boxes and tensors are what they should be."""
    _saved(tmp_path, WHOLE, 1)
    index = json.loads((tmp_path / files.INDEX).read_text())
    change(index)
    (tmp_path / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(TransferError, match="the index of checkpoint"):
        files.Checkpoint.open(tmp_path)


def test_the_index_comes_when_all_else_is_on_the_disk(tmp_path, monkeypatch):
    """2 ranks: data is synced, then the new index, then its name, which replaces the old one; no box is cloned."""
    parts = [[]]
    fsync, index = os.fsync, tmp_path / files.INDEX

    def noting(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        number = json.loads(index.read_text())["number"]
        parts[-1].append(("draft of the index" if name == "part" else name, number))
        return fsync(descriptor)

    both = {"w": rm.Sharding(rm.Mesh(tp=2), ("tp", None), (8, 4))}
    _saved(tmp_path, both, 2)
    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    whole = torch.arange(32.0).reshape(8, 4)
    meet = threading.Barrier(2, lambda: parts.append([]))

    def save(rank):
        files.save(tmp_path, {"w": whole[4 * rank :][:4]}, both, rank=rank, meet_all=meet.wait)

    ranks = [threading.Thread(target=save, args=(rank,)) for rank in (0, 1)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(limits.LONG)
    folder = tmp_path.name
    first, data, last, _ = parts
    assert first == []
    assert sorted(data)[:2] == [("rank-00000-1.safetensors", 0), ("rank-00001-1.safetensors", 0)]
    assert sorted(data)[2:] == [(folder, 0)] * 2
    assert data[-1] == (folder, 0)
    assert last == [("draft of the index", 0), (folder, 0), (folder, 1)]
    monkeypatch.undo()
    assert _loaded(tmp_path, {"w": rm.Sharding(rm.Mesh(dp=1), None, (8, 4))}, 0)[0] == whole.nbytes


class _Killed(BaseException):
    pass


def _killed_at(line, save):
    """Run `save` until so many lines of the module have begun; return whether it ended before."""
    left = [line]

    def trace(frame, event, _):
        if frame.f_code.co_filename != files.__file__:
            return None
        left[0] -= event == "line"
        if left[0] == 0:
            raise _Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        save()
    except _Killed:
        return False
    finally:
        sys.settrace(before)
    return True


def _values(folder, length):
    into = {"w": torch.zeros(length)}
    files.load(folder, into, {"w": rm.Sharding(rm.Mesh(dp=1), None, (length,))}, rank=0)
    return into["w"].tolist()


def test_a_death_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """At each line: what the folder had before, or the new one; the next save is whole, and removes what was left."""
    shardings = {world: {"w": rm.Sharding(rm.Mesh(dp=world), ("dp",), (12,))} for world in (2, 3)}

    def save(world, shift):
        for rank in reversed(range(world)):
            shard = torch.arange(12.0).chunk(world)[rank] + shift
            files.save(tmp_path, {"w": shard}, shardings[world], rank=rank)

    save(3, 0)
    before, line, ends = _values(tmp_path, 12), 0, set()
    while True:
        line, shift = line + 1, 100 * (line + 1)
        ended = _killed_at(line, lambda shift=shift: save(2, shift))
        now, new = _values(tmp_path, 12), [element + shift for element in range(12)]
        assert now in (before, new), line
        ends.add(now == new)
        if ended:
            break
        if line % 10 == 0:  # a larger job, whose files are too many for the next one
            save(3, shift)
            now = _values(tmp_path, 12)
        before = now
    assert ends == {True, False}
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"rank", files.INDEX}
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranks_of_one_process_save_in_any_order(tmp_path, order):
    """One after another, without a world, twice into one folder: the second checkpoint is whole."""
    shardings = {"w": rm.Sharding(rm.Mesh(dp=3), ("dp",), (6,))}
    for shift in (0, 10):
        for rank in order:
            files.save(tmp_path, {"w": torch.arange(6.0).chunk(3)[rank] + shift}, shardings, rank=rank)
    assert _values(tmp_path, 6) == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_on_one_rank_is_an_error_on_all(ranks, tmp_path, failing):
    """2 ranks: both raise at once, with the rank, the path and the reason; the old checkpoint can be read."""
    found = ranks(2, _saves_where_a_folder_is_in_the_way, str(tmp_path), failing)
    path = f"rank-{failing:05d}-1.safetensors"
    assert all(f"rank {failing} cannot write" in message and path in message for message, _ in found)
    assert all("Is a directory" in message for message, _ in found)
    assert [named for _, named in found] == [[failing]] * 2
    assert _values(tmp_path, 4) == [0, 0, 1, 1]


def _saves_where_a_folder_is_in_the_way(me, folder, failing):
    shardings = {"w": rm.Sharding(rm.Mesh(tp=2), ("tp",), (4,))}
    files.save(folder, {"w": torch.full((2,), float(me.rank))}, shardings, rank=me.rank)
    if me.rank == failing:
        (Path(folder) / f"rank-{failing:05d}-1.safetensors").mkdir()
    try:
        files.save(folder, {"w": torch.full((2,), 5.0)}, shardings, rank=me.rank)
    except TransferError as error:
        return str(error), list(error.ranks)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_each_dtype_is_one_of_safetensors(tmp_path, dtype):
    """A scalar, an odd length and strides: safetensors reads the same bytes; a dtype that it does not have is named."""
    tensors = {"scalar": torch.ones(()), "odd": torch.arange(7), "strides": torch.arange(24).reshape(4, 6).t()}
    tensors["one"] = torch.arange(2)[::2]
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    shardings = {n: rm.Sharding(rm.Mesh(dp=1), None, tuple(t.shape), dtype=dtype) for n, t in tensors.items()}
    if dtype in ("complex32", "complex128"):
        with pytest.raises(TransferError, match=f"has dtype {dtype}, which safetensors does not have"):
            files.save(tmp_path, tensors, shardings, rank=0, meet_all=lambda: None)
        return
    tensors["strides"] = torch.nn.Parameter(tensors["strides"], requires_grad=tensors["strides"].is_floating_point())
    files.save(tmp_path, tensors, shardings, rank=0, meet_all=lambda: None)
    read = load_file(tmp_path / "rank-00000.safetensors")
    assert {name.partition("@")[0] for name in read} == set(tensors)
    for name, tensor in read.items():
        expected = tensors[name.partition("@")[0]].detach().clone(memory_format=torch.contiguous_format)
        assert tensor.dtype == expected.dtype
        assert tensor.shape == expected.shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_files_have_the_users_mode(tmp_path):
    """Every file of a checkpoint can be read by whom the umask lets read its index."""
    before = os.umask(0o027)
    try:
        _saved(tmp_path, WHOLE, 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize("name", ["rankmesh.json", ".metadata", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_only_regular_files_of_a_checkpoint_are_opened(tmp_path, name, kind):
    """A FIFO, a folder and a link to a device are refused at once."""
    path = tmp_path / name
    {"fifo": os.mkfifo, "folder": os.mkdir, "device": lambda p: p.symlink_to("/dev/zero")}[kind](path)
    with pytest.raises(TransferError, match=f"is a {'FIFO' if kind == 'fifo' else kind}, and only regular files"):
        files.Checkpoint.open(tmp_path)


def test_a_missing_safetensors_is_named_with_its_extra(tmp_path, monkeypatch):
    """Whether a checkpoint is opened or read, the error is what to install, and nothing of the checkpoint."""
    _saved(tmp_path / "ours", WHOLE, 1)
    (tmp_path / "theirs").mkdir()
    save_file({"w": torch.zeros(8, 4)}, tmp_path / "theirs" / "model.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for folder in ("ours", "theirs"):
        with pytest.raises(MissingExtra) as caught:
            files.load(tmp_path / folder, {"w": torch.zeros(8, 4)}, WHOLE, rank=0)
        assert caught.value.extra == "files"


@given(st.lists(one_sharding(), max_size=4))
def test_the_index_names_every_box_of_a_rank_that_writes_it(drawn):
    """Of each shard one copy writes the boxes that the sharding gives its rank, in turns from tensor to tensor."""
    shardings = {f"w{number}": sharding for number, sharding in enumerate(drawn)}
    index = json.loads(files._index(shardings, {"step": 3}, 2))
    assert (index["number"], index["about"], list(index["tensors"])) == (2, {"step": 3}, sorted(shardings))
    for number, (name, sharding) in enumerate(sorted(shardings.items())):
        copies = sharding.shard_map.ranks
        expected = [
            [rank, [list(edges) for edges in box]]
            for rank in copies[:, number % copies.shape[1]].tolist()
            for box in sharding.of(rank).boxes
            if size(box)
        ]
        assert index["tensors"][name] == {"shape": list(sharding.shape), "dtype": sharding.dtype, "boxes": expected}
