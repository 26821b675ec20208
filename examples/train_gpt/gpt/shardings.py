"""How every weight of the model lies on a layout: what moves a state from one layout to another.

```
table (256, 64)          ("tp", None) on the first and the last stage          copies over dp and cp
  its moments            ("tp", "dp-cp") on the same stages                    no copies
experts (4, 256, 64)     ("ep", "etp", None) on the stage of the block         copies over edp
  their moments          ("ep", "etp", "edp") on the same stage                no copies
```

The model itself is asked: its blocks are made once without memory, by a listing in place of weights.
"""

from __future__ import annotations

import torch
from torch import nn

import rankmesh as rm

from .layout import Groups
from .model import Block, Shape
from .optimizer import MOMENTS
from .text import VOCABULARY
from .weights import Weights


class Listing(Weights):
    """Notes how each weight would lie, and makes none."""

    def __init__(self, groups: Groups, dtype: torch.dtype) -> None:
        super().__init__(groups, 0, dtype, torch.device("meta"))
        self.stage: tuple[int, ...] = (0,)
        self.found: dict[str, rm.Sharding] = {}

    def dense(
        self, name: str, *shape: int, scale: float | None, cut: int | None = None, counted: bool = True
    ) -> nn.Parameter:
        """A weight of which dimension ``cut`` is split over tp."""
        return self._note(name, shape, tuple("tp" if dim == cut else None for dim in range(len(shape))))

    def expert(self, name: str, *shape: int, scale: float) -> nn.Parameter:
        """Weights of experts: experts over ep, their units over the tp of experts."""
        return self._note(name, shape, (*self.groups.expert_axes, None), expert=True)

    def _note(
        self, name: str, shape: tuple[int, ...], cut: tuple[str | None, ...], *, expert: bool = False
    ) -> nn.Parameter:
        groups, dtype, at = self.groups, str(self.dtype), {"pp": self.stage}
        replicas, view = (groups.expert_shards, groups.expert_view) if expert else (groups.shards, None)
        self.found[name] = rm.Sharding(groups.mesh, cut, shape, dtype, at, view)
        # Replicas divide the last dimension: each has as many columns as the first.
        columns = (*cut[:-1], groups.shard_axes[expert])
        padded = {len(shape) - 1: -(-shape[-1] // replicas.size()) * replicas.size()}
        moments = rm.Sharding(groups.mesh, columns, shape, dtype, at, view, padded=padded)
        self.found |= {f"{name}.{moment}": moments for moment in MOMENTS}
        return nn.Parameter(torch.empty(shape, device=self.device))


def shardings(shape: Shape, groups: Groups, dtype: torch.dtype) -> dict[str, rm.Sharding]:
    """Every weight and its moments, by name."""
    listing, stages = Listing(groups, dtype), groups.pp.size()
    listing.stage = (0, -1)
    listing.dense("table", VOCABULARY, shape.hidden, scale=None, cut=0)
    for index in range(shape.layers):
        listing.stage = (index * stages // shape.layers,)
        Block(index, shape, listing)
    listing.stage = (-1,)
    listing.dense("norm", shape.hidden, scale=None)
    return listing.found
