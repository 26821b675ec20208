"""Shards: the tensors of one rank, checked against its shardings; where source and target share memory, kept apart.

```
into = moves.allocate(rank)         empty target shards
into.complete                       False until a transfer has written all of them
```
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from rankmesh.core.sharding import Shard, Sharding

__all__ = ["Shards", "allocate", "apart", "flat", "local", "mark", "problem_of", "same_place", "shards_of"]


class Shards(dict[str, Tensor]):
    """Tensors by name that know whether a transfer has written them all: ``incomplete`` names those that are not."""

    incomplete: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Return whether every tensor is written."""
        return not self.incomplete


def allocate(shardings: Mapping[str, Sharding], rank: int, device: str | torch.device | None) -> Shards:
    """Return empty tensors of the shards of one rank, none of them complete; padding is zero."""
    made = Shards()
    for name, sharding in shardings.items():
        if sharding.holds(rank):
            new = torch.zeros if sharding.padded else torch.empty
            made[name] = new(sharding.of(rank).shape, dtype=getattr(torch, sharding.dtype), device=device)
    made.incomplete = tuple(made)
    return made


def mark(tensors: Mapping[str, Tensor], incomplete: Iterable[str]) -> None:
    """Record which tensors are incomplete, if they are ``Shards``."""
    if isinstance(tensors, Shards):
        tensors.incomplete = tuple(incomplete)


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, any other tensor detached."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's elements in one dimension, as a view that may be viewed as another dtype.

    A tensor of one element counts as contiguous with any stride, and ``view`` keeps that stride.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def shards_of(shardings: Mapping[str, Sharding], rank: int) -> dict[str, Shard]:
    """Return the shards of a rank by name; many tensors have one."""
    known: dict[tuple[int, int], Shard | None] = {}
    found = {}
    for name, one in shardings.items():
        kind = id(one.shard_map), id(one.cuts)
        if kind not in known:
            known[kind] = one.of(rank) if one.holds(rank) else None
        if (shard := known[kind]) is not None:
            found[name] = shard
    return found


def problem_of(
    tensors: Mapping[str, object], shardings: Mapping[str, Sharding], shards: Mapping[str, Shard], what: str
) -> str:
    """Return the problem of the tensors that a rank gives; an empty text if all fit their shardings."""
    for name, shard in shards.items():
        dtype = getattr(torch, shardings[name].dtype)
        if name not in tensors:
            return f"{what} {name!r} is missing, of which the rank holds {list(shard.shape)}; give every shard"
        given = tensors[name]
        if not isinstance(given, Tensor):
            return f"{what} {name!r} is of type {type(given).__name__}; give a tensor"
        tensor = local(given)
        if tensor.dtype != dtype or tuple(tensor.shape) != shard.shape:
            return (
                f"{what} {name!r} is {tensor.dtype} {list(tensor.shape)}, but its shard is {dtype} "
                f"{list(shard.shape)}; give the shard that the sharding describes"
            )
    return ""


def apart(sources: Mapping[str, Tensor], written: Iterable[Tensor]) -> set[str]:
    """Return the sources to copy first, since a target that is written in the same memory would overwrite them."""
    ranges = sorted(_memory(tensor) for tensor in written if tensor.numel())
    reached = [*accumulate((stop for _, stop in ranges), max)]
    starts = [*(start for start, _ in ranges), inf]
    spans = {name: _memory(tensor) for name, tensor in sources.items() if tensor.numel()}
    return {name for name, (low, high) in spans.items() if starts[bisect_right(reached, low)] < high}


def same_place(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory, element by element."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor are."""
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
