"""Tensor parallelism: the vocabulary and the hidden units are split over tp; what enters and leaves is whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .collectives import copied, largest, summed
from .weights import Weights


def embedded(tokens: Tensor, table: Tensor, tp: ProcessGroup) -> Tensor:
    """The rows of the table for the tokens; this rank has the rows of a part of the vocabulary."""
    local = tokens - tp.rank() * len(table)
    outside = (local < 0) | (local >= len(table))
    rows = F.embedding(local.masked_fill(outside, 0), table)
    return summed(rows.masked_fill(outside[..., None], 0), tp)


def cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor, tp: ProcessGroup) -> Tensor:
    """The sum of -log p(target) over all tokens, from the scores of this rank's part of the vocabulary."""
    scores = copied(hidden, tp) @ table.T
    scores = scores - largest(scores.detach().amax(-1, keepdim=True), tp)
    local = targets - tp.rank() * len(table)
    outside = (local < 0) | (local >= len(table))
    mine = scores.gather(-1, local.masked_fill(outside, 0)[..., None])[..., 0]
    wanted = summed(mine.masked_fill(outside, 0), tp)
    normaliser = summed(scores.exp().sum(-1), tp)
    return (normaliser.log() - wanted).sum()


class FeedForward(nn.Module):
    """Two matrices with a GELU between; the hidden units are split over tp."""

    def __init__(self, name: str, hidden: int, units: int, scale: float, weights: Weights) -> None:
        super().__init__()
        self.tp = weights.groups.tp
        self.up = weights.dense(f"{name}.up", units, hidden, cut=0, scale=hidden**-0.5)
        self.down = weights.dense(f"{name}.down", units, hidden, cut=0, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same."""
        units = F.gelu(copied(x, self.tp) @ self.up.T)
        return summed(torch.matmul(units, self.down), self.tp)
