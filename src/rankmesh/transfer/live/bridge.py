"""Bridges: activations between two meshes of a job, forward and backward, as one transfer and the transfer back.

```
encoder  tp=2, dp=4   ── forward: activations of (rows over dp) ──▶   tp=4, dp=2  language model
                      ◀── backward: their gradients ───────────────
```

Copies of an activation are equal, and so are their gradients, as tensor parallelism leaves them: what goes back is one
copy of the gradient, not a sum. Where copies were used for different tokens, sum their gradients first.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.transfer.live.shards import allocate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rankmesh.transfer.planning.transfer import Transfer

__all__ = ["Bridge"]


class Bridge:
    """A transfer that gradients go back through. Every rank of the group calls it, and goes backward through it.

    On a rank of the target the call gives its shards by name, and on every other rank a token alone: a number under the
    name ``""``, whose ``backward`` takes part in the way back. Both are for ``torch.autograd.backward``.
    """

    def __init__(
        self,
        moves: Transfer,
        budget: int,
        *,
        group: ProcessGroup | None = None,
        timeout: float | timedelta = 300.0,
        device: str | torch.device | None = None,
    ) -> None:
        self.forth, self.back = moves, moves.reversed()
        self._budget, self._group, self._timeout, self._device = budget, group, timeout, device

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards under the target, or the token if it has none."""
        names = sorted(name for name, s in self.forth.source.items() if s.holds(dist.get_rank()))
        given = [tensors[name] for name in names]
        # Without an input that needs a gradient, autograd would not come back to a rank that only receives.
        starts = torch.zeros((), requires_grad=True)
        moved: tuple[Tensor, ...] = _Crossing.apply(self, names, starts, *given)  # type: ignore[no-untyped-call]
        return dict(zip(self.received or [""], moved, strict=True))

    @property
    def received(self) -> list[str]:
        """The names that this rank gets."""
        return [name for name, s in self.forth.target.items() if s.holds(dist.get_rank())]

    def move(self, moves: Transfer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move tensors one way, and return what this rank gets."""
        device = self._device or next((tensor.device for tensor in tensors.values()), None)
        into = allocate(moves.target, dist.get_rank(), device)
        moves.run(tensors, into, self._budget, group=self._group, timeout=self._timeout)
        return into


class _Crossing(torch.autograd.Function):
    """Forward over the bridge, and its gradient backward."""

    @staticmethod
    def forward(ctx: Any, bridge: Bridge, names: list[str], starts: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.bridge, ctx.names = bridge, names
        moved = bridge.move(bridge.forth, dict(zip(names, given, strict=True)))
        ctx.received = bridge.received
        return tuple(moved[name] for name in ctx.received) or (starts.new_zeros(()),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        local = dict(zip(ctx.received, (gradient.contiguous() for gradient in gradients), strict=False))
        moved = ctx.bridge.move(ctx.bridge.back, local)
        return (None, None, None, *(moved[name] for name in ctx.names))
