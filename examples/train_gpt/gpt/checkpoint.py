"""Checkpoints without a layout: whole tensors in boxes, of which each rank reads its own under any layout.

```
DIR/step-000050/rank-00003.safetensors      the boxes that rank 3 wrote: of copies one rank's alone
DIR/step-000050/rankmesh.json               step and model, and where each box is; written last
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rankmesh as rm
from rankmesh.transfer import files

from .collectives import total
from .layout import Groups, Refused
from .model import Shape

Shardings = Mapping[str, rm.Sharding]


def save(folder: Path, step: int, shape: Shape, state: Mapping[str, Tensor], shardings: Shardings) -> None:
    """Write the state after so many steps; returns on every rank when all of it is there."""
    about = {"step": step, "model": _model(shape)}
    files.save(folder / f"step-{step:06d}", state, shardings, rank=dist.get_rank(), about=about)


def load(folder: Path, shape: Shape, into: Mapping[str, Tensor], shardings: Shardings, groups: Groups) -> int:
    """Read the newest checkpoint of a folder, whatever layout wrote it; how many steps were done."""
    place = max((path.parent for path in folder.glob(f"step-*/{files.INDEX}")), default=None)
    if place is None:
        raise Refused(f"received {str(folder)!r} to resume from, which holds no checkpoint; run without --resume first")
    kept = files.Checkpoint.open(place)
    if kept.about["model"] != _model(shape):
        model = kept.about["model"]
        raise Refused(f"received the model {_model(shape)}, but {place} holds {model}; ask for the same model")
    torn = ""
    try:
        files.load(kept, into, shardings, rank=dist.get_rank())
    except rm.TransferError as error:
        torn = str(error)
    if _of_all(groups, bool(torn)):
        # One rank may have found what others do not read: all of them refuse.
        raise Refused(torn or f"received the checkpoint {place}, of which other ranks could not read their part")
    return int(kept.about["step"])


def _model(shape: Shape) -> dict[str, Any]:
    """The sizes that a checkpoint depends on: not those of the batch."""
    sizes = asdict(shape)
    return {name: sizes[name] for name in ("layers", "hidden", "heads", "experts", "top")}


def _of_all(groups: Groups, number: int) -> int:
    """The sum over every rank, by the groups that the norm crosses; no rank has it before all have come."""
    return int(total(torch.tensor(number), groups.shards, *groups.model))
