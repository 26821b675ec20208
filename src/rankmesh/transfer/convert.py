"""Conversion of a checkpoint in files: every tensor, bit for bit, under the name that it has.

```
from    Hugging Face's safetensors, torch's distributed checkpoint, Megatron's torch_dist, `rankmesh.transfer.files`
to      safetensors    model-00001-of-00004.safetensors, ..., model.safetensors.index.json
        dcp            torch's distributed checkpoint: dcp.load reads it under any layout
```

Nothing is renamed, split or fused, so what another framework would look for under another name is refused. A conversion
takes three times ``budget`` and twice a chunk of the source in memory: files are mapped, or written batch by batch. The
target gets its name when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rankmesh.core.boxes import size, uncovered
from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import DTYPES, Sharding
from rankmesh.errors import TransferError, quoted, quoted_path
from rankmesh.transfer.files import CODES, Checkpoint, StoredTensor, load, safetensors_header
from rankmesh.transfer.torch_checkpoint import Chunk

__all__ = ["FORMATS", "beside", "convert"]

BUDGET = 64 << 20
_FILE = 5 << 30
# Patterns that an error proposes at most.
_SHOWN = 4
_MEGATRON = re.compile(r"(^|\.)(decoder\.layers|encoder\.layers|embedding\.word_embeddings|output_layer)\.")
Progress = Callable[[int, int], object]
# Tensors that are read at once: their shardings, and the rank whose part it is.
Batch = tuple[dict[str, Sharding], int]


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    leave_out: Iterable[str] = (),
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write the tensors of a checkpoint into a new folder in another format, and return the bytes of each.

    ``to`` is a name of ``FORMATS``; names that a pattern of ``leave_out`` matches (``"optimizer.*"``) are left out;
    ``progress`` is called with the bytes written so far and in all. Raises ``TransferError``, before anything is
    written, for what cannot be converted, by name.
    """
    if to not in FORMATS:
        raise TransferError(f"unknown format {quoted(to)}; give one of {', '.join(FORMATS)}", received=to)
    checkpoint, place = _chosen(Checkpoint.open(source), tuple(leave_out), to), Path(target)
    whole = {name: Sharding(Mesh(dp=1), None, one.shape, one.dtype) for name, one in checkpoint.tensors.items()}
    sizes = {name: sharding.bytes for name, sharding in whole.items()}
    if place.exists() and (not place.name or not place.is_dir() or any(place.iterdir())):
        raise TransferError(f"{quoted_path(place)} is there already; give a new folder", folder=place)
    part = place.with_name(f".{place.name}.{os.getpid()}")
    part.mkdir(parents=True)
    try:
        for done in accumulate(FORMATS[to](checkpoint, part, whole, budget)):
            if progress is not None:
                progress(done, sum(sizes.values()))
        for name in beside(checkpoint.folder):
            shutil.copyfile(Path(checkpoint.folder, name), part / name)
        part.replace(place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return sizes


# What stands beside the tensors of a model, by which transformers loads it: configurations, tokenizer, chat template.
_BESIDE = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map"
    r"|added_tokens|vocab|chat_template)\.json|merges\.txt|vocab\.txt|tokenizer\.model|\w+\.tiktoken|chat_template\.jinja"
)
_LARGEST = 64 << 20


def beside(folder: str | Path) -> list[str]:
    """Return the names of the configuration and tokenizer files beside a checkpoint, which ``convert`` copies."""
    files = [each for each in sorted(Path(folder).iterdir()) if _BESIDE.fullmatch(each.name)]
    return [each.name for each in files if each.is_file() and each.stat().st_size <= _LARGEST]


# -- what is refused --------------------------------------------------------------------------------------------------


def _chosen(checkpoint: Checkpoint, leave_out: tuple[str, ...], to: str) -> Checkpoint:
    """Return the checkpoint without what is left out. Raises ``TransferError`` for what cannot be converted."""

    def kept(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in leave_out)

    tensors = {name: one for name, one in checkpoint.tensors.items() if kept(name)}
    _refuse(checkpoint, filter(kept, checkpoint.objects), "Python objects and no tensors")
    known = CODES.keys() & DTYPES.keys() if to == "safetensors" else DTYPES.keys()
    odd = (name for name, one in tensors.items() if one.dtype not in known)
    _refuse(checkpoint, odd, f"of a dtype that {to} does not have")
    if to == "safetensors":
        megatron = filter(_MEGATRON.search, tensors)
        what = "Megatron's, stacked over layers and fused, which Hugging Face has no such names for"
        _refuse(checkpoint, megatron, what, "convert to dcp, which keeps them, or with Megatron-Bridge or mbridge")
    incomplete = (name for name, one in tensors.items() if _missing(checkpoint.folder, one))
    _refuse(checkpoint, incomplete, "not whole in its files", "convert another checkpoint")
    if not tensors:
        raise TransferError(f"checkpoint {quoted_path(checkpoint.folder)} has no tensor to convert; leave out less")
    return replace(checkpoint, tensors=tensors)


