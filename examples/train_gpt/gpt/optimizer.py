"""AdamW, sharded (ZeRO-1): the replicas of a weight share its optimizer, each updating one part of it.

```
             replicas hold           gradients                update       values
dense        shards                  scatter-sum over shards  own part     gather over shards
experts      expert_shards           the same over expert_shards
```

Gradients are sums over the tokens of the whole batch, so no replica count divides them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .collectives import gather, scatter_sum, total
from .layout import Groups
from .weights import Piece, Weights

MOMENTS = ("exp_avg", "exp_avg_sq")


class Share:
    """All weights of one kind in one flat buffer, of which this rank updates one of ``size`` equal parts."""

    def __init__(self, pieces: list[Piece], replicas: ProcessGroup, rate: float) -> None:
        self.pieces, self.replicas = pieces, replicas
        first, length = pieces[0].parameter, sum(piece.parameter.numel() for piece in pieces)
        each = -(-length // replicas.size())
        self.values, self.gradients = (first.new_zeros(replicas.size(), each) for _ in range(2))
        counted = torch.zeros_like(self.values, dtype=torch.bool)
        for piece, value, gradient, counts in zip(
            pieces, self.views(self.values), self.views(self.gradients), self.views(counted), strict=True
        ):
            value.copy_(piece.parameter.detach())
            counts.fill_(piece.counted)
            piece.parameter.data, piece.parameter.grad = value, gradient
        self.counted = counted[replicas.rank()]
        self.part = nn.Parameter(self.values[replicas.rank()])
        self.gradient = torch.zeros_like(self.part)
        self.adam = torch.optim.AdamW([self.part], lr=rate)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """A buffer of all weights as one tensor for each piece."""
        sizes = [piece.parameter.numel() for piece in self.pieces]
        parts = buffer.flatten()[: sum(sizes)].split(sizes)
        return [part.view(piece.parameter.shape) for part, piece in zip(parts, self.pieces, strict=True)]

    def state(self) -> dict[str, Tensor]:
        """Every weight with its moments, as this rank holds it; replicas hold moments in parts, and gather."""
        kept = self.adam.state[self.part] or dict.fromkeys(
            MOMENTS, torch.zeros_like(self.part)
        )  # before the first step
        buffers = {"": self.values} | {f".{name}": gather(kept[name], self.replicas) for name in MOMENTS}
        return {
            f"{piece.name}{suffix}": view
            for suffix, buffer in buffers.items()
            for piece, view in zip(self.pieces, self.views(buffer), strict=True)
        }

    def restore(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Go on from a state after so many steps."""
        local = {}
        for suffix in ("", *(f".{name}" for name in MOMENTS)):
            buffer = torch.zeros_like(self.values) if suffix else self.values
            for piece, view in zip(self.pieces, self.views(buffer), strict=True):
                view.copy_(state[f"{piece.name}{suffix}"])
            local[suffix[1:]] = buffer[self.replicas.rank()].clone()
        del local[""]
        kept = self.adam.state_dict() | {"state": {0: {"step": torch.tensor(float(step)), **local}}}
        self.adam.load_state_dict(kept)

    def collect(self) -> Tensor:
        """Sum the gradients of this rank's part over the replicas; the square of their norm, each weight once."""
        self.gradient = scatter_sum(self.gradients, self.replicas)
        return torch.where(self.counted, self.gradient, 0).square().sum()

    def update(self, factor: Tensor) -> None:
        """One step of AdamW with the gradients times ``factor``; every replica gets all values."""
        self.part.grad = self.gradient * factor
        self.adam.step()
        self.values.copy_(gather(self.part.detach().clone(), self.replicas))
        self.gradients.zero_()


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
