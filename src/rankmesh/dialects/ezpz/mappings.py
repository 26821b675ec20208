"""What a tensor is before and after a tensor-parallel region, and what its gradient is on the way back.

```
                 forward                      backward
copy_to          as it is                     sum over the group
reduce_from      sum over the group           as it is
scatter_to       piece of the last dim        pieces gathered along it
gather_from      pieces gathered along it     piece of the last dim
```

The way back of each is another one of them, so gradients of gradients are right too.

Each takes the ``state`` whose tensor-parallel group is meant (None: the module-level one); in a group of one rank each
is the identity. Unlike ezpz's, they leave their input and the incoming gradient as they are (ezpz sums in place, into
a gradient that others may hold too), and keep the dtype (ezpz's fail on anything but float32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.dialects.ezpz.state import TensorParallel, default
from rankmesh.dialects.ezpz.utils import split_tensor_along_last_dim

__all__ = [
    "copy_to_tensor_parallel_region",
    "gather_from_tensor_parallel_region",
    "reduce_from_tensor_parallel_region",
    "scatter_to_tensor_parallel_region",
]

_Mapping = Callable[[torch.Tensor, TensorParallel], torch.Tensor]


def copy_to_tensor_parallel_region(input_: torch.Tensor, state: TensorParallel | None = None) -> torch.Tensor:
    """Return the input, whose gradient is summed over the group; any shape."""
    return _mapped(input_, state, _same, reduce_from_tensor_parallel_region)


def reduce_from_tensor_parallel_region(input_: torch.Tensor, state: TensorParallel | None = None) -> torch.Tensor:
    """Return the sum of the inputs of the group; the shape stays."""
    return _mapped(input_, state, _sum, copy_to_tensor_parallel_region)


def scatter_to_tensor_parallel_region(input_: torch.Tensor, state: TensorParallel | None = None) -> torch.Tensor:
    """Return this rank's piece of the last dimension: (..., n) becomes (..., n / size)."""
    return _mapped(input_, state, _piece_of, gather_from_tensor_parallel_region)


def gather_from_tensor_parallel_region(input_: torch.Tensor, state: TensorParallel | None = None) -> torch.Tensor:
    """Return the pieces of the group along the last dimension: (..., n) becomes (..., n · size)."""
    return _mapped(input_, state, _gathered, scatter_to_tensor_parallel_region)


def _mapped(input_: torch.Tensor, state: TensorParallel | None, forward: _Mapping, backward: _Mapping) -> torch.Tensor:
    state = default if state is None else state
    if state.get_tensor_parallel_world_size() == 1:
        return input_
    mapped: torch.Tensor = _Mapped.apply(input_, state, forward, backward)  # type: ignore[no-untyped-call]
    return mapped


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_: torch.Tensor, state: TensorParallel, forward: _Mapping, backward: _Mapping
    ) -> torch.Tensor:
        ctx.state, ctx.back = state, backward
        return forward(input_, state)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(gradient, ctx.state), None, None, None


def _same(tensor: torch.Tensor, state: TensorParallel) -> torch.Tensor:
    return tensor


def _sum(tensor: torch.Tensor, state: TensorParallel) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=state.get_tensor_parallel_group())
    return total


def _piece_of(tensor: torch.Tensor, state: TensorParallel) -> torch.Tensor:
    pieces = split_tensor_along_last_dim(tensor, state.get_tensor_parallel_world_size())
    return pieces[state.get_tensor_parallel_rank()].contiguous()


def _gathered(tensor: torch.Tensor, state: TensorParallel) -> torch.Tensor:
    piece = tensor.contiguous()
    pieces = [torch.empty_like(piece) for _ in range(state.get_tensor_parallel_world_size())]
    dist.all_gather(pieces, piece, group=state.get_tensor_parallel_group())
    return torch.cat(pieces, dim=-1)
