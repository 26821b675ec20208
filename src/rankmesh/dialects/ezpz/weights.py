"""Weights cut along one dimension: each rank makes the whole one and keeps its part.

```
stride 1       | r0 r0 | r1 r1 |        one block for each rank
stride 2       | r0 | r1 | r0 | r1 |    several matrices side by side (Q, K, V), each cut for itself
```

Every rank of the group draws the same whole weight, so all must have the same random state at that point.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from rankmesh.dialects.ezpz.state import TensorParallel
from rankmesh.dialects.ezpz.utils import divide_and_check_no_remainder

__all__ = ["InitMethod", "fill_part", "whole_of"]

InitMethod = Callable[[torch.Tensor], object]


def fill_part(
    weight: torch.Tensor, dim: int, init_method: InitMethod, state: TensorParallel, stride: int = 1
) -> torch.Tensor:
    """Fill ``weight``, this rank's part along ``dim``, from a whole weight of ``init_method``; return the whole one."""
    size, rank = state.get_tensor_parallel_world_size(), state.get_tensor_parallel_rank()
    width = divide_and_check_no_remainder(weight.size(dim), stride)
    if size == 1:
        whole = weight.detach()
        init_method(whole)
        return whole
    shape = list(weight.shape)
    shape[dim] *= size
    whole = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    init_method(whole)
    weight.detach().copy_(torch.cat(torch.split(whole, width, dim=dim)[rank::size], dim=dim))
    return whole


def whole_of(weight: torch.Tensor, dim: int, state: TensorParallel, stride: int = 1) -> torch.Tensor:
    """The whole weight, from the parts of all ranks of the group: what ``fill_part`` cut."""
    size = state.get_tensor_parallel_world_size()
    part = weight.detach().contiguous()
    if size == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part, group=state.get_tensor_parallel_group())
    cut = [torch.chunk(each, stride, dim=dim) for each in parts]
    return torch.cat([cut[rank][block] for block in range(stride) for rank in range(size)], dim=dim)
