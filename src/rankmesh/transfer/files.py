"""Files: shards saved by all ranks, and read under any layout, each rank reading what it needs.

```
DIR/rank-00003.safetensors       boxes of whole tensors, each written by one of the ranks that hold it
DIR/rankmesh.json                which box of which tensor is where; written last: without it this is no checkpoint
```

Three kinds of folder are read: this one, safetensors as Hugging Face has them (whole tensors, in one file or several),
and torch's distributed checkpoint. A safetensors file is mapped, so of a tensor in it only what is asked for is read;
torch's checkpoint keeps each chunk as a pickle, so chunks that a rank needs part of are read whole.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankmesh.core.boxes import Box, meet, size
from rankmesh.core.extras import extra
from rankmesh.core.sharding import Sharding
from rankmesh.errors import TransferError, first_line
from rankmesh.transfer.live.shards import local
from rankmesh.transfer.live.stream import Slices, where

__all__ = ["INDEX", "Checkpoint", "Stored", "load", "save"]

INDEX = "rankmesh.json"


@dataclass(frozen=True)
class Stored:
    """A box of a whole tensor in a file: ``key`` finds it there."""

    file: str
    key: str
    box: Box


class Opened(ExitStack):
    """The safetensors files that one ``load`` has opened, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, Any] = {}

    def file(self, path: Path) -> Any:
        """The open file."""
        with extra("files"):
            from safetensors import safe_open
        if path not in self._files:
            self._files[path] = self.enter_context(safe_open(path, framework="pt"))
        return self._files[path]


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds: shape and dtype of each tensor, and where its boxes are."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    stored: Mapping[str, Sequence[Stored]]
    read: Callable[[Opened, Path, Stored, Slices], Tensor]
    about: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """The checkpoint in a folder. Raises ``TransferError`` for a folder that has none."""
        place = Path(folder)
        try:
            if (place / INDEX).is_file():
                return _own(place)
            if (place / ".metadata").is_file():
                return _distributed(place)
            files = sorted(place.glob("*.safetensors"))
            if files:
                return _safetensors(place, files)
        except (OSError, ValueError, KeyError) as error:
            raise TransferError(
                f"received {str(place)!r}, whose index cannot be read ({first_line(error)}); it is torn or of another "
                "kind; give another checkpoint",
                folder=place,
            ) from error
        raise TransferError(
            f"received {str(place)!r}, which holds no checkpoint: no {INDEX}, no *.safetensors, no .metadata; give the "
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
    about: Mapping[str, Any] | None = None,
    meet_all: Callable[[], object] | None = None,
) -> int:
    """Write this rank's boxes, of copies one rank's alone; the bytes written. Every rank calls it.

    ``about`` is kept in the index; ``meet_all`` waits for all ranks (None: ``torch.distributed.barrier``): the index is
    written when all files are there.
    """
    with extra("files"):
        from safetensors.torch import save_file
    place, wait = Path(folder), meet_all or _barrier
    place.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        (place / INDEX).unlink(missing_ok=True)
    wait()
    entries: dict[str, Tensor] = {}
    for number, (name, sharding) in enumerate(sorted(shardings.items())):
        if _writer(sharding, rank, number):
            shard = sharding.of(rank)
            own = local(tensors[name])
            entries |= {_key(name, box): own[where(shard, box)].cpu().contiguous() for box in shard.boxes if size(box)}
    # An object of its own: views of one storage are one tensor to safetensors.
    save_file({key: part.clone() for key, part in entries.items()}, place / _file(rank))
    wait()
    if rank == 0:
        (place / "part").write_text(json.dumps(_index(shardings, about or {})), encoding="utf-8")
        (place / "part").rename(place / INDEX)
    wait()
    return sum(part.numel() * part.element_size() for part in entries.values())


def _barrier() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _writer(sharding: Sharding, rank: int, number: int) -> bool:
    """Whether it is for this rank to write its cell: the copies of different tensors take turns."""
    writers = sharding.spread.ranks[:, number % sharding.spread.ranks.shape[1]]
    return sharding.holds(rank) and rank in writers


def _index(shardings: Mapping[str, Sharding], about: Mapping[str, Any]) -> dict[str, Any]:
    """Which rank wrote which box, which every rank knows of all others."""
    tensors = {}
    for number, (name, sharding) in enumerate(sorted(shardings.items())):
        writers = sharding.spread.ranks[:, number % sharding.spread.ranks.shape[1]].tolist()
        boxes = [[rank, box] for rank in writers for box in sharding.of(rank).boxes if size(box)]
        tensors[name] = {"shape": sharding.shape, "dtype": sharding.dtype, "boxes": boxes}
    return {"schema": 1, "about": dict(about), "tensors": tensors}


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


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
    """Fill this rank's shards from a checkpoint of any layout; the bytes read. No rank waits for another.

    ``names`` gives the name in the checkpoint where it is another. A tensor of another dtype is converted. Raises
    ``TransferError`` for names and shapes that the checkpoint does not have, and for boxes that are not all there.
    """
    held = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
    total = 0
    with Opened() as opened:
        for name, sharding in shardings.items():
            if sharding.holds(rank):
                stored = (names or {}).get(name, name)
                _check(held, stored, sharding)
                total += _fill(held, opened, stored, local(into[name]), sharding, rank)
    return total


