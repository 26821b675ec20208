"""Checkpoints without a layout: boxes of whole weights with their moments, which any layout cuts anew.

```
DIR/step-000050/rank-00003.pt      the boxes of which rank 3 holds the copy that counts
DIR/step-000050/checkpoint.json    step and model; written last, so a folder without it is not a checkpoint
```
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import gather, total
from .layout import Refused
from .model import Shape
from .optimizer import MOMENTS, ShardedAdamW, Share
from .weights import Box, Piece

INDEX = "checkpoint.json"
Entries = Mapping[str, list[dict[str, Any]]]


def save(folder: Path, step: int, shape: Shape, optimizer: ShardedAdamW) -> None:
    """Write the state after so many steps; returns on every rank when all of it is there."""
    place = folder / f"step-{step:06d}"
    place.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        (place / INDEX).unlink(missing_ok=True)
    files = _of_all(optimizer, 1)
    entries = [entry for share in optimizer.shares for entry in _entries(share)]
    torch.save(entries, _file(place, dist.get_rank()))
    numbers = _of_all(optimizer, sum(entry["value"].numel() for entry in entries))
    if dist.get_rank() == 0:
        index = {"step": step, "files": files, "numbers": numbers, "model": _model(shape)}
        (place / "part").write_text(json.dumps(index), encoding="utf-8")
        (place / "part").rename(place / INDEX)
    _of_all(optimizer, 1)


def load(folder: Path, shape: Shape, optimizer: ShardedAdamW) -> int:
    """Read the newest checkpoint of a folder, whatever layout wrote it; how many steps were done."""
    place = max((path.parent for path in folder.glob(f"step-*/{INDEX}")), default=None)
    if place is None:
        raise Refused(f"received {str(folder)!r} to resume from, which holds no checkpoint; run without --resume first")
    index = json.loads((place / INDEX).read_text(encoding="utf-8"))
    if index["model"] != _model(shape):
        raise Refused(f"received the model {_model(shape)}, but {place} holds {index['model']}; ask for the same model")
    entries = _read(place, index)
    for share in optimizer.shares:
        _restore(share, index["step"], entries)
    return int(index["step"])


def _read(place: Path, index: Mapping[str, Any]) -> Entries:
    """Every box of a checkpoint by the name of its weight; all ranks read all files, and so refuse alike."""
    entries: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    found = [path for path in (_file(place, rank) for rank in range(index["files"])) if path.is_file()]
    for path in found:
        for entry in torch.load(path, map_location="cpu", mmap=True, weights_only=True):
            entries[entry["name"]].append(entry)
    numbers = sum(entry["value"].numel() for boxes in entries.values() for entry in boxes)
    if numbers != index["numbers"]:
        raise Refused(
            f"received the checkpoint {place} with {len(found)} of {index['files']} files and {numbers} of "
            f"{index['numbers']} numbers; it is torn; resume from another"
        )
    return entries


def _file(place: Path, rank: int) -> Path:
    return place / f"rank-{rank:05d}.pt"


def _entries(share: Share) -> list[dict[str, Any]]:
    """What this rank writes of one share; the replicas hold the moments in parts, so all of them gather."""
    state = share.adam.state[share.own]
    buffers = {"value": share.values} | {name: gather(state[name], share.replicas) for name in MOMENTS}
    views = {name: share.views(buffer) for name, buffer in buffers.items()}
    return [
        {"name": piece.name, "box": piece.box} | {name: view[i].cpu().clone() for name, view in views.items()}
        for i, piece in enumerate(share.pieces)
        if piece.counted and share.replicas.rank() == 0
    ]


def _restore(share: Share, step: int, entries: Entries) -> None:
    moments = {name: torch.zeros_like(share.values) for name in MOMENTS}
    for name, buffer in {"value": share.values, **moments}.items():
        for piece, view in zip(share.pieces, share.views(buffer), strict=True):
            view.copy_(_cut(piece, entries[piece.name], name))
    own = {name: buffer[share.replicas.rank()].clone() for name, buffer in moments.items()}
    state = share.adam.state_dict() | {"state": {0: {"step": torch.tensor(float(step)), **own}}}
    share.adam.load_state_dict(state)


def _cut(piece: Piece, entries: list[dict[str, Any]], name: str) -> Tensor:
    """This rank's box, put together from the boxes that were saved."""
    whole = torch.empty([stop - start for start, stop in piece.box], dtype=torch.float64)
    for entry in entries:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.box, entry["box"], strict=True)]
        if all(start < stop for start, stop in common):
            whole[_inside(common, piece.box)] = entry[name][_inside(common, entry["box"])].double()
    return whole


def _inside(common: list[tuple[int, int]], box: Box) -> tuple[slice, ...]:
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(common, box, strict=True))


def _model(shape: Shape) -> dict[str, int]:
    """The sizes that a checkpoint depends on: not those of the batch."""
    sizes = asdict(shape)
    return {name: sizes[name] for name in ("layers", "hidden", "heads", "experts", "top")}


def _of_all(optimizer: ShardedAdamW, number: int) -> int:
    """The sum over every rank, by the groups that the norm crosses; no rank has it before all have come."""
    count = torch.tensor(number, device=optimizer.device)
    return int(total(count, optimizer.groups.shards, *optimizer.groups.model))
