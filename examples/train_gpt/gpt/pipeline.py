"""Pipeline parallelism over pp: 1F1B, each stage alternating one forward and one backward pass.

```
pp=2, 4 microbatches     stage 0   F0 F1 B0 F2 B1 F3 B2 B3
                         stage 1      F0 B0 F1 B1 F2 B2 F3 B3
```

Source: Narayanan et al., "PipeDream" (2019); the order of messages is that of Megatron-LM.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from .model import Stage
from .text import Microbatch


class Neighbours:
    """The stages before and after this one; at either end of the pipeline a message goes nowhere."""

    def __init__(self, pp: ProcessGroup, like: Tensor) -> None:
        self.pp, self.like = pp, like
        self.before = pp.rank() - 1 if pp.rank() > 0 else None
        self.after = pp.rank() + 1 if pp.rank() < pp.size() - 1 else None

    def messages(
        self,
        *,
        onward: Tensor | None = None,
        back: Tensor | None = None,
        from_before: bool = False,
        from_after: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send and receive at once: an output onward, a gradient back; what came from before and from after."""
        came_before = torch.empty_like(self.like) if from_before and self.before is not None else None
        came_after = torch.empty_like(self.like) if from_after and self.after is not None else None
        wanted = (
            (dist.isend, back, self.before),
            (dist.irecv, came_before, self.before),
            (dist.isend, onward, self.after),
            (dist.irecv, came_after, self.after),
        )
        operations = [
            P2POp(operation, tensor, group=self.pp, group_peer=peer)
            for operation, tensor, peer in wanted
            if tensor is not None and peer is not None
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return came_before, came_after


def train(stage: Stage, microbatches: list[Microbatch], pp: ProcessGroup, like: Tensor) -> Tensor:
    """One pass of all microbatches, leaving gradients; this rank's part of the loss, 0 before the last stage."""
    neighbours = Neighbours(pp, like)
    todo, underway = deque(microbatches), deque[tuple[Tensor | None, Tensor]]()
    loss = like.new_zeros(())

    def forward(x: Tensor | None) -> Tensor:
        if x is not None:
            x.requires_grad_()
        y: Tensor = stage(todo.popleft(), x)
        underway.append((x, y))
        if stage.is_last:
            loss.add_(y.detach())
        return y.detach()

    def backward(gradient: Tensor | None) -> Tensor | None:
        x, y = underway.popleft()
        y.backward(gradient)
        return None if x is None else x.grad

    ahead = min(pp.size() - pp.rank() - 1, len(microbatches))
    for _ in range(ahead):
        x, _none = neighbours.messages(from_before=True)
        neighbours.messages(onward=forward(x))
    x, _none = neighbours.messages(from_before=bool(todo))
    while todo:
        y = forward(x)
        _none, gradient = neighbours.messages(onward=y, from_after=True)
        x, _none = neighbours.messages(back=backward(gradient), from_before=bool(todo))
    while underway:
        _none, gradient = neighbours.messages(from_after=True)
        neighbours.messages(back=backward(gradient))
    return loss
