"""Communicators: ``plan.of(rank).communicators`` for all ranks at once, counted by kind.

```
pp=4, embd = ends of pp, half = pp by two       rank    0      1      2      3
                                                pp      own    own    own    own
                                                half    own    own    own    own
                                                embd    own                  own
communicators of the rank                               3      2      2      3
```

A kind uses the communicators of the first kind in the plan that has the same groups with the same options.

>>> from rankmesh.core import GroupSpec, Mesh, ends
>>> specs = [GroupSpec("tp"), GroupSpec("pp"), GroupSpec("embd", "pp", pick=ends)]
>>> use = communicators(Plan(Mesh(tp=1, pp=2), specs))
>>> [str(kind) for kind in use.kinds.values()], use.least, use.most, use.total
(['none needed', 'own', 'shares pp'], 1, 1, 1)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankmesh.core.options import Options
from rankmesh.core.plan import Plan

__all__ = ["Communicators", "KindUse", "Unshared", "communicators", "unshared"]


@dataclass(frozen=True)
class KindUse:
    """The groups of one kind by what they use.

    ``created``      groups with a communicator of their own
    ``single_rank``  groups of one rank, which need none
    ``shares``       (kind, groups) of the kind whose communicators they use, if they do
    """

    created: int
    single_rank: int
    shares: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        if self.shares:
            return f"shares {self.shares[0][0]}"
        return "none needed" if self.single_rank else "own"


@dataclass(frozen=True)
class Communicators:
    """The communicators of a whole plan.

    ``least``, ``most``   the communicators of one rank, over all ranks of the mesh
    ``total``             the communicators of the job
    """

    kinds: dict[str, KindUse]
    least: int
    most: int
    total: int


@dataclass(frozen=True)
class Unshared:
    """Two kinds with the same members on every rank that do not share, and why."""

    kind: str
    other: str
    why: str


def communicators(plan: Plan) -> Communicators:
    """Count the communicators of every kind and rank; only kinds that leave ranks out are listed."""
    every, per_rank = 0, np.zeros(plan.mesh.size, dtype=np.int16)
    uses: dict[str, KindUse] = {}
    for name, groups in plan.kinds.items():
        canonical, count = plan.canonical[name], len(groups)
        if groups.size == 1:
            uses[name] = KindUse(0, count, ())
        elif canonical != name:
            uses[name] = KindUse(0, 0, ((canonical, count),))
        else:
            uses[name] = KindUse(count, 0, ())
            every += groups.picked is None
            if groups.picked is None:
                continue
            per_rank[plan.mesh.rank_range.positions(groups.array.reshape(-1))] += 1
    total = sum(use.created for use in uses.values())
    return Communicators(uses, every + int(per_rank.min()), every + int(per_rank.max()), total)


def unshared(plan: Plan) -> tuple[Unshared, ...]:
    """Return the kinds with the members of an earlier kind on every rank, and yet a communicator of their own.

    >>> from rankmesh.core import GroupSpec, Mesh
    >>> unshared(Plan(Mesh(dp=2), [GroupSpec("dp"), GroupSpec("gather", "dp", overlap="gather")]))
    (Unshared(kind='gather', other='dp', why="overlap 'gather', not None"),)
    """
    found: list[Unshared] = []
    first = [plan.spec(names[0]) for names in plan.sharing]
    for number, spec in enumerate(first):
        groups = plan.groups(spec.name)
        same = (other for other in first[:number] if plan.groups(other.name).partition == groups.partition)
        if groups.size > 1 and (earlier := next(same, None)) is not None:
            found.append(Unshared(spec.name, earlier.name, _why(spec.options, earlier.options)))
    return tuple(found)


def _why(options: Options, other: Options) -> str:
    if options.share is False or other.share is False:
        return "share=False"
    ours, theirs = options.to_dict(), other.to_dict()
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} {ours.get(name)!r}, not {theirs.get(name)!r}" for name in names)
