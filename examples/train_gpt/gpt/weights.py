"""Weights: each is one whole tensor, made from the seed and its name, of which this rank holds a box.

```
whole (256, 64), cut 0 over tp=2      rank 0 holds rows 0..127, rank 1 rows 128..255
experts (4, 256, 64) over ep=2, tp=2  rank (ep 1, tp 0) holds experts 2..3, units 0..127
```

So every layout starts from the same model, and a checkpoint of one layout fits any other.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .layout import Groups

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """The part of one weight that this rank holds: ``box`` is (start, stop) for each dimension of the whole.

    ``counted``: of the ranks of one model that hold this box, this is the one whose copy counts in the norm.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    expert: bool
    counted: bool
    parameter: nn.Parameter


class Weights:
    """Makes the weights of this rank, and knows them all."""

    def __init__(self, groups: Groups, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.groups, self.seed, self.dtype, self.device = groups, seed, dtype, device
        self.pieces: list[Piece] = []

    def dense(
        self, name: str, *shape: int, scale: float | None, cut: int | None = None, counted: bool = True
    ) -> nn.Parameter:
        """A weight that all replicas hold, dimension ``cut`` of which is split over tp; without a scale it is one."""
        box = [(0, size) for size in shape]
        if cut is not None:
            box[cut] = _share(shape[cut], self.groups.tp)
        once = cut is not None or self.groups.tp.rank() == 0
        return self._make(name, shape, tuple(box), scale, expert=False, counted=counted and once)

    def expert(self, name: str, *shape: int, scale: float) -> nn.Parameter:
        """Weights of experts, (experts, hidden units, ...): experts are split over ep, their units over ep_tp."""
        box = (_share(shape[0], self.groups.ep), _share(shape[1], self.groups.ep_tp), (0, shape[2]))
        return self._make(name, shape, box, scale, expert=True, counted=True)

    def _make(
        self, name: str, shape: tuple[int, ...], box: Box, scale: float | None, *, expert: bool, counted: bool
    ) -> nn.Parameter:
        whole = self._whole(name, shape, scale)
        part = whole[tuple(slice(*edges) for edges in box)]
        parameter = nn.Parameter(part.to(self.device, self.dtype, copy=True).contiguous())
        self.pieces.append(Piece(name, shape, box, expert, counted, parameter))
        return parameter

    def _whole(self, name: str, shape: tuple[int, ...], scale: float | None) -> Tensor:
        if scale is None:
            return torch.ones(shape, dtype=torch.float64)
        source = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return scale * torch.randn(shape, dtype=torch.float64, generator=source)


def _share(size: int, group: ProcessGroup) -> tuple[int, int]:
    each = size // group.size()
    return group.rank() * each, (group.rank() + 1) * each
