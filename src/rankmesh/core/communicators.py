"""Communicators: ``plan.of(rank).communicators`` for all ranks at once, counted by kind.

```
pp=4, embd = ends of pp, half = pp by two       rank    0      1      2      3
                                                pp      own    own    own    own
                                                half    own    own    own    own
                                                embd    own                  own
communicators of the rank                               3      2      2      3
```

A group uses the communicator of the first kind in the plan that has the same members with the same options.

>>> from rankmesh.core import GroupSpec, Mesh, ends
>>> specs = [GroupSpec("tp"), GroupSpec("pp"), GroupSpec("embd", "pp", pick=ends)]
>>> use = communicators(Plan(Mesh(tp=1, pp=2), specs))
>>> [str(kind) for kind in use.kinds.values()], use.least, use.most, use.total
(['none needed', 'own', 'shares pp'], 1, 1, 1)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankmesh.core.groups import Groups, among
from rankmesh.core.options import Options
from rankmesh.core.plan import Plan
from rankmesh.core.strided import IntArray

__all__ = ["Communicators", "KindUse", "Unshared", "communicators", "unshared"]


@dataclass(frozen=True)
class KindUse:
    """The groups of one kind by what they use.

    ``created``      groups with a communicator of their own
    ``single_rank``  groups of one rank, which need none
    ``shares``       (kind, groups) for each kind whose communicators they use
    """

    created: int
    single_rank: int
    shares: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        words = ["none needed"] if self.single_rank else []
        if not self.shares:
            return ", ".join(words + (["own"] if self.created else []))
        if not self.created and len(self.shares) == 1:
            return f"shares {self.shares[0][0]}"
        words += [f"own ({self.created})"] if self.created else []
        return ", ".join(words + [f"shares {kind} ({groups})" for kind, groups in self.shares])


@dataclass(frozen=True)
class Communicators:
    """What a whole plan needs.

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
    """Count the communicators of every kind and rank; O(kinds · ranks), vectorised."""
    per_rank = np.zeros(plan.mesh.size, dtype=np.int64)
    uses: dict[str, KindUse] = {}
    for spec in plan.specs:
        groups = plan.groups(spec.name)
        canonical = _canonical(plan, spec.name, groups, spec.options)
        uses[spec.name] = _use(plan, groups, canonical)
        if groups.size > 1:
            per_rank[plan.mesh.rank_range.positions(groups.array[canonical < 0].reshape(-1))] += 1
    total = sum(use.created for use in uses.values())
    return Communicators(uses, int(per_rank.min()), int(per_rank.max()), total)


def _canonical(plan: Plan, name: str, groups: Groups, options: Options) -> IntArray:
    """Return for each group of a kind the number of the kind whose communicator it uses; -1: it creates one."""
    canonical = np.full(len(groups), -1, dtype=np.int64)
    if groups.size == 1 or options.share is False:
        return canonical
    for number, spec in enumerate(plan.specs):
        if spec.name == name:
            break
        other = plan.groups(spec.name)
        if spec.options == options:
            canonical[(canonical < 0) & among(groups, other)] = number
    return canonical


def _use(plan: Plan, groups: Groups, canonical: IntArray) -> KindUse:
    if groups.size == 1:
        return KindUse(0, len(groups), ())
    numbers, counts = np.unique(canonical[canonical >= 0], return_counts=True)
    shares = tuple(
        (plan.specs[number].name, count) for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    )
    return KindUse(int((canonical < 0).sum()), 0, shares)


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
