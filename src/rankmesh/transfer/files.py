"""Files: shards saved by all ranks, and read under any layout, each rank reading what it needs.

```
DIR/rank-00003.safetensors       boxes of whole tensors, each written by one of the ranks that hold it
DIR/rankmesh.json                which box of which tensor is where; written last: without it no checkpoint
```

The next checkpoint in a folder has files of its own (``rank-00003-1.safetensors``); its index replaces the older one.

Three kinds of folder are read: this one, safetensors as Hugging Face has them (whole tensors, in one file or several),
and torch's distributed checkpoint. A safetensors file is mapped, so of a tensor in it only what is asked for is read;
of torch's checkpoint, chunks that a rank needs part of are read whole. Opening one runs no code: see
``rankmesh.transfer.torch_checkpoint`` for torch's pickles.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.core import documents
from rankmesh.core.boxes import Box, meet, size, uncovered
from rankmesh.core.cuts import Cut
from rankmesh.core.documents import Unreadable, open_regular, parse_json, read_text, refused_as
from rankmesh.core.sharding import DTYPES, Sharding
from rankmesh.errors import MissingExtra, TransferError, extra, first_line, quoted
from rankmesh.rendezvous import gather_work
from rankmesh.runtime.world import World
from rankmesh.transfer.live.shards import Shards, flat, local, mark
from rankmesh.transfer.live.stream import Slices, where
from rankmesh.transfer.torch_checkpoint import METADATA, Chunk, chunks_of, read_chunk

__all__ = ["CODES", "INDEX", "Checkpoint", "Stored", "StoredTensor", "load", "safetensors_header", "save"]

_Value = TypeVar("_Value")

INDEX = "rankmesh.json"
_SCHEMA = 1
_ANOTHER = "the file is truncated or of another kind; give another checkpoint"
_OF_A_RANK = re.compile(r"rank-\d{5,}(-\d+)?\.safetensors")


@dataclass(frozen=True)
class Stored:
    """A box of a whole tensor in a safetensors file, in which ``key`` finds it."""

    file: str
    key: str
    box: Box


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, and where its boxes are."""

    shape: tuple[int, ...]
    dtype: str
    boxes: Sequence[Stored | Chunk]


class _Opened(ExitStack):
    """The safetensors files that one ``load`` has opened, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, Any] = {}

    def file(self, path: Path) -> Any:
        """Return the open file of a path."""
        with extra("files"):
            from safetensors import SafetensorError, safe_open
        if path not in self._files:
            open_regular(path).close()
            try:
                self._files[path] = self.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise Unreadable(f"has {path.name}, which safetensors cannot read ({first_line(error)})") from error
        return self._files[path]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder: its tensors by name, what it is ``about``, and names of other objects."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    about: Mapping[str, Any] = field(default_factory=dict)
    objects: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open the checkpoint in a folder. Raises ``TransferError`` for a folder that has none."""
        place = Path(folder)
        with refused_as(TransferError, f"the index of checkpoint {str(place)!r}", _ANOTHER, folder=place):
            if (place / INDEX).exists():
                return _rankmesh(place)
            if (place / METADATA).exists():
                return _distributed(place)
            files = sorted(place.glob("*.safetensors"))
            if files and not all(_OF_A_RANK.fullmatch(path.name) for path in files):
                return _safetensors(place, files)
        unfinished = f" beside its {len(files)} files of ranks: it was never finished" if files else ""
        raise TransferError(
            f"{str(place)!r} holds no checkpoint: no {INDEX}{unfinished}, no *.safetensors, no {METADATA}; give the "
            "folder of one",
            folder=place,
        )


# -- writing --------------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    *,
    rank: int,
    about: Mapping[str, object] | None = None,
    meet_all: Callable[[], object] | None = None,
) -> int:
    """Write this rank's boxes, of copies one rank's alone, and return their bytes. Every rank calls it.

    ``about`` is kept in the index. The ranks of torch's default group wait for each other in the store of the world;
    elsewhere ``meet_all`` waits for all ranks. If a machine fails at any moment, the folder has the checkpoint that it
    had before, or the new one, whole. Files of older checkpoints are removed at the end.

    Raises ``TransferError`` on every rank if one cannot write, with its ``ranks`` and the reason, and
    ``AgreementError`` if ranks do not call it within the timeout of the world.
    """
    place, world = Path(folder), World.current() if meet_all is None and dist.is_initialized() else None
    world = None if world is None or world.default.dry else world
    each = partial(_on_each, world, place, rank, meet_all)
    number: int = each("begin", lambda: _begin(place, rank, agreed=world is not None))
    entries: dict[str, Tensor] = {}

    def write() -> None:
        for name, sharding, ranks in _writers(shardings):
            place_of = int(sharding.shard_map.shard_of(np.array([rank]))[0])
            if place_of >= 0 and ranks[place_of] == rank:
                shard, tensor = sharding.of(rank), local(tensors[name])
                entries.update({_key(name, box): tensor[where(shard, box)] for box in shard.boxes if size(box)})
        (place / _file(rank, number)).unlink(missing_ok=True)
        _write(place / _file(rank, number), _safetensors_of(entries))

    def conclude() -> None:
        _write(place / "part", [_index(shardings, about or {}, number).encode()])
        (place / "part").replace(place / INDEX)
        _sync(place)
        writers = {id(ranks): ranks for _, _, ranks in _writers(shardings)}
        written = {_file(one, number) for one in set().union(*writers.values())}
        for path in place.glob("rank-*.safetensors"):
            if _OF_A_RANK.fullmatch(path.name) and path.name not in written:
                with suppress(OSError):  # the new checkpoint is whole
                    path.unlink()

    each("write", write)
    each("index", conclude if rank == 0 else lambda: None)
    return sum(part.nbytes for part in entries.values())