def _refuse(checkpoint: Checkpoint, names: Iterable[str], what: str, fix: str = "") -> None:
    """Raise ``TransferError`` if there are names; without another fix, it is patterns that leave the first ones out."""
    found = tuple(names)
    if found:
        shown = ", ".join(map(quoted, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        patterns = _patterns(found, checkpoint.tensors.keys() - found)
        fix = fix or f"leave them out: {' '.join(f'--leave-out {shlex.quote(one)}' for one in patterns)}"
        raise TransferError(
            f"{shown} in {quoted_path(checkpoint.folder)}: {what}; {fix}",
            names=found,
            folder=checkpoint.folder,
        )


def _patterns(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return patterns of at most four kinds of these names, which match none of the others.

    >>> _patterns(["a._extra_state/0", "b._extra_state/0", "step"], ["a.weight", "a.step"])
    ['*_extra_state*', 'step']
    """
    found: list[str] = []
    for name in names:
        if not any(fnmatchcase(name, pattern) for pattern in found):
            short = f"*{name.rpartition('.')[2].partition('/')[0]}*"
            found.append(escape(name) if any(fnmatchcase(other, short) for other in others) else short)
            if len(found) == _SHOWN:
                break
    return found


def _missing(folder: Path, tensor: StoredTensor) -> bool:
    """Return whether elements of a tensor are in no file, or a file is shorter than its index says."""
    for one in tensor.boxes:
        file = folder / one.file
        if not file.is_file():
            return True
        if isinstance(one, Chunk):
            least = size(one.box) * DTYPES[tensor.dtype]
            if one.length < least or file.stat().st_size < one.offset + one.length:
                return True
    return uncovered(tuple((0, length) for length in tensor.shape), (one.box for one in tensor.boxes)) > 0


# -- the formats ------------------------------------------------------------------------------------------------------


def _to_safetensors(checkpoint: Checkpoint, folder: Path, whole: Mapping[str, Sharding], budget: int) -> Iterator[int]:
    """Write files of whole tensors as Hugging Face has them, and yield the bytes of each batch."""
    groups: list[dict[str, Sharding]] = []
    for name, sharding in whole.items():
        if not groups or sharding.bytes + sum(one.bytes for one in groups[-1].values()) > _FILE:
            groups.append({})
        groups[-1][name] = sharding
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        yield from _fill_file(checkpoint, folder / name, group, budget)
        index |= dict.fromkeys(group, name)
    if len(groups) > 1:
        total = sum(sharding.bytes for sharding in whole.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _fill_file(checkpoint: Checkpoint, path: Path, group: Mapping[str, Sharding], budget: int) -> Iterator[int]:
    """Write one file, which is mapped, so that its tensors need no memory."""
    header, begins = safetensors_header({name: (one.dtype, one.shape) for name, one in group.items()}, "pt")
    end = len(header) + sum(one.bytes for one in group.values())
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, end)  # a full disk is an error here; behind a mapping it kills the process
        flat = torch.from_file(str(path), shared=True, size=end, dtype=torch.uint8)
        into = {}
        for name, one in group.items():
            begin = len(header) + begins[name]
            into[name] = flat[begin : begin + one.bytes].view(getattr(torch, one.dtype)).view(one.shape)
        for batch, part in _batches(group, budget):
            rows = {name: into[name][_rows(one, part)] if one.shape else into[name] for name, one in batch.items()}
            yield load(checkpoint, rows, batch, rank=part)
        os.fsync(file.fileno())


def _rows(sharding: Sharding, part: int) -> slice:
    """Return the rows of a tensor that a part of a batch has."""
    boxes = sharding.of(part).boxes
    return slice(*boxes[0][0]) if boxes else slice(0, sharding.shape[0])


def _to_distributed(checkpoint: Checkpoint, folder: Path, whole: Mapping[str, Sharding], budget: int) -> Iterator[int]:
    """Write torch's distributed checkpoint through its own writer, a file for each batch; yield the bytes of each."""
    batches = list(_batches(whole, budget))
    writer = FileSystemWriter(folder, thread_count=1)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = create_default_global_save_plan(
        [SavePlan([_item(name, one, part) for name, one in group.items()]) for group, part in batches]
    )
    written = []
    for (group, part), plan in zip(batches, writer.prepare_global_plan(plans), strict=True):
        planner = _Planner(group, part)
        yield load(checkpoint, planner.tensors, group, rank=part)
        written.append(writer.write_data(plan, planner).wait())
        planner.tensors.clear()
    writer.finish(replace(metadata, planner_data={name: (name,) for name in whole}), written)


class _Planner(DefaultSavePlanner):
    """Gives torch's writer the tensors of a batch."""

    def __init__(self, group: Mapping[str, Sharding], part: int) -> None:
        super().__init__()
        self.tensors = {
            name: torch.empty(one.of(part).shape, dtype=getattr(torch, one.dtype)) for name, one in group.items()
        }

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.tensors[write_item.index.fqn]


def _batches(whole: Mapping[str, Sharding], budget: int) -> Iterator[Batch]:
    """Yield tensors that are read at once: several small ones, or some rows of a large one."""
    batch: dict[str, Sharding] = {}
    for name, one in whole.items():
        ways = min(-(-one.bytes // budget), one.shape[0]) if one.shape else 1
        if ways > 1:
            rows = Sharding(Mesh(dp=ways), ("dp", *[None] * (len(one.shape) - 1)), one.shape, one.dtype)
            yield from (({name: rows}, part) for part in range(ways) if rows.of(part).size)
            continue
        if batch and one.bytes + sum(sharding.bytes for sharding in batch.values()) > budget:
            yield batch, 0
            batch = {}
        batch[name] = one
    if batch:
        yield batch, 0


def _item(name: str, sharding: Sharding, part: int) -> WriteItem:
    """Return the record of a part of a tensor for torch's writer."""
    box = next(iter(sharding.of(part).boxes), tuple((0, length) for length in sharding.shape))  # none of an empty one
    offsets, sizes = (torch.Size(ends) for ends in ([low for low, _ in box], [high - low for low, high in box]))
    properties = TensorProperties(dtype=getattr(torch, sharding.dtype))
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(sharding.shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


FORMATS: Mapping[str, Callable[[Checkpoint, Path, Mapping[str, Sharding], int], Iterator[int]]] = {
    "safetensors": _to_safetensors,
    "dcp": _to_distributed,
}
