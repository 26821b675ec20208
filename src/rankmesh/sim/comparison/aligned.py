"""Aligned collectives: whether one line's results under a layout, put together, equal the reference's.

A result may be cut by axes along its dimensions, be one of several parts of a sum, or be the whole times a size:

```
reference  [a b c d]     tp 0  [a b]     tp 1  [c d]          cut by tp                  same
                         dp 0  x         dp 1  y    x + y =   the reference              same (so far partial)
                         dp 0  2·whole   dp 1  2·whole        a mean is taken later      scaled
                         dp 0  [c d a b]                      another order, as zigzag   unknown
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, permutations, product
from math import prod

import torch

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import RankmeshError
from rankmesh.sim.comparison.noise import largest, proportion
from rankmesh.sim.comparison.seen import piece

__all__ = ["DIFFERENT", "SAME", "UNKNOWN", "match"]

# What values are a multiple of their reference by; nothing, or not known.
SAME, DIFFERENT, UNKNOWN = 1.0, 0.0, -1.0
# Elements over all ranks up to which partial sums are looked for.
_LARGEST = 1 << 22
_CLOSE = 1e-5


def match(mesh: Mesh, values: Mapping[int, torch.Tensor], whole: torch.Tensor) -> float:
    """Return the factor by which the tensors of some ranks are the reference: SAME is 1; DIFFERENT or UNKNOWN else."""
    if not values or not whole.is_floating_point():
        return UNKNOWN
    local = next(iter(values.values())).shape
    if any(value.shape != local for value in values.values()) or not whole.numel():
        return UNKNOWN
    cuts = list(_cuts(mesh, tuple(local), tuple(whole.shape)))
    if not cuts:
        return UNKNOWN
    size = largest(whole)
    factors = {_factor(mesh, values, whole, sharding, size) for sharding in cuts} - {DIFFERENT}
    if factors:
        return SAME if SAME in factors else factors.pop()
    return UNKNOWN if _permuted(values, whole, size) else DIFFERENT


def _factor(
    mesh: Mesh, values: Mapping[int, torch.Tensor], whole: torch.Tensor, sharding: Sharding, size: float
) -> float:
    """Return the product of sizes, or one over it, by which values or sums of them are a multiple of their shards."""
    taken = {axis for axes in sharding.cut or () if axes for axis in axes.split("-")}
    free = [axis for axis in mesh.axes if axis not in taken and _differ(mesh, values, axis, size)]
    large = whole.numel() * len(values) > _LARGEST
    expected = {rank: piece(whole, sharding.of(rank), None) for rank in values}
    first = max(values, key=lambda rank: largest(expected[rank]))
    sizes = {float(prod(chosen)) for count in range(len(mesh.axes) + 1)
             for chosen in combinations(mesh.axes.values(), count)}  # fmt: skip
    found = DIFFERENT
    for axes in (axes for count in range(1 if large else len(free) + 1) for axes in combinations(free, count)):
        summed = _sums(mesh, values, axes)
        ratio = None if summed is None else proportion(expected[first], summed[first], _CLOSE * size)
        if summed is None or ratio is None:
            continue
        factor = min((*sizes, *(1.0 / one for one in sizes)), key=lambda one: abs(one - ratio))
        if all(_close(summed[rank], expected[rank] * factor, size) for rank in values):
            if factor == SAME:
                return factor
            found = factor
    return found


def _differ(mesh: Mesh, values: Mapping[int, torch.Tensor], axis: str, size: float) -> bool:
    """Return whether ranks along an axis have different values: parts of a sum do, copies do not."""
    groups = mesh.groups(axis)
    pairs = ((value, values.get(groups.of(rank).ranks[0])) for rank, value in values.items())
    return any(first is not None and not _close(value, first, size) for value, first in pairs)


def _cuts(mesh: Mesh, local: tuple[int, ...], whole: tuple[int, ...]) -> Iterator[Sharding]:
    """Yield every way in which axes could cut a tensor to the shape that ranks hold."""
    if len(local) != len(whole) or any(not part or length % part for part, length in zip(local, whole, strict=True)):
        return
    for view in (None, *mesh.views):
        sizes = {axis: length for axis, length in mesh.view(view).axes.items() if length > 1}
        choices = [_factored(sizes, length // part) for part, length in zip(local, whole, strict=True)]
        for cut in product(*choices):
            try:
                yield Sharding(mesh, tuple("-".join(axes) or None for axes in cut), whole, view=view)
            except RankmeshError:  # noqa: PERF203  - one axis in two dimensions
                continue
        if local == whole:
            return


def _factored(sizes: Mapping[str, int], ratio: int) -> list[tuple[str, ...]]:
    """Return the axes, in every order, whose sizes multiply to a ratio."""
    if ratio == 1:
        return [()]
    return [
        axes
        for count in range(1, len(sizes) + 1)
        for axes in permutations(sizes, count)
        if prod(sizes[axis] for axis in axes) == ratio
    ]


def _sums(mesh: Mesh, values: Mapping[int, torch.Tensor], axes: tuple[str, ...]) -> dict[int, torch.Tensor] | None:
    """Return each rank's sum over its group along some axes; None where a member has no value."""
    if not axes:
        return dict(values)
    groups = mesh.groups(axes)
    found: dict[int, torch.Tensor] = {}
    for rank in values:
        members = groups.of(rank).ranks
        if any(member not in values for member in members):
            return None
        if rank not in found:
            total = torch.stack([values[member].to(torch.float64) for member in members]).sum(0)
            found.update(dict.fromkeys(members, total))
    return found


def _permuted(values: Mapping[int, torch.Tensor], whole: torch.Tensor, size: float) -> bool:
    """Return whether distinct shards of all ranks hold the elements of the whole in some order, as zigzag shards do."""
    distinct: list[torch.Tensor] = []
    for value in values.values():
        if not any(_close(value, other, size) for other in distinct):
            distinct.append(value)
    joined = torch.cat([value.flatten().to(torch.float64) for value in distinct])
    return joined.numel() == whole.numel() and _close(joined.sort().values, whole.flatten().sort().values, size)


def _close(left: torch.Tensor, right: torch.Tensor, size: float) -> bool:
    return left.numel() == right.numel() and (
        not left.numel() or largest(left.reshape(-1).double() - right.reshape(-1).double()) <= _CLOSE * max(size, 1e-30)
    )