def _on_each(
    world: World | None,
    place: Path,
    rank: int,
    meet_all: Callable[[], object] | None,
    name: str,
    work: Callable[[], _Value],
) -> _Value:
    """Do this rank's part of one step of ``save``, wait for all, and return rank 0's result (without a world: ours)."""

    def done() -> _Value:
        try:
            return work()
        except OSError as error:
            why = "what the folder had before is unchanged; fix the cause, and save again"
            message = f"rank {rank} cannot write a checkpoint: {first_line(error)}; {why}"
            raise TransferError(message, rank=rank, ranks=(rank,), folder=place) from error

    if world is None:
        value = done()
        if meet_all is not None:
            meet_all()
        return value
    among, seconds = world.round(f"save/{name}", range(world.default.size)), world.default.timeout.total_seconds()
    first: _Value = gather_work(among, done, lambda values: values[0], seconds, "files.save()", TransferError)
    return first


def _begin(place: Path, rank: int, *, agreed: bool) -> int:
    """Make the folder, and return the number of the checkpoint that is to be written in it."""
    place.mkdir(parents=True, exist_ok=True)
    if (agreed and rank != 0) or not (place / INDEX).exists():
        return 0
    with refused_as(TransferError, f"the index of checkpoint {str(place)!r}", "give another folder", folder=place):
        index, number = _read_index(place)
        ranks = {one for entry in index["tensors"].values() for one, _ in entry["boxes"]}
    # Processes that do not agree may save one after another, and rank 0, which writes the index, first.
    lacks_this = not agreed and rank in ranks and not (place / _file(rank, number)).exists()
    return number if lacks_this else number + 1


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file to the disk, and its name."""
    try:
        with path.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk, if its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def _safetensors_of(boxes: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: its header, then one box after the other."""
    header, begins = safetensors_header(
        {key: (str(part.dtype).removeprefix("torch."), tuple(part.shape)) for key, part in boxes.items()}
    )
    yield header
    for key in begins:
        yield flat(boxes[key].cpu().contiguous()).view(torch.uint8).numpy().data


def safetensors_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], form: str | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file of tensors (dtype, shape), and where each begins behind it, in order.

    The header is eight bytes of length, and JSON; ``form`` is what Hugging Face's readers look for in it.
    """
    # Readers map the file: the widest elements come first, so that each box is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPES.get(item[1][0], 0), item[0]))
    header: dict[str, Mapping[str, object]] = {} if form is None else {"__metadata__": {"format": form}}
    begins: dict[str, int] = {}
    end = 0
    for key, (dtype, shape) in ordered:
        if dtype not in CODES:
            raise TransferError(f"{key!r} has dtype {dtype}, which safetensors does not have; convert it", name=key)
        begins[key], end = end, end + prod(shape) * DTYPES[dtype]
        header[key] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": (begins[key], end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, begins


def _writers(shardings: Mapping[str, Sharding]) -> Iterator[tuple[str, Sharding, list[int]]]:
    """Yield the ranks that write each tensor, by shard: one of the copies, which take turns from tensor to tensor."""
    known: dict[tuple[int, int], list[int]] = {}
    for number, (name, sharding) in enumerate(sorted(shardings.items())):
        copies = sharding.shard_map.ranks
        turn = number % copies.shape[1]
        key = id(sharding.shard_map), turn
        if key not in known:
            known[key] = copies[:, turn].tolist()
        yield name, sharding, known[key]


def _index(shardings: Mapping[str, Sharding], about: Mapping[str, object], number: int) -> str:
    """Return as JSON which rank writes which box; every rank computes the same.

    Tensors of one class have the same boxes, whose text is made once: all ranks wait for this.
    """
    boxes_of: dict[tuple[int, int], str] = {}
    tensors = []
    for name, sharding, ranks in _writers(shardings):
        key = id(sharding.cuts), id(ranks)
        if key not in boxes_of:
            rows = zip(ranks, _boxes(sharding.cuts), strict=True)
            boxes_of[key] = ", ".join([f"[{rank}, {box}]" for rank, boxes in rows for box in boxes])
        entry = json.dumps({"shape": sharding.shape, "dtype": sharding.dtype})
        tensors.append(f'{json.dumps(name)}: {entry[:-1]}, "boxes": [{boxes_of[key]}]}}')
    head = json.dumps({"schema": _SCHEMA, "number": number, "about": dict(about)})
    return f'{head[:-1]}, "tensors": {{{", ".join(tensors)}}}}}'


def _boxes(cuts: Sequence[Cut]) -> Iterator[list[str]]:
    """Yield the boxes of each shard that hold something, as JSON."""
    sides = []
    for cut in cuts:
        digits = product(*map(range, cut.sizes))
        pieces = [cut.intervals(places) for places in digits]
        sides.append([[f"[{low}, {high}]" for low, high, _ in of if low < high] for of in pieces])
    for shard in product(*sides):
        yield [f"[{', '.join(box)}]" for box in product(*shard)]


def _file(rank: int, number: int) -> str:
    """Return the name of a rank's file in the checkpoint of this number, counted from 0 in each folder."""
    return f"rank-{rank:05d}{f'-{number}' if number else ''}.safetensors"


