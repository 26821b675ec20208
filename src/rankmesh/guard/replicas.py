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
from functools import cached_property
from math import prod

import numpy as np

from rankmesh.core.plan import Plan
from rankmesh.core.sharding import Sharding, ShardMap
from rankmesh.core.strided import IntArray

__all__ = ["ReplicaKind", "group_of", "replica_kinds"]


@dataclass(frozen=True)
class ReplicaKind:
    """The tensors of these ``names`` are held by the same sets of ranks, whose slots start at ``offset``."""

    names: tuple[str, ...]
    shard_map: ShardMap
    offset: int

    @cached_property
    def _order(self) -> IntArray:
        return np.argsort(self.shard_map.first, kind="stable")

    @property
    def count(self) -> int:
        """How many sets there are."""
        return len(self.shard_map.first)

    def slot(self, rank: int) -> int | None:
        """Return the slot of the set that a rank is in; None where it holds none of the tensors."""
        shard = int(self.shard_map.shard_of(np.array([rank]))[0])
        return None if shard < 0 else self.offset + int(np.flatnonzero(self._order == shard)[0])

    def ranks(self, slot: int) -> tuple[int, ...]:
        """Return the ranks that hold the same, in order."""
        return tuple(sorted(self.shard_map.ranks[self._order[slot - self.offset]].tolist()))


def replica_kinds(shardings: Mapping[str, Sharding]) -> list[ReplicaKind]:
    """Return the kinds of replicas in a job, the same on every rank; what only one rank holds is in none of them."""
    names: dict[object, list[str]] = {}
    maps: dict[object, ShardMap] = {}
    for name, sharding in shardings.items():
        copies = sharding.shard_map.copies
        maps.setdefault(copies, sharding.shard_map)
        names.setdefault(copies, []).append(name)
    found: list[ReplicaKind] = []
    offset = 0
    for same, shard_map in maps.items():
        if shard_map.ranks.shape[1] > 1:
            found.append(ReplicaKind(tuple(names[same]), shard_map, offset))
            offset += found[-1].count
    return found


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
