"""The steps: a batch, its passes through the pipeline, one update; the loss that every rank is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

import rankmesh as rm

from . import checkpoint, layout, peers, pipeline, text
from .collectives import total
from .layout import Groups, Sizes
from .model import Shape, Stage
from .optimizer import ShardedAdamW
from .shardings import shardings
from .weights import Weights

DTYPES = {"float32": torch.float32, "float64": torch.float64}

# The same groups in the words of whoever names them: one line to change.
GROUPS: dict[str, Callable[[Sizes], AbstractContextManager[Groups]]] = {
    "rankmesh": layout.rankmesh,
    "megatron": peers.megatron,
    "megatron-core": peers.megatron_core,
    "nanotron": peers.nanotron,
    "process_groups": peers.process_groups,
}


@dataclass(frozen=True)
class Run:
    """What is trained, and how; the same values give the same losses under any layout."""

    shape: Shape = field(default_factory=Shape)
    steps: int = 50
    seed: int = 0
    rate: float = 3e-3
    clip: float = 1.0
    dtype: str = "float32"


@dataclass(frozen=True)
class Step:
    """One step, counted from 0: the mean loss in nats a byte before it, and the norm of the gradients."""

    index: int
    loss: float
    norm: float


class Trainer:
    """The model and optimizer of this rank."""

    def __init__(self, run: Run, groups: Groups, device: torch.device) -> None:
        self.run, self.groups, self.device = run, groups, device
        self.weights = Weights(groups, run.seed, DTYPES[run.dtype], device)
        self.stage = Stage(run.shape, groups, self.weights)
        self.optimizer = ShardedAdamW(self.weights, groups, run.rate, run.clip)
        self.text = text.read()

    def step(self, index: int) -> Step:
        """Train on the batch of this step."""
        shape, groups = self.run.shape, self.groups
        whole = text.batch(self.text, self.run.seed, index, shape.batch, shape.sequence).to(self.device)
        parts = text.microbatches(whole, groups.replica, groups.replicas, shape.microbatches, self.stage.where)
        like = torch.empty(self.stage.input_shape, dtype=DTYPES[self.run.dtype], device=self.device)
        loss = total(pipeline.train(self.stage, parts, groups.pp, like), groups.data, groups.pp)
        norm = self.optimizer.step()
        return Step(index, float(loss), norm)

    def steps(self, start: int = 0) -> Iterator[Step]:
        """All steps that are left."""
        for index in range(start, self.run.steps):
            yield self.step(index)

    @cached_property
    def shardings(self) -> dict[str, rm.Sharding]:
        """How every weight and its moments lie on this layout, those of other ranks too."""
        return shardings(self.run.shape, self.groups, DTYPES[self.run.dtype])

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights and its columns of their moments, as they are in memory."""
        return {name: tensor for share in self.optimizer.shares for name, tensor in share.state().items()}

    def restore(self, step: int) -> None:
        """Go on after so many steps from what was written to ``state()``."""
        for share in self.optimizer.shares:
            share.restore(step)

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint after so many steps."""
        checkpoint.save(folder, step, self.run.shape, self.state(), self.shardings)

    def resume(self, folder: Path) -> int:
        """Read the newest checkpoint; how many steps were done."""
        step = checkpoint.load(folder, self.run.shape, self.state(), self.shardings, self.groups)
        self.restore(step)
        return step
