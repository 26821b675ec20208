"""Blocks: which kinds of a plan are the axes of a device mesh, and the ranks that it spans with this one.

```
axes ("dp", "tp"), rank 5 of tp=2, cp=2, dp=2      the dp group of 5, then the tp group of each of its members

    dp 0   0 1      (cp 0 is left out:             block[i][j] = tp group of (dp group of 5)[i], at j
    dp 1   4 5       5 has its own block)
```
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from rankmesh.core.plan import Plan
from rankmesh.core.strided import IntArray
from rankmesh.errors import ConnectError, UnknownAxis, quoted

__all__ = ["block", "kind_over"]


def kind_over(plan: Plan, name: str, axes: tuple[str, ...], view: str | None, local_kinds: Container[str]) -> str:
    """Return the kind along these axes together, of those that this rank is in: the one of that name, else the only.

    A name that is not an axis is a kind of the plan. ``ConnectError`` where there is none, and where several have
    process groups of their own.
    """
    try:
        wanted = plan.mesh.groups(axes, view=view).partition
        found = [kind for kind in plan.kinds if kind in local_kinds and plan.groups(kind).partition == wanted]
    except UnknownAxis:
        if axes != (name,) or name not in plan.kinds:
            raise
        found = [name] if name in local_kinds and plan.spec(name).pick is None else []
    if name in found:
        return name
    if not found:
        raise ConnectError(
            f"no group of the plan is along {'-'.join(axes)}, as dimension {name!r} of a device mesh needs; "
            f"add GroupSpec({name!r}, {'-'.join(axes)!r}) to the plan",
            axes=axes,
        )
    if len({plan.canonical[kind] for kind in found}) > 1:
        raise ConnectError(
            f"dimension {name!r} of a device mesh is ambiguous: the groups {', '.join(found)} are along "
            f"{'-'.join(axes)}, each with a process group of its own; name one of them instead",
            axes=axes,
            found=tuple(found),
        )
    return found[0]


def block(plan: Plan, kinds: Sequence[str], rank: int, axes: Sequence[str]) -> IntArray:
    """Return the ranks of a device mesh that contains ``rank``, one axis for each kind, the slowest first."""
    ranks = np.array(_nested(plan, kinds, rank) if kinds else (), dtype=np.int64)
    if not kinds or len(set(axes)) < len(axes) or len(np.unique(ranks)) < ranks.size:
        raise ConnectError(
            f"a device mesh cannot have the axes {quoted(tuple(axes))}; name one axis or more, each once, and none "
            "inside another, such as device_mesh('dp', 'tp')",
            axes=tuple(axes),
        )
    _check_order(plan.mesh.rank_range.positions(ranks), axes)
    return ranks


def _check_order(places: IntArray, axes: Sequence[str]) -> None:
    """Refuse axes in the order of a SPEC, the fastest first: torch makes such a mesh, and later refuses its slices."""
    wide = [dim for dim, size in enumerate(places.shape) if size > 1]
    slowest = iter(sorted(wide, key=lambda dim: -int(places.take(1, dim).flat[0] - places.flat[0])))
    order = [next(slowest) if dim in wide else dim for dim in range(places.ndim)]
    if order != sorted(order) and bool((np.diff(places.transpose(order).ravel()) > 0).all()):
        right = ", ".join(repr(axes[dim]) for dim in order)
        raise ConnectError(
            f"the axes {quoted(tuple(axes))} of a device mesh are not in torch's order, which has the slowest first: "
            f"the reverse of a SPEC's; write device_mesh({right})",
            axes=tuple(axes),
            order=tuple(axes[dim] for dim in order),
        )


def _nested(plan: Plan, kinds: Sequence[str], rank: int) -> Any:
    if not kinds:
        return rank
    members: Iterable[int] = plan.groups(kinds[0]).of(rank)
    return [_nested(plan, kinds[1:], member) for member in members]
