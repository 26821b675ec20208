"""torch's distributed checkpoint: where its chunks are, read from ``.metadata`` without running any of it.

```
.metadata       a pickle of torch's metadata classes; each becomes a plain record here, and any other name is refused
__0_0.distcp    chunks one after the other, each what torch.save wrote: a zip archive whose entries are not compressed
```

Source: ``torch.distributed.checkpoint.metadata`` and ``.filesystem`` of torch 2.0 to 2.13.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch import Tensor

from rankmesh.core.boxes import Box
from rankmesh.core.documents import INDEX, Unreadable, open_regular, read_bytes
from rankmesh.errors import quoted

__all__ = ["METADATA", "Chunk", "chunks_of", "read_chunk"]

METADATA = ".metadata"


class _Record:
    """One of torch's objects as plain data: the name of its class, its state, and nothing that runs."""

    def __init__(self, name: str, *_: object) -> None:
        self.name = name
        self.state: dict[str, Any] = {}

    def keep(self, state: object) -> None:
        """Take the attributes; of ``TensorProperties`` the first value of its tuple, the dtype, is enough."""
        self.state = state if isinstance(state, dict) else {"state": state}

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


def _size(lengths: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(lengths)


def _text(*parts: str) -> str:
    return "/".join(parts)


def _empty() -> dict[str, object]:
    return {}


_METADATA, _SHARDED = "torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata")  # fmt: skip
# What a name in a pickle becomes: a record, or a function that makes plain data of its arguments.
_PLANNER = "torch.distributed.checkpoint.planner"
_PLANS = ("SavePlan", "TensorWriteData", "WriteItem", "BytesIOWriteData")  # Megatron keeps those
_ENUMS = {
    (module, name): partial(_Record, name)
    for module, name in (
        (_METADATA, "_MEM_FORMAT_ENCODING"), (_SHARDED, "MEM_FORMAT_ENCODING"), (_PLANNER, "WriteItemType"),
    )
}  # fmt: skip


def _member(enum: object, name: object) -> _Record:
    """Return a member of one of torch's enums: Python 3.11.0 to 3.11.3 write it as ``getattr(enum, name)``."""
    if not any(enum is known for known in _ENUMS.values()) or not isinstance(name, str):
        raise Unreadable("takes an attribute of what is none of the enums of torch's metadata")
    return cast("partial[_Record]", enum)()


_KNOWN: dict[tuple[str, str], Callable[..., object] | torch.dtype] = {
    **_ENUMS,
    ("builtins", "getattr"): _member,
    **{(_METADATA, name): partial(_Record, name) for name in _RECORDS},
    **{(_PLANNER, name): partial(_Record, name) for name in _PLANS},
    (_SHARDED, "TensorProperties"): partial(_Record, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): partial(_Record, "_StorageInfo"),
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _text,
    ("collections", "OrderedDict"): _empty,
    **{(module, f"{kind}Path"): _text for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
_MAKERS = {value for value in _KNOWN.values() if not isinstance(value, torch.dtype)}

# Python's own machine has more instructions than torch's pickles use; the rest are refused.
_Machine: Any = pickle._Unpickler
_INSTRUCTIONS = (
    "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT "
    "BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT EMPTY_SET "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL"
)


class _Unpickler(_Machine):  # type: ignore[misc]
    """Builds records, texts, numbers, tuples, lists and dicts; a pickle that names or calls anything else is refused.

    A key is a text, a number, a record or a flat tuple of these: a nested one may take for ever to hash.
    """

    dispatch = {  # noqa: RUF012  - as Python's own class has it
        getattr(pickle, name)[0]: _Machine.dispatch[getattr(pickle, name)[0]] for name in _INSTRUCTIONS.split()
    }

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _KNOWN:
            wanted = f"{str(module)[:60]}.{str(name)[:60]}"
            raise Unreadable(f"asks for {wanted}, which is none of the classes of torch's metadata")
        return _KNOWN[module, name]

    def _make(self) -> None:
        arguments = self.stack.pop()
        if not isinstance(arguments, tuple) or not any(self.stack[-1] is maker for maker in _MAKERS):
            raise Unreadable("calls what is none of the classes of torch's metadata")
        self.stack[-1] = self.stack[-1](*arguments)

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Record):
            raise Unreadable("changes what is none of the objects of torch's metadata")
        self.stack[-1].keep(state)

    def _set(self, items: list[object]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise Unreadable("sets an item of what is not a mapping")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_checked(key)] = value

    def _set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_all(self) -> None:
        self._set(self.pop_mark())

    def _add_all(self) -> None:
        items = map(_checked, self.pop_mark())
        if not isinstance(self.stack[-1], set):
            raise Unreadable("adds items to what is not a set")
        self.stack[-1].update(items)

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _make
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.SETITEM[0]] = _set_one
    dispatch[pickle.SETITEMS[0]] = _set_all
    dispatch[pickle.ADDITEMS[0]] = _add_all


