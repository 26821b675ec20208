"""The model: blocks of attention and feed-forward, and the stage of it that this rank holds.

Every second block has experts; the output uses the table of the embedding, so the first and the last stage both hold
it. Places enter by rotation of queries and keys (Su et al., 2021), which needs no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .collectives import copied, summed
from .context_parallel import causal_attention, places
from .experts import Experts
from .layout import Groups, Refused, Sizes
from .tensor_parallel import FeedForward, cross_entropy, embedded
from .text import VOCABULARY, Microbatch
from .weights import Weights


@dataclass(frozen=True)
class Shape:
    """The sizes of the model and of the batch of one step; ``experts=0`` makes every block a dense one."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    experts: int = 4
    top: int = 2
    sequence: int = 128
    batch: int = 8
    microbatches: int = 2

    def check(self, sizes: Sizes) -> None:
        """Raise ``Refused``, in one sentence, for what a layout cannot divide."""
        for what, number, by, divisor in (
            ("hidden", self.hidden, "2 · heads", 2 * self.heads),
            ("heads", self.heads, "tp", sizes.tp),
            ("4 · hidden", 4 * self.hidden, "tp", sizes.tp),
            ("the vocabulary", VOCABULARY, "tp", sizes.tp),
            ("sequence", self.sequence, "2 · cp", 2 * sizes.cp),
            ("layers", self.layers, "pp", sizes.pp),
            ("experts", self.experts, "ep", sizes.ep),
            ("batch", self.batch, "dp · microbatches", sizes.dp * self.microbatches),
        ):
            if divisor < 1 or number % divisor:
                raise Refused(f"{by} = {divisor} does not divide {what} = {number}; change one")
        if sizes.ep > 1 and not self.experts:
            raise Refused(f"ep = {sizes.ep} needs experts, and this model has none; leave ep out, or add experts")
        if self.experts and not 1 <= self.top <= self.experts:
            raise Refused(f"top = {self.top} is not in 1 to {self.experts}, the number of experts; change one")


class Attention(nn.Module):
    """Causal attention; the heads are split over tp, the sequence over cp."""

    def __init__(self, name: str, shape: Shape, scale: float, weights: Weights) -> None:
        super().__init__()
        self.groups = weights.groups
        width = shape.hidden // shape.heads
        self.inward = weights.dense(f"{name}.in", 3, shape.heads, width, shape.hidden, cut=1, scale=shape.hidden**-0.5)
        self.outward = weights.dense(f"{name}.out", shape.heads, width, shape.hidden, cut=0, scale=scale)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        """(batch, places, hidden) to the same; ``where`` are the places of this rank in the whole sequence."""
        queries, keys, values = torch.einsum("bpe,thwe->tbhpw", copied(x, self.groups.tp), self.inward)
        seen = causal_attention(rotated(queries, where), rotated(keys, where), values, self.groups.cp)
        return summed(torch.einsum("bhpw,hwe->bpe", seen, self.outward), self.groups.tp)


def rotated(x: Tensor, where: Tensor) -> Tensor:
    """Pairs of components turned by an angle that grows with the place, (..., places, width)."""
    half = x.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = where[:, None].double() * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention and feed-forward, each on normalised input, each added to what came in."""

    def __init__(self, index: int, shape: Shape, weights: Weights) -> None:
        super().__init__()
        name, hidden, units = f"block{index}", shape.hidden, 4 * shape.hidden
        scale = (2 * shape.layers * hidden) ** -0.5
        self.norm1 = weights.dense(f"{name}.norm1", hidden, scale=None)
        self.norm2 = weights.dense(f"{name}.norm2", hidden, scale=None)
        self.attention = Attention(f"{name}.attention", shape, scale, weights)
        self.feed_forward: nn.Module
        if shape.experts and index % 2:
            self.feed_forward = Experts(f"{name}.experts", hidden, units, shape.experts, shape.top, scale, weights)
        else:
            self.feed_forward = FeedForward(f"{name}.dense", hidden, units, scale, weights)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        """(batch, places, hidden) to the same."""
        x = x + self.attention(F.rms_norm(x, x.shape[-1:], self.norm1), where)
        normed: Tensor = self.feed_forward(F.rms_norm(x, x.shape[-1:], self.norm2))
        return x + normed


class Stage(nn.Module):
    """The blocks of this rank's stage; the first embeds tokens, the last takes the loss."""

    def __init__(self, shape: Shape, groups: Groups, weights: Weights) -> None:
        super().__init__()
        index, count = groups.pp.rank(), groups.pp.size()
        self.groups, self.shape = groups, shape
        self.is_first, self.is_last = index == 0, index == count - 1
        self.where = places(shape.sequence, groups.cp).to(weights.device)
        if self.is_first or self.is_last:
            # Two stages hold the table: the first one's copy counts.
            self.table = weights.dense("table", VOCABULARY, shape.hidden, cut=0, scale=0.02, counted=self.is_first)
        each = shape.layers // count
        self.blocks = nn.ModuleList(Block(i, shape, weights) for i in range(index * each, (index + 1) * each))
        if self.is_last:
            self.norm = weights.dense("norm", shape.hidden, scale=None)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """What goes from stage to stage: (batch, places, hidden)."""
        rows = self.shape.batch // self.groups.replicas // self.shape.microbatches
        return rows, len(self.where), self.shape.hidden

    def forward(self, microbatch: Microbatch, x: Tensor | None) -> Tensor:
        """The input of the next stage; of the last, this microbatch's part of the mean loss of the whole batch."""
        if x is None:
            x = embedded(microbatch.tokens, self.table, self.groups.tp)
        for block in self.blocks:
            x = block(x, self.where)
        if not self.is_last:
            return x
        x = F.rms_norm(x, x.shape[-1:], self.norm)
        loss = cross_entropy(x, self.table, microbatch.targets, self.groups.tp)
        return loss / (self.shape.batch * self.shape.sequence)
