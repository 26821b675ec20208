"""Shard maps: which ranks of a mesh hold which shard of a tensor, and which hold copies of one.

Each tensor dimension is cut by some axes, ``at`` fixes some others, and the remaining axes hold copies:

```
Mesh(tp=2, dp=2), cut ("tp", None)      rank      0  1  2  3
                                        shard     0  1  0  1       copies of shard 0: ranks 0, 2
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from rankmesh.core.mesh import Mesh
from rankmesh.core.strided import IntArray
from rankmesh.errors import LayoutError, quoted

__all__ = ["ShardMap", "at_of", "shard_map"]

Names = tuple[str, ...]
# An axis of a mesh: its size and its stride in positions.
Axis = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ShardMap:
    """``axes``: for each dimension the axes that cut it, outermost first; ``at``: the axes with the positions kept."""

    mesh: Mesh
    view: str | None
    axes: tuple[tuple[Axis, ...], ...]
    at: tuple[tuple[Axis, tuple[int, ...]], ...]

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """For each dimension the sizes of the axes that cut it."""
        return tuple(tuple(size for size, _ in axes) for axes in self.axes)

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """Into how many shards each dimension is cut."""
        return tuple(prod(sizes) for sizes in self.sizes)

    def digits(self, rank: int) -> tuple[tuple[int, ...], ...] | None:
        """Return a rank's position along the axes of each dimension; None for a rank that holds nothing. O(axes)."""
        if rank not in self.mesh:
            return None
        position = self.mesh.rank_range.position(rank)
        if any(position // stride % size not in kept for (size, stride), kept in self.at):
            return None
        return tuple(tuple(position // stride % size for size, stride in axes) for axes in self.axes)

    @cached_property
    def _shard_of_position(self) -> IntArray:
        positions = np.arange(self.mesh.size, dtype=np.int64)
        shard = np.zeros_like(positions)
        for axes in self.axes:
            for size, stride in axes:
                shard = shard * size + positions // stride % size
        for (size, stride), kept in self.at:
            shard[~np.isin(positions // stride % size, kept)] = -1
        return shard

    @cached_property
    def _order(self) -> IntArray:
        """The positions that hold something by shard, (shards, copies)."""
        order = np.argsort(self._shard_of_position, kind="stable")
        holders = order[np.count_nonzero(self._shard_of_position < 0) :]
        return holders.reshape(prod(self.shards), -1)

    @cached_property
    def first(self) -> IntArray:
        """The first position of each shard, which names the set of its copies whatever dimensions are cut."""
        return self._order[:, 0]

    @cached_property
    def ranks(self) -> IntArray:
        """The global ranks that hold each shard, (shards, copies), in the order of their positions."""
        return self.mesh.rank_range.ranks(self._order)

    def shard_of(self, ranks: IntArray) -> IntArray:
        """Return the shard of each of these ranks, -1 for those that hold nothing."""
        positions = self.mesh.rank_range.positions(ranks)
        return np.where(positions < 0, -1, self._shard_of_position[positions])

    @cached_property
    def copies(self) -> tuple[object, ...]:
        """Equal for two shard maps exactly when their sets of copies are the same, whichever dimensions are cut."""
        cutting = frozenset(axis for axes in self.axes for axis in axes if axis[0] > 1)
        kept = frozenset((axis, kept) for axis, kept in self.at if len(kept) < axis[0])
        return self.mesh.rank_range, cutting, kept


@lru_cache(maxsize=4096)
def shard_map(
    mesh: Mesh, view: str | None, cut: tuple[Names, ...], at: tuple[tuple[str, tuple[int, ...]], ...]
) -> ShardMap:
    """Return the shard map of checked names. Raises ``LayoutError`` for an axis that is named twice."""
    taken: set[str] = set()
    axes = tuple(tuple(axis for name in names for axis in _axes(mesh, view, name, taken)) for names in cut)
    fixed: list[tuple[Axis, tuple[int, ...]]] = []
    for name, kept in at:
        fixed += _fixed(_axes(mesh, view, name, taken), name, kept)
    return ShardMap(mesh, view, axes, tuple(sorted(fixed)))


def _axes(mesh: Mesh, view: str | None, name: str, taken: set[str]) -> tuple[Axis, ...]:
    """Return the axes that a name stands for, outermost first: one, or the sub-axes of a split one."""
    pairs = mesh.view(view).axis_pairs(name, ordered=True)
    for axis in pairs:
        if axis in taken:
            raise LayoutError(
                f"one sharding names axis {axis!r} twice; an axis cuts one dimension or is fixed by at; name it once",
                axis=axis,
            )
        taken.add(axis)
    return tuple(pair for pair in reversed(pairs.values()) if pair[0] > 1)


def _fixed(axes: tuple[Axis, ...], name: str, kept: tuple[int, ...]) -> list[tuple[Axis, tuple[int, ...]]]:
    size = prod(size for size, _ in axes)
    places = tuple(sorted({place + size if place < 0 else place for place in kept}))
    if not places or places[0] < 0 or places[-1] >= size:
        raise LayoutError(
            f"at={{{name!r}: {kept[0] if len(kept) == 1 else list(kept)}}} is no position: the size of {name!r} is "
            f"{size}; give 0 to {size - 1}, or -1 for the last",
            axis=name,
            received=kept,
            size=size,
        )
    if len(axes) == 1:
        return [(axes[0], places)]
    if len(places) > 1:
        raise LayoutError(
            f"at has several positions of {name!r}, which is split; name its sub-axes in at instead", axis=name
        )
    fixed: list[tuple[Axis, tuple[int, ...]]] = []
    for axis in axes[::-1]:
        places, digit = (places[0] // axis[0],), places[0] % axis[0]
        fixed.append((axis, (digit,)))
    return fixed


def at_of(at: Mapping[str, object] | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return ``at`` as a value: each axis with the positions at which the tensor is."""
    found = []
    for name, places in (at or {}).items():
        listed = tuple(places) if isinstance(places, tuple | list | range) else (places,)
        if not all(isinstance(place, int) and not isinstance(place, bool) for place in listed):
            raise LayoutError(
                f"at={{{name!r}: {quoted(places)}}} is no position; give a whole number, or a tuple of them", axis=name
            )
        found.append((name, listed))
    return tuple(sorted(found))