def _checked(key: object) -> object:
    """Return the key of a dict or set, unless it is nested."""
    flat = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(part, str | int | _Record) for part in flat):
        raise Unreadable("has a key that none of torch's metadata has")
    return key


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the bytes of a file that it was saved in."""

    dtype: torch.dtype
    box: Box
    file: str
    offset: int
    length: int


def chunks_of(folder: Path) -> Iterator[tuple[str, torch.dtype | None, tuple[int, ...], list[Chunk]]]:
    """Yield name, dtype, shape and chunks of each tensor; of another object its name, and no dtype.

    Raises ``Unreadable`` for another file.
    """
    metadata = _metadata(read_bytes(folder / METADATA, INDEX.size))
    stored = {
        (index["fqn"], tuple(index.state.get("offset") or ())): info
        for index, info in metadata["storage_data"].items()
        if isinstance(index, _Record) and index.name == "MetadataIndex"
    }
    for name, entry in metadata["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise Unreadable(f"has {quoted(name)} where a name is")
        if isinstance(entry, _Record) and entry.name == "TensorStorageMetadata":
            dtype = entry["properties"]["state"][0]
            if not isinstance(dtype, torch.dtype):
                raise Unreadable(f"says no dtype of {quoted(name)}")
            shape = _lengths(entry["size"])
            yield name, dtype, shape, [_chunk(name, dtype, shape, one, stored) for one in entry["chunks"]]
        else:
            yield name, None, (), []


def _metadata(data: bytes) -> _Record:
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Unreadable:
        raise
    except KeyError as error:
        raise Unreadable(f"has an instruction that torch's metadata does not use ({error})") from error
    except Exception as error:  # a truncated or hostile pickle raises whatever its instructions lead to
        raise Unreadable(f"is truncated or no pickle ({type(error).__name__})") from error
    if not isinstance(found, _Record) or found.name != "Metadata":
        raise Unreadable("holds no metadata of torch")
    return found


def _chunk(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    one: _Record,
    stored: Mapping[tuple[str, tuple[int, ...]], _Record],
) -> Chunk:
    offsets, sizes = _lengths(one["offsets"]), _lengths(one["sizes"])
    box = tuple((start, start + length) for start, length in zip(offsets, sizes, strict=True))
    if len(box) != len(shape) or any(stop > length for (_, stop), length in zip(box, shape, strict=True)):
        raise Unreadable(f"has a chunk of {quoted(name)} outside of its shape {quoted(shape)}")
    info = stored[name, offsets]
    file, (offset, length) = info["relative_path"], _lengths((info["offset"], info["length"]))
    if info.state.get("transform_descriptors"):
        raise Unreadable(f"has chunks that were transformed ({quoted(info['transform_descriptors'])})")
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
        raise Unreadable(f"names the file {quoted(file)}, which is outside of the folder")
    return Chunk(dtype, box, file, offset, length)


def _lengths(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise Unreadable(f"has {quoted(type(values).__name__)} where a size is")
    return tuple(values)


def read_chunk(folder: Path, chunk: Chunk) -> Tensor:
    """Return the tensor of one chunk. Raises ``Unreadable`` if the file has something else there."""
    shape = tuple(stop - start for start, stop in chunk.box)
    with open_regular(folder / chunk.file) as file:
        if file.seek(0, io.SEEK_END) < chunk.offset + chunk.length:
            raise Unreadable("is shorter than its metadata says")
        file.seek(chunk.offset)
        data = io.BytesIO(file.read(chunk.length))
    # torch.load unpacks what is compressed, however large; torch.save compresses nothing.
    with zipfile.ZipFile(data) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise Unreadable("is compressed, as torch.save leaves nothing")
    data.seek(0)
    found = torch.load(data, map_location="cpu", weights_only=True)
    if not isinstance(found, Tensor) or found.shape != shape or found.dtype != chunk.dtype:
        raise Unreadable(f"holds no tensor of {chunk.dtype} {list(shape)} there")
    return found