def _fill(held: Checkpoint, opened: Opened, name: str, own: Tensor, sharding: Sharding, rank: int) -> int:
    shard, filled, total = sharding.of(rank), 0, 0
    for box in shard.boxes:
        for one in held.stored[name]:
            shared = meet(box, one.box)
            if shared is None:
                continue
            inside = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(shared, one.box, strict=True))
            part = _read(held, opened, one, inside)
            own[where(shard, shared)].copy_(part)
            filled, total = filled + size(shared), total + part.numel() * part.element_size()
    if filled != shard.size:
        raise TransferError(
            f"received {str(held.folder)!r}, which holds {filled} of the {shard.size} elements of {name!r} that rank "
            f"{rank} needs; it is torn; read another checkpoint",
            name=name,
            folder=held.folder,
        )
    return total


def _read(held: Checkpoint, opened: Opened, one: Stored, inside: Slices) -> Tensor:
    try:
        return held.read(opened, held.folder, one, inside)
    except Exception as error:
        raise TransferError(
            f"received {str(held.folder / one.file)!r}, of which {one.key!r} cannot be read ({first_line(error)}); the "
            "checkpoint is torn; read another",
            file=one.file,
            folder=held.folder,
        ) from error


def _check(held: Checkpoint, name: str, sharding: Sharding) -> None:
    if name not in held.shapes:
        raise TransferError(
            f"received {name!r}, which {str(held.folder)!r} does not have; it has {len(held.shapes)} tensors, such as "
            f"{next(iter(held.shapes), 'none')!r}; give its name there in names",
            name=name,
            folder=held.folder,
        )
    if tuple(held.shapes[name]) != sharding.shape:
        raise TransferError(
            f"received {name!r} of shape {sharding.shape}, which has shape {tuple(held.shapes[name])} in "
            f"{str(held.folder)!r}; a checkpoint is read as it is; give the sharding of that shape",
            name=name,
            folder=held.folder,
        )


# -- the three kinds ------------------------------------------------------------------------------------------------


def _own(place: Path) -> Checkpoint:
    index = json.loads((place / INDEX).read_text(encoding="utf-8"))
    stored = {
        name: [_stored(name, rank, tuple((a, b) for a, b in box)) for rank, box in entry["boxes"]]
        for name, entry in index["tensors"].items()
    }
    shapes = {name: tuple(entry["shape"]) for name, entry in index["tensors"].items()}
    dtypes = {name: entry["dtype"] for name, entry in index["tensors"].items()}
    return Checkpoint(place, shapes, dtypes, stored, _slice, index["about"])


def _stored(name: str, rank: int, box: Box) -> Stored:
    return Stored(_file(rank), _key(name, box), box)


_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool", "U8": "uint8"}
_NAMES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
_NAMES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def _safetensors(place: Path, files: Sequence[Path]) -> Checkpoint:
    """Whole tensors in files: what each has is in its header."""
    shapes, dtypes, stored = {}, {}, {}
    for path in files:
        for name, entry in _header(path):
            shapes[name] = tuple(entry["shape"])
            dtypes[name] = _NAMES.get(entry["dtype"], entry["dtype"])
            stored[name] = [Stored(path.name, name, tuple((0, length) for length in entry["shape"]))]
    return Checkpoint(place, shapes, dtypes, stored, _slice, {})


def _header(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a safetensors file: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is shorter than its header says")
        header = json.loads(file.read(length))
    return ((name, entry) for name, entry in header.items() if name != "__metadata__")


def _slice(opened: Opened, place: Path, one: Stored, inside: Slices) -> Tensor:
    """A part of one entry of a safetensors file, which is mapped: the rest is not read."""
    file = opened.file(place / one.file)
    part: Tensor = file.get_slice(one.key)[inside] if inside else file.get_tensor(one.key)
    return part


def _distributed(place: Path) -> Checkpoint:
    """torch's distributed checkpoint: chunks of each tensor, each a pickle somewhere in a file."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    metadata = FileSystemReader(place).read_metadata()
    shapes, dtypes, places = {}, {}, {}
    stored: dict[str, list[Stored]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        shapes[name] = tuple(entry.size)
        dtypes[name] = str(entry.properties.dtype).removeprefix("torch.")
        stored[name] = []
        for chunk in entry.chunks:
            box = tuple((start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            one = Stored(info.relative_path, _key(name, box), box)
            places[one.key] = (info.offset, info.length)
            stored[name].append(one)

    def read(_opened: Opened, folder: Path, one: Stored, inside: Slices) -> Tensor:
        import io

        offset, length = places[one.key]
        with (folder / one.file).open("rb") as file:
            file.seek(offset)
            chunk: Tensor = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
        return chunk[inside]

    return Checkpoint(place, shapes, dtypes, stored, read, {})
