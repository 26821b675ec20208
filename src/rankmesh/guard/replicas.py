"""Replicas: which ranks hold the same shards, of all tensors of a job; no communication.

```
tp=2, dp=2, a tensor cut by tp          ranks 0 and 2 hold rows 0..1, ranks 1 and 3 rows 2..3
                                        one kind, two sets: {0, 2} and {1, 3}
```

Tensors with the same sets are one kind, so what ranks compare grows with the sets and not with the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from rankmesh.core.grouped import grouped
from rankmesh.core.plan import Plan
from rankmesh.core.sharding import Sharding
from rankmesh.core.strided import IntArray

__all__ = ["ReplicaKind", "group_of", "kinds_of", "replica_kinds"]


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
    """Return the kinds of replicas in a job, the same on every rank; what only one rank holds is in none of them."""
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
    """Return how a plan calls the group of these ranks, else its axes and coordinate: ``dp@pp1,tp0``, ``dp-pp@tp0``."""
    for local in plan.of(ranks[0]).values():
        if sorted(local.ranks) == sorted(ranks):
            return str(local)
    places = [plan.mesh.coordinate(rank) for rank in ranks]
    found = {axis: {place[axis] for place in places} for axis, size in plan.mesh.axes.items() if size > 1}
    varied = [axis for axis, positions in found.items() if len(positions) > 1]
    if prod(len(found[axis]) for axis in varied) != len(ranks):
        return f"ranks {', '.join(map(str, ranks))}"
    fixed = ",".join(f"{axis}{min(found[axis])}" for axis in reversed(found) if axis not in varied)
    return "-".join(varied) + (f"@{fixed}" if fixed else "")
