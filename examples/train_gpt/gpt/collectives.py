"""Four collectives over a group that must be named, and the gradients of those that the model differentiates.

```
forward                       backward
copied      nothing           sum          Megatron's f: a tensor enters the split part of a layer
summed      sum               nothing      Megatron's g: partial results leave it
gathered    gather            scatter-sum  each rank's part, stacked by rank
exchanged   all-to-all        all-to-all   rows to other ranks, and back
```

Source of f and g: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

# torch 2.13 gave these two their names; it warns of the ones before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def total(tensor: Tensor, *groups: ProcessGroup) -> Tensor:
    """The sum over one group after the other, in place."""
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return tensor


def largest(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The elementwise maximum, in place."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


def gather(part: Tensor, group: ProcessGroup) -> Tensor:
    """The parts of all ranks, (size, *part.shape)."""
    whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    _gather(whole, part.contiguous(), group=group)
    return whole.view(group.size(), *part.shape)


def scatter_sum(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part, ``whole[rank]``, summed over the ranks; ``whole`` is (size, ...)."""
    part = whole.new_empty(whole.shape[1:])
    _scatter_sum(part, whole.flatten(0, 1).contiguous(), group=group)
    return part


def exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Rows go out in runs of ``sent``, one for each rank, and come in in runs of ``received``."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return total(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return total(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scatter_sum(gradient, ctx.group), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _differentiable(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def copied(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The same tensor, whose gradient is summed over the group."""
    return _differentiable(_Copied, tensor, group)


def summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the group, whose gradient each rank has already."""
    return _differentiable(_Summed, tensor, group)


def gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """The parts of all ranks, (size, *part.shape), each of which collects its gradient from all ranks."""
    return _differentiable(_Gathered, part, group)


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Rows that travelled between ranks; their gradients travel back."""
    return _differentiable(_Exchanged, rows, sent, received, group)
