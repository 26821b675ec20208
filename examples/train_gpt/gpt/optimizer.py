"""AdamW, sharded (ZeRO-1): the replicas of a weight share its optimizer, each updating one part of it.

```
             replicas hold           gradients                update       values
dense        shards                  scatter-sum over shards  own columns  gather over shards
experts      expert_shards           the same over expert_shards
```

Gradients are sums over the tokens of the whole batch, so no replica count divides them.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from .collectives import gather, scatter_sum, total
from .layout import Groups
from .weights import Piece, Weights

MOMENTS = ("exp_avg", "exp_avg_sq")


class Share:
    """All weights of one kind. This rank updates its part: as many columns (last dimension) as each other replica.

    ``part``, its gradient and its moments are flat: this rank's columns of one weight after the other, zeros where
    columns do not divide.
    """

    def __init__(self, pieces: list[Piece], replicas: ProcessGroup, rate: float) -> None:
        self.pieces, self.replicas = pieces, replicas
        self.values = [piece.parameter.detach() for piece in pieces]
        self.gradients = [torch.zeros_like(value) for value in self.values]
        for piece, gradient in zip(pieces, self.gradients, strict=True):
            piece.parameter.grad = gradient
        counted = [torch.full_like(piece.parameter, piece.counted, dtype=torch.bool) for piece in pieces]
        self.counted = self.rows(counted)[replicas.rank()]
        self.part = nn.Parameter(self.rows(self.values)[replicas.rank()])
        self.gradient = torch.zeros_like(self.part)
        self.adam = torch.optim.AdamW([self.part], lr=rate)
        self.adam.state[self.part] = {
            "step": torch.tensor(0.0),
            **{moment: torch.zeros_like(self.part.detach()) for moment in MOMENTS},
        }

    def rows(self, tensors: list[Tensor]) -> Tensor:
        """Return a row for each replica: its columns of every tensor, flat."""
        size = self.replicas.size()
        padded = [functional.pad(tensor, (0, -tensor.shape[-1] % size)) for tensor in tensors]
        by_replica = [tensor.unflatten(-1, (size, -1)).movedim(-2, 0).flatten(1) for tensor in padded]
        return torch.cat(by_replica, dim=1)

    def columns(self, row: Tensor) -> list[Tensor]:
        """Return views of one replica's row: its columns of each weight."""
        shapes = [(*value.shape[:-1], -(-value.shape[-1] // self.replicas.size())) for value in self.values]
        return [one.view(shape) for one, shape in zip(row.split([*map(prod, shapes)]), shapes, strict=True)]

    def state(self) -> dict[str, Tensor]:
        """Return views of every weight, and of this rank's columns of its moments."""
        state = {piece.name: value for piece, value in zip(self.pieces, self.values, strict=True)}
        for moment in MOMENTS:
            columns = self.columns(self.adam.state[self.part][moment])
            state |= {f"{piece.name}.{moment}": one for piece, one in zip(self.pieces, columns, strict=True)}
        return state

    def restore(self, step: int) -> None:
        """Go on after so many steps from what was written to ``state()``."""
        self.part.data.copy_(self.rows(self.values)[self.replicas.rank()])
        self.adam.state[self.part]["step"].fill_(step)

    def collect(self) -> Tensor:
        """Sum the gradients of this rank's part over the replicas; the square of their norm, each weight once."""
        self.gradient = scatter_sum(self.rows(self.gradients), self.replicas)
        return torch.where(self.counted, self.gradient, 0).square().sum()

    def update(self, factor: Tensor) -> None:
        """One step of AdamW with the gradients times ``factor``; every replica gets all values."""
        self.part.grad = self.gradient * factor
        self.adam.step()
        rows = [self.columns(row) for row in gather(self.part.detach(), self.replicas)]
        for value, gradient, *columns in zip(self.values, self.gradients, *rows, strict=True):
            value.copy_(torch.cat(columns, dim=-1)[..., : value.shape[-1]])
            gradient.zero_()


class ShardedAdamW:
    """AdamW for this rank's weights, with clipping by the norm of all gradients of the model."""

    def __init__(self, weights: Weights, groups: Groups, rate: float, clip: float) -> None:
        self.groups, self.clip, self.device = groups, clip, weights.device
        self.dtype = weights.dtype
        dense = [piece for piece in weights.pieces if not piece.expert]
        experts = [piece for piece in weights.pieces if piece.expert]
        self.table = next((piece.parameter for piece in dense if piece.name == "table"), None)
        # A sum's order follows the place in the buffer. The table, which two stages have, has the same place on both
        # in a buffer of its own: its copies stay equal to the bit.
        tied = self.table if any(group.size() > 1 for group in groups.tied) else None
        parts = [[piece for piece in dense if (piece.parameter is tied) == apart] for apart in (False, True)]
        self.dense = [Share(pieces, groups.shards, rate) for pieces in parts if pieces]
        self.experts = Share(experts, groups.expert_shards, rate) if experts else None

    @property
    def shares(self) -> list[Share]:
        """The dense shares, and that of the experts where this stage has some."""
        return self.dense if self.experts is None else [*self.dense, self.experts]

    def step(self) -> float:
        """Update all weights; the norm of the gradients before clipping."""
        if self.table is not None and self.table.grad is not None:
            total(self.table.grad, *self.groups.tied)
        norm = self.norm()
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        for share in self.shares:
            share.update(factor)
        return float(norm)

    def norm(self) -> Tensor:
        """The norm over the whole model: dense weights and experts are replicated over, and split by, other groups."""
        none = torch.zeros((), dtype=self.dtype, device=self.device)
        collected = [share.collect() for share in self.dense]
        dense = total(torch.stack(collected).sum(), self.groups.shards, *self.groups.model)
        experts = self.experts.collect() if self.experts else none
        return (dense + total(experts, self.groups.expert_shards, *self.groups.expert_model)).sqrt()
