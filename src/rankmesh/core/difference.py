"""Differences between two plans, rank by rank: the facts that ``rankmesh diff`` prints.

```
left    tp=2,dp=4    dp  [0, 2, 4, 6]  [1, 3, 5, 7]
right   dp=4,tp=2    dp  [0, 1, 2, 3]  [4, 5, 6, 7]      dp differs on 8 ranks, tp on 8
```

>>> from rankmesh.core.source import read
>>> found = difference(read("tp=2,dp=4").plan, read("dp=4,tp=2").plan)
>>> [(kind.name, kind.ranks) for kind in found.groups], found.groups[1].examples[1]
([('tp', 8), ('dp', 8)], RankDiff(rank=1, left=(1, 3, 5, 7), right=(0, 1, 2, 3)))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankmesh.core.groups import Groups
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan

__all__ = ["AxisDiff", "Difference", "KindDiff", "OnlyKind", "OptionDiff", "RankDiff", "difference"]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class AxisDiff:
    """An axis whose (size, stride) differs; None where a side has no such axis."""

    view: str | None
    axis: str
    left: tuple[int, int] | None
    right: tuple[int, int] | None


@dataclass(frozen=True)
class OnlyKind:
    """A kind that one side has; ``same_as`` names kinds of the other side with the same groups."""

    name: str
    same_as: tuple[str, ...]


@dataclass(frozen=True)
class RankDiff:
    """The first members of one rank's group on both sides; None where it is in no such group."""

    rank: int
    left: tuple[int, ...] | None
    right: tuple[int, ...] | None


@dataclass(frozen=True)
class KindDiff:
    """A kind whose groups differ on ``ranks`` ranks, with the first few; sizes are of one group."""

    name: str
    ranks: int
    left_size: int
    right_size: int
    examples: tuple[RankDiff, ...]


@dataclass(frozen=True)
class OptionDiff:
    """An effective option of a kind that differs; None where it is not set."""

    kind: str
    option: str
    left: object
    right: object


@dataclass(frozen=True)
class Difference:
    """Everything that differs, and the names of the kinds that are equal on every rank.

    ``spans``     offset and size of the meshes, (left, right)
    ``order``     whether the common kinds are in another order: the first is canonical where they share
    """

    world_sizes: tuple[int, int]
    spans: tuple[tuple[int, int], tuple[int, int]]
    digests: tuple[str, str]
    axes: tuple[AxisDiff, ...]
    only_left: tuple[OnlyKind, ...]
    only_right: tuple[OnlyKind, ...]
    groups: tuple[KindDiff, ...]
    options: tuple[OptionDiff, ...]
    order: bool
    equal: tuple[str, ...]

    @property
    def different(self) -> bool:
        """True if any rank or any axis differs."""
        sides = (self.world_sizes, self.spans)
        lists = (self.axes, self.only_left, self.only_right, self.groups, self.options)
        return self.order or any(left != right for left, right in sides) or any(map(bool, lists))


def difference(left: Plan, right: Plan, *, examples: int = 3, members: int = 8) -> Difference:
    """Compare two plans; O(kinds · ranks), vectorised. ``examples`` and ``members`` limit what is listed."""
    common = [name for name in left.kinds if name in right.kinds]
    world = max(left.world_size, right.world_size)
    masks = {name: _differs(left.groups(name), right.groups(name), world) for name in common}
    groups = tuple(_kind(left, right, name, mask, examples, members) for name, mask in masks.items() if mask.any())
    options = tuple(option for name in common for option in _options(left, right, name))
    unequal = {kind.name for kind in groups} | {option.kind for option in options}
    return Difference(
        world_sizes=(left.world_size, right.world_size),
        spans=((left.mesh.offset, left.mesh.size), (right.mesh.offset, right.mesh.size)),
        digests=(left.digest, right.digest),
        axes=tuple(_axes(left.mesh, right.mesh)),
        only_left=tuple(_only(left, right)),
        only_right=tuple(_only(right, left)),
        groups=groups,
        options=options,
        order=common != [name for name in right.kinds if name in left.kinds],
        equal=tuple(name for name in common if name not in unequal),
    )


def _differs(left: Groups, right: Groups, world: int) -> BoolArray:
    """Return for each rank of the world whether it is in another group; bool, shape ``(world,)``."""
    different = np.zeros(world, dtype=np.bool_)
    if left.partition == right.partition:
        return different
    for groups in (left, right):
        different[groups.array] = True
    if left.size == right.size:
        row_of = np.full(world, -1, dtype=np.int64)
        row_of[right.array] = np.arange(len(right))[:, None]
        rows = row_of[left.array[:, 0]]
        same = (rows >= 0) & (right.array[rows] == left.array).all(axis=1)
        different[left.array[same]] = False
    return different


def _kind(left: Plan, right: Plan, name: str, mask: BoolArray, examples: int, members: int) -> KindDiff:
    ours, theirs = left.groups(name), right.groups(name)
    shown = tuple(
        RankDiff(rank, _members(ours, rank, members), _members(theirs, rank, members))
        for rank in np.flatnonzero(mask)[:examples].tolist()
    )
    return KindDiff(name, int(mask.sum()), ours.size, theirs.size, shown)


def _members(groups: Groups, rank: int, members: int) -> tuple[int, ...] | None:
    return tuple(groups.of(rank)[:members]) if groups.has(rank) else None


def _options(left: Plan, right: Plan, name: str) -> Iterator[OptionDiff]:
    ours, theirs = left.spec(name).options.to_dict(), right.spec(name).options.to_dict()
    for option in {**ours, **theirs}:
        if ours.get(option) != theirs.get(option):
            yield OptionDiff(name, option, ours.get(option), theirs.get(option))


def _axes(left: Mesh, right: Mesh) -> Iterator[AxisDiff]:
    for view in (None, *{**left.views, **right.views}):
        ours, theirs = _pairs(left, view), _pairs(right, view)
        for axis in {**ours, **theirs}:
            if ours.get(axis) != theirs.get(axis):
                yield AxisDiff(view, axis, ours.get(axis), theirs.get(axis))


def _pairs(mesh: Mesh, view: str | None) -> dict[str, tuple[int, int]]:
    if view is not None and view not in mesh.views:
        return {}
    layout = mesh.view(view)
    return {axis: (size, layout.strides[axis]) for axis, size in layout.axes.items()}


def _only(plan: Plan, other: Plan) -> Iterator[OnlyKind]:
    for name, groups in plan.kinds.items():
        if name not in other.kinds:
            same = (known for known, others in other.kinds.items() if others.partition == groups.partition)
            yield OnlyKind(name, tuple(same))
