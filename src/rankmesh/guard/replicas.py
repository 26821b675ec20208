"""Replicas: which ranks hold the same shards, of all tensors of a job; no communication.

```
tp=2, dp=2, a tensor cut by tp          ranks 0 and 2 hold rows 0..1, ranks 1 and 3 rows 2..3
                                        one kind, two sets: {0, 2} and {1, 3}
```

Tensors with the same sets are one kind, so what ranks compare grows with the sets and not with the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from rankmesh.core.grouped import grouped
from rankmesh.core.plan import Plan
from rankmesh.core.sharding import Sharding
from rankmesh.core.strided import IntArray

__all__ = ["ReplicaKind", "differing", "group_of", "kinds_of", "replica_kinds"]


@dataclass(frozen=True, eq=False)
class ReplicaKind:
    """The tensors of these ``names`` are held by the same ``sets`` of ranks, (sets, copies), each with a slot."""

    names: tuple[str, ...]
    sets: IntArray
    slots: range

    def slot(self, rank: int) -> int | None:
        """Return the slot of the set that a rank is in; None where it holds none of the tensors."""
        where = np.argwhere(self.sets == rank)
        return self.slots[int(where[0, 0])] if len(where) else None

    def ranks(self, slot: int) -> tuple[int, ...]:
        """Return the ranks that hold the same, in order."""
        return tuple(sorted(self.sets[self.slots.index(slot)].tolist()))


def replica_kinds(shardings: Mapping[str, Sharding]) -> list[ReplicaKind]:
    """Return the kinds of replicas in a job, the same on every rank; a shard that only one rank holds is in none."""
    names = grouped((sharding.shard_map.copies, name) for name, sharding in shardings.items())
    sets = {tuple(same): shardings[same[0]].shard_map.ranks for same in names.values()}
    return kinds_of({same: ranks for same, ranks in sets.items() if ranks.shape[1] > 1})


def kinds_of(sets: Mapping[tuple[str, ...], IntArray]) -> list[ReplicaKind]:
    """Return a kind for each of these names, with a slot for each set of ranks."""
    ends = accumulate(len(ranks) for ranks in sets.values())
    return [
        ReplicaKind(names, ranks, range(end - len(ranks), end))
        for (names, ranks), end in zip(sets.items(), ends, strict=True)
    ]


def group_of(plan: Plan, ranks: Sequence[int]) -> str:
    """Return the plan's name of a group of these ranks, else axes and coordinate: ``dp@pp1,tp0``, ``dp-pp@tp0``."""
    for local in plan.of(ranks[0]).values():
        if sorted(local.ranks) == sorted(ranks):
            return str(local)
    varied, fixed = _positions([plan.mesh.coordinate(rank) for rank in ranks])
    return _named(varied, fixed) if prod(varied.values()) == len(ranks) else f"ranks {', '.join(map(str, ranks))}"


def differing(plan: Plan, digests: Mapping[int, int]) -> tuple[str, str]:
    """Return the group within which replicas differ, by rank, and the axes over which they agree, if there are any.

    >>> from rankmesh.core import Mesh, recipes
    >>> plan = recipes.axes(Mesh(tp=2, dp=2, pp=2))
    >>> differing(plan, {0: 7, 1: 5, 2: 7, 3: 5}), differing(plan, {0: 7, 1: 5, 2: 7, 3: 7})
    (('tp@pp0', 'dp'), ('tp-dp@pp0', ''))
    """
    found = [(len(digests), group_of(plan, tuple(digests)), "")]
    for view in (None, *plan.mesh.views):
        places = [plan.mesh.coordinate(rank, view=view) for rank in digests]
        varied, fixed = _positions(places)
        if prod(varied.values()) == len(digests):
            agree = [axis for axis in varied if _agree(axis, places, digests.values())]
            within = {axis: size for axis, size in varied.items() if axis not in agree}
            found += [(prod(within.values()), _named(within, fixed), "-".join(agree))] if agree else []
    return min(found, key=lambda one: one[0])[1:]


def _agree(axis: str, places: Sequence[Mapping[str, int]], values: Iterable[int]) -> bool:
    """Return whether positions that differ on this axis alone have equal values."""
    others = (tuple(at for name, at in place.items() if name != axis) for place in places)
    return all(len(set(same)) == 1 for same in grouped(zip(others, values, strict=True)).values())


def _positions(places: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return on which axes places differ, with the number of their positions, and where they are on the others."""
    found = {axis: {place[axis] for place in places} for axis in places[0]}
    varied = {axis: len(positions) for axis, positions in found.items() if len(positions) > 1}
    return varied, {axis: min(positions) for axis, positions in found.items() if axis not in varied}


def _named(varied: Iterable[str], fixed: Mapping[str, int]) -> str:
    at = ",".join(f"{axis}{position}" for axis, position in reversed([*fixed.items()]))
    return "-".join(varied) + (f"@{at}" if at else "")