def _key(name: str, box: Box) -> str:
    return f"{name}@{','.join(f'{start}:{stop}' for start, stop in box)}"


# -- reading --------------------------------------------------------------------------------------------------------


def load(
    folder: str | Path | Checkpoint,
    into: Mapping[str, Tensor],
    shardings: Mapping[str, Sharding],
    *,
    rank: int,
    names: Mapping[str, str] | None = None,
) -> int:
    """Fill this rank's shards from a checkpoint of any layout, and return the bytes read. No rank waits for another.

    ``names`` gives the name in the checkpoint where it is another. A tensor of another dtype is converted. Raises
    ``TransferError`` for names and shapes that the checkpoint does not have, and for boxes that are not all there.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
    wanted = {name: sharding for name, sharding in shardings.items() if sharding.holds(rank)}
    there = {name: (names or {}).get(name, name) for name in wanted}
    for name, sharding in wanted.items():
        _check(checkpoint, there[name], sharding)
    targets = {name: local(tensor) for name, tensor in into.items() if name in wanted}
    _check_targets(targets, wanted, rank)
    incomplete = dict.fromkeys((*(into.incomplete if isinstance(into, Shards) else ()), *wanted))
    mark(into, incomplete)
    total = 0
    with _Opened() as opened:
        for name, sharding in wanted.items():
            total += _fill(checkpoint, opened, there[name], targets[name], sharding, rank)
            del incomplete[name]
            mark(into, incomplete)
    return total


def _fill(checkpoint: Checkpoint, opened: _Opened, name: str, target: Tensor, sharding: Sharding, rank: int) -> int:
    shard, missing, total = sharding.of(rank), 0, 0
    for box in shard.boxes:
        found = [(one, shared) for one in checkpoint.tensors[name].boxes if (shared := meet(box, one.box)) is not None]
        missing += uncovered(box, (shared for _, shared in found))
        for one, shared in found if not missing else ():
            inside = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(shared, one.box, strict=True))
            part = _read(checkpoint, opened, name, one, inside)
            target[where(shard, shared)].copy_(part)
            total += part.numel() * part.element_size()
    if missing:
        raise TransferError(
            f"checkpoint {str(checkpoint.folder)!r} holds {shard.size - missing} of the {shard.size} elements of "
            f"{name!r} that rank {rank} needs; read another checkpoint",
            name=name,
            folder=checkpoint.folder,
        )
    return total


def _read(checkpoint: Checkpoint, opened: _Opened, name: str, one: Stored | Chunk, inside: Slices) -> Tensor:
    """Return a part of a stored box. Raises ``TransferError`` where the file does not have it as the index says."""
    try:
        part = _part(checkpoint.folder, opened, one, inside)
        if list(part.shape) != [side.stop - side.start for side in inside]:
            raise Unreadable("has another shape there than its index says")
    except MissingExtra:
        raise
    except Exception as error:
        raise TransferError(
            f"{name!r} cannot be read from {str(checkpoint.folder / one.file)!r} ({first_line(error)}); the "
            "checkpoint is truncated; read another",
            file=one.file,
            folder=checkpoint.folder,
        ) from error
    return part


def _part(folder: Path, opened: _Opened, one: Stored | Chunk, inside: Slices) -> Tensor:
    """Return a part of a stored box: a safetensors file is mapped, so that the rest is not read."""
    if isinstance(one, Chunk):
        return read_chunk(folder, one)[inside]
    file = opened.file(folder / one.file)
    part: Tensor = file.get_slice(one.key)[inside] if inside else file.get_tensor(one.key)
    return part


def _check(checkpoint: Checkpoint, name: str, sharding: Sharding) -> None:
    if name not in checkpoint.tensors:
        raise TransferError(
            f"checkpoint {str(checkpoint.folder)!r} does not have {name!r}; it has {len(checkpoint.tensors)} tensors, "
            f"such as {next(iter(checkpoint.tensors), 'none')!r}; give its name there in names",
            name=name,
            folder=checkpoint.folder,
        )
    shape = checkpoint.tensors[name].shape
    if shape != sharding.shape:
        raise TransferError(
            f"{name!r} has shape {shape} in {str(checkpoint.folder)!r}, and its sharding is "
            f"of shape {sharding.shape}; a checkpoint is read as it is; give the sharding of that shape",
            name=name,
            folder=checkpoint.folder,
        )


def _check_targets(targets: Mapping[str, Tensor], shardings: Mapping[str, Sharding], rank: int) -> None:
    for name, sharding in shardings.items():
        shape = tuple(targets[name].shape) if name in targets else None
        if shape != sharding.of(rank).shape:
            given = "no tensor" if shape is None else f"a tensor of shape {shape}"
            raise TransferError(
                f"{given} is given for {name!r}, of which rank {rank} holds {sharding.of(rank).shape}; allocate the "
                "targets with Transfer.allocate(rank)",
                name=name,
            )


# -- the three formats ----------------------------------------------------------------------------------------------


def _read_index(place: Path) -> tuple[Any, int]:
    """Return the index in a folder, and the number of its checkpoint."""
    index = parse_json(read_text(place / INDEX, documents.INDEX.size), documents.INDEX)
    if index.get("schema") != _SCHEMA:
        raise Unreadable(f"is of schema {quoted(index.get('schema'))}, and this version reads {_SCHEMA}")
    number = index.get("number", 0)
    if type(number) is not int or number < 0:
        raise Unreadable(f"has {quoted(number)} as the number of a checkpoint")
    return index, number


def _rankmesh(place: Path) -> Checkpoint:
    index, number = _read_index(place)
    about = index["about"]
    if not isinstance(about, dict):
        raise Unreadable(f"has {quoted(about)} as about")
    tensors = {}
    for name, entry in index["tensors"].items():
        shape = _shape(entry["shape"])
        boxes = [(rank, _box(box, shape)) for rank, box in entry["boxes"]]
        stored = [Stored(_file(rank, number), _key(name, box), box) for rank, box in boxes]
        tensors[name] = StoredTensor(shape, str(entry["dtype"]), stored)
    return Checkpoint(place, tensors, about)


def _shape(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise Unreadable(f"has {quoted(values)} as a shape")
    return tuple(values)


def _box(values: Any, shape: tuple[int, ...]) -> Box:
    box = tuple((start, stop) for start, stop in values)
    ends = [0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=True)]
    if not all(ends) or any(type(edge) is not int for side in box for edge in side):
        raise Unreadable(f"has {quoted(values)} as a box of shape {quoted(shape)}")
    return box


_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool", "C64": "complex64"}
_NAMES |= {f"{sign}{bits}": f"{kind}{bits}" for sign, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}
_NAMES |= {f"F8_{kind.upper()}": f"float8_{kind}" for kind in ("e5m2", "e4m3fnuz", "e5m2fnuz")}
_NAMES |= {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
CODES = {name: code for code, name in _NAMES.items()}


def _safetensors(place: Path, files: Sequence[Path]) -> Checkpoint:
    """Return the checkpoint of whole tensors in files, as their headers list them."""
    tensors: dict[str, StoredTensor] = {}
    with _Opened() as opened:
        for path in files:
            file = opened.file(path)
            for name in file.keys():  # noqa: SIM118  - it is not a mapping
                if name in tensors:
                    raise Unreadable(f"has {quoted(name)} twice, in {tensors[name].boxes[0].file} and in {path.name}")
                entry = file.get_slice(name)
                shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
                whole = Stored(path.name, name, tuple((0, length) for length in shape))
                tensors[name] = StoredTensor(shape, _NAMES.get(dtype, dtype), [whole])
    return Checkpoint(place, tensors)


def _distributed(place: Path) -> Checkpoint:
    """Return torch's distributed checkpoint: chunks of each tensor, each somewhere in a file."""
    found = list(chunks_of(place))
    tensors = {
        name: StoredTensor(shape, str(dtype).removeprefix("torch."), chunks)
        for name, dtype, shape, chunks in found
        if dtype is not None
    }
    return Checkpoint(place, tensors, objects=tuple(name for name, dtype, _, _ in found if dtype is None))
