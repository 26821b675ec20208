"""See: the values of a program that must be the same on every layout.

```
sim.see("loss", loss)                              a copy on every rank that sees it
sim.see("up.grad", up.weight.grad, ("tp", None))   a shard: rows cut by tp, columns whole
```

Outside a comparison ``see`` does nothing. The n-th value of a name on a rank is compared with the n-th of that name in
the reference run; all of its elements must have been seen by some rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch

from rankmesh.errors import LayoutError, quoted
from rankmesh.sim.simulation import current_context

if TYPE_CHECKING:
    from rankmesh.core.sharding import Shard, Sharding

__all__ = ["Cut", "Seen", "piece", "see"]

Cut = Sequence[str | None] | None


class Seen:
    """One value on one rank, with how it is sharded."""

    def __init__(self, value: object, cut: Cut, options: Mapping[str, Any]) -> None:
        self.source = value
        placed = _placed(value)
        if placed is not None:
            value, found = placed
            cut = found if cut is None else cut
        self.tensor = _tensor(value).detach()
        self.cut = None if cut is None else tuple(cut)
        self.options = {name: given for name, given in options.items() if given is not None}

    def replace(self, tensor: torch.Tensor) -> None:
        """Write other numbers into the value, where it is a tensor."""
        target = self.source.to_local() if hasattr(self.source, "to_local") else self.source
        if isinstance(target, torch.Tensor):
            target.data.copy_(tensor.reshape(target.shape))
        self.tensor = tensor


def see(
    name: str,
    value: object = None,
    cut: Cut = None,
    *,
    view: str | None = None,
    at: Mapping[str, int | tuple[int, ...]] | None = None,
    parts: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
    padded: Mapping[int, int] | None = None,
    module: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    table: Mapping[str, Cut | Sharding] | None = None,
) -> None:
    """Have a comparison look at a value here; nothing outside ``sim.compare``.

    ``value``      a tensor, an array or a number: without a ``cut`` the same on every rank that sees it
    ``cut``        for each dimension the axes that cut it, as in ``rm.Sharding``, with its ``view``, ``at``, ``parts``
                   and ``padded``; of a DTensor its placements count. ``at`` does not count for axes of size 1.
    ``module``     see every parameter and its gradient instead, as ``name.weight`` and ``name.weight.grad``
    ``optimizer``  see what it keeps for each parameter of ``module``, as ``name.weight.exp_avg``
    ``table``      cuts (or Shardings) by parameter name or pattern, ``{"*.up": ("tp", None)}``; others are whole

    Raises ``LayoutError`` for a value or a cut that cannot be read.
    """
    context = current_context()
    session: Any = None if context is None else context.simulation.observer
    if context is None or not hasattr(session, "see"):
        return
    if module is not None:
        from rankmesh.sim.comparison.modules import see_module

        see_module(name, module, optimizer, table or {})
        return
    options = {"view": view, "at": at, "parts": parts, "padded": padded}
    session.see(context.rank, name, Seen(value, cut, options))


def _tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    except (TypeError, ValueError, RuntimeError):
        raise LayoutError(
            f"{quoted(value)} cannot be compared; give a tensor, an array or a number to sim.see", received=value
        ) from None


def _placed(value: object) -> tuple[torch.Tensor, tuple[str | None, ...]] | None:
    """Return the local tensor of a DTensor, and its cut by the dimensions of its mesh; None for anything else."""
    if "torch.distributed.tensor" not in sys.modules:  # whose import takes a second
        return None
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return None
    from rankmesh.transfer.dtensors import cut_of

    return value.to_local(), cut_of(value)


def piece(whole: torch.Tensor, shard: Shard, like: torch.Tensor | None) -> torch.Tensor:
    """Return what a rank should hold; where its own tensor is padded, the padding is copied from ``like``."""
    made = whole.new_zeros(shard.shape) if like is None else like.detach().to(whole.dtype).cpu().clone()
    for box, place in zip(shard.boxes, shard.places, strict=True):
        local = tuple(slice(at, at + stop - start) for at, (start, stop) in zip(place, box, strict=True))
        made[local] = whole[tuple(starmap(slice, box))]
    return made
