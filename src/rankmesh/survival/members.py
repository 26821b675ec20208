"""Members: which process stands at which rank of a plan, and what becomes of that when some of them are lost.

```
tp=2,dp=2, a spare      member 3 is lost                          no spare, shrink="dp"

ranks    0 1 2 3        ranks    0 1 2 3                          ranks    0 1
members  0 1 2 3   4    members  0 1 2 4      the spare at rank 3 members  0 1        2 becomes a spare
```

A member is a process, by the number that its launcher gave it, which it keeps; a rank is a position of the plan.

>>> from rankmesh.survival.members import Members
>>> first = Members.first("tp=2,dp=*", world_size=5, spares=1, shrink="dp")
>>> first.without({3})
Members(tp=2,dp=2, ranks=(0, 1, 2, 4), spares=())
>>> first.without({3, 4})
Members(tp=2,dp=1, ranks=(0, 1), spares=(2,))
>>> first.without({3, 4}).joined({5: "node1"}).grown()
Members(tp=2,dp=2, ranks=(0, 1, 2, 5), spares=())
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypedDict

from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.core.source import read_plan, read_spec
from rankmesh.errors import LayoutError, PlanError, in_words

__all__ = ["Members", "PlanLike", "Sizes", "SizesData", "plan_of"]

PlanLike = Plan | Mesh | str


class SizesData(TypedDict):
    """The plans of a job as plain data."""

    spec: str | None
    plan: str
    shrink: str | None
    follows: Mapping[str, str]


class MembersData(TypedDict):
    """The members of a job as plain data.

    ``sizes`` is None if the members before have the same, ``plan`` if it is the first one of the sizes.
    """

    sizes: SizesData | None
    plan: str | None
    ranks: Sequence[int]
    spares: Sequence[int]
    started: int


@dataclass(frozen=True)
class Sizes:
    """The plans of a job: the one that it was started with, and plans with fewer replicas along axis ``shrink``.

    ``spec`` is the SPEC of the layout, None for a plan, a mesh or a file, which is not read again: hosts may have
    different ones. ``follows`` has the axis of each view of a file's plan whose size follows the size of ``shrink``.
    """

    spec: str | None
    first: Plan
    shrink: str | None
    follows: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, layout: PlanLike, plan: Plan, shrink: str | None) -> Sizes:
        """Return a layout and the plan that it gives; ``PlanError`` if that lacks ranks 0 to n, or ``shrink``."""
        if shrink is not None and shrink not in plan.mesh.axes:
            raise PlanError(
                f"shrink={shrink!r} is not an axis of {plan.mesh}; name the axis whose coordinates are replicas of "
                "each other, such as shrink='dp'",
                shrink=shrink,
            )
        if plan.mesh.offset or plan.mesh.rank_range.stop != plan.mesh.size:
            raise PlanError(
                f"the plan's mesh {plan.mesh} does not have the ranks 0 to {plan.mesh.size - 1}; a job that survives "
                "has such a plan",
                ranks=plan.mesh.size,
            )
        if isinstance(layout, str) and read_spec(layout, world_size=plan.world_size) is not None:
            return cls(layout, plan, shrink)
        is_cut = isinstance(layout, str) and shrink is not None and plan.mesh.views
        return cls(None, plan, shrink, _follows(str(layout), plan, str(shrink)) if is_cut else ())

    @cached_property
    def data(self) -> SizesData:
        """The layout as plain data; a SPEC stays one, since the sizes of its views may follow."""
        return {
            "spec": self.spec,
            "plan": self.first.to_json(),
            "shrink": self.shrink,
            "follows": dict(self.follows),
        }

    @classmethod
    def read(cls, data: SizesData) -> Sizes:
        """Return the layout of plain data."""
        return cls(data["spec"], Plan.from_json(data["plan"]), data["shrink"], tuple(data["follows"].items()))

    def plan(self, replicas: int) -> Plan:
        """Return the plan with this many coordinates along the axis; ``LayoutError`` or ``PlanError`` if none fits."""
        if self.shrink is None or replicas == self.first.mesh.axes[self.shrink]:
            return self.first
        return _shrunk(self, replicas)

    def largest(self, numbers: Iterable[int]) -> Plan | None:
        """Return the plan of the first of these numbers of replicas that has one: ep=4 takes them by fours."""
        for replicas in numbers:
            with suppress(LayoutError, PlanError):
                return self.plan(replicas)
        return None

    def replicas(self, plan: Plan) -> int:
        """Return the number of coordinates that a plan has along the axis."""
        return 1 if self.shrink is None else plan.mesh.axes[self.shrink]


def _follows(path: str, plan: Plan, shrink: str) -> tuple[tuple[str, str], ...]:
    """Return the axis of each view that follows ``shrink``, by what the file gives for fewer replicas; at the start."""
    now, views = plan.mesh.axes[shrink], plan.mesh.views
    for replicas in range(now - 1, 0, -1):
        with suppress(LayoutError, PlanError, KeyError):
            fewer = read_plan(path, world_size=plan.mesh.size // now * replicas).mesh.views
            changed = ((name, axis, size) for name in views for axis, size in views[name].axes.items())
            return tuple((name, axis) for name, axis, size in changed if fewer[name].axes[axis] != size)
    return ()


@lru_cache(maxsize=64)
def _shrunk(sizes: Sizes, replicas: int) -> Plan:
    first, shrink = sizes.first, str(sizes.shrink)
    now, axes = first.mesh.axes[shrink], {**first.mesh.axes, shrink: replicas}
    if sizes.spec is not None:
        with suppress(LayoutError, PlanError):
            found = read_spec(sizes.spec, world_size=first.mesh.size // now * replicas)
            if found is not None and found.plan.mesh.axes == axes:
                return found.plan
    mesh, follows = Mesh.of(axes), dict(sizes.follows)
    for name, view in first.mesh.views.items():
        follower = follows.get(name)
        if follower is None or view.axes[follower] * replicas % now:
            raise PlanError(
                f"the views of {first.mesh} do not fit {shrink}={replicas}; give the layout as a SPEC with {shrink}=*, "
                "and with * for the axis of each view that follows it",
                shrink=shrink,
                replicas=replicas,
            )
        mesh = mesh.with_view(name, shared=None, **{**view.axes, follower: view.axes[follower] * replicas // now})
    return first.replace(mesh=mesh, world_size=None)


@dataclass(frozen=True, repr=False)
class Members:
    """The living members of a job: one at each rank of the plan, and spares that wait.

    ``hosts`` says which host a member is on: a spare on the host of a lost member comes first. ``started`` is how many
    members there ever were: the number of the next one.
    """

    sizes: Sizes
    plan: Plan
    ranks: tuple[int, ...]
    spares: tuple[int, ...] = ()
    started: int = 0
    hosts: Mapping[int, str] = field(default_factory=dict, compare=False)

    @classmethod
    def first(
        cls,
        layout: PlanLike,
        *,
        world_size: int,
        spares: int = 0,
        shrink: str | None = None,
        hosts: Mapping[int, str] | None = None,
    ) -> Members:
        """Return the members of a job that begins: the first ones at the ranks of the plan, the others as spares.

        Raises ``PlanError`` where the layout does not fit, or has no axis ``shrink``.
        """
        # A plan or a mesh may have fewer ranks: the other members are spares.
        plan = read_plan(layout, world_size=world_size - spares if isinstance(layout, str) else None)
        sizes = Sizes.of(layout, plan, shrink)
        if plan.mesh.size + spares > world_size:
            raise PlanError(
                f"the plan has {plan.mesh.size} ranks and {spares} spares were asked for, but {world_size} ranks were "
                f"started; start {plan.mesh.size + spares}",
                world_size=world_size,
                plan_world_size=plan.mesh.size,
            )
        everyone, size = tuple(range(world_size)), plan.mesh.size
        return cls(sizes, plan, everyone[:size], everyone[size:], world_size, hosts or {})

    @property
    def all(self) -> tuple[int, ...]:
        """Every member, the plan's first, in the order of their ranks: the ranks of their world."""
        return self.ranks + self.spares

    def without(self, lost: Collection[int]) -> Members:
        """Return the members that go on when these are lost.

        A spare takes each rank that is free, on the same host first. Where they do not suffice, axis ``shrink`` loses
        the coordinates with most free ranks; the other members there take what is free elsewhere, or become spares.
        Raises ``PlanError`` where too few are left for one replica, or there is no axis to shrink.
        """
        free: dict[int, list[int]] = {replica: [] for replica in range(self.sizes.replicas(self.plan))}
        for rank, member in enumerate(self.ranks):
            if member in lost:
                free[self._replica(rank)].append(rank)
        fewest_free = sorted(free, key=lambda replica: (len(free[replica]), replica))
        plan = self._largest(len(set(self.all).difference(lost)), lost)
        kept = fewest_free[: self.sizes.replicas(plan)]
        ranks, spares = list(self.ranks), [member for member in self.spares if member not in lost]
        healthy = [rank for rank, member in enumerate(ranks) if member not in lost and self._replica(rank) not in kept]
        for rank in (rank for replica in kept for rank in free[replica]):
            if spares:
                ranks[rank] = self._nearest(spares, self.ranks[rank])
                spares.remove(ranks[rank])
            else:
                # Who has the same coordinates along the other axes holds the same state.
                other = min(healthy, key=lambda one: (self._part(one) != self._part(rank), one))
                healthy.remove(other)
                ranks[rank] = self.ranks[other]
        following = replace(self, ranks=tuple(ranks), spares=tuple(spares))
        if plan is not self.plan:
            following = following._placed(plan, ranks, [], sorted(kept))
        return replace(following, spares=(*spares, *sorted(self.ranks[rank] for rank in healthy)))

    @property
    def data(self) -> MembersData:
        """The members as plain data, without their hosts."""
        return {
            "sizes": self.sizes.data,
            "plan": None if self.plan == self.sizes.first else self.plan.to_json(),
            "ranks": self.ranks,
            "spares": self.spares,
            "started": self.started,
        }

    def following(self, data: MembersData, hosts: Mapping[int, str] | None = None) -> Members:
        """Return the members of plain data, which follow these, with the hosts of those that are new."""
        given = data["sizes"]
        sizes = self.sizes if given is None or given == self.sizes.data else Sizes.read(given)
        ranks, spares = tuple(data["ranks"]), tuple(data["spares"])
        known = {**self.hosts, **(hosts or {})}
        plan = sizes.first if data["plan"] is None else Plan.from_json(data["plan"])
        return Members(sizes, plan, ranks, spares, data["started"], known)

    def relaid(self, sizes: Sizes) -> Members:
        """Return these members in another plan: the first ones at its ranks, the others as spares.

        Raises ``PlanError`` where it has more ranks than there are members.
        """
        everyone, size = self.all, sizes.first.mesh.size
        if size > len(everyone):
            raise PlanError(
                f"the plan {sizes.first.mesh} has {size} ranks, and the job has {len(everyone)} members; give a "
                "smaller plan, or start more processes with join=",
                members=len(everyone),
                plan_world_size=size,
            )
        return replace(self, sizes=sizes, plan=sizes.first, ranks=everyone[:size], spares=everyone[size:])

    def back(self, before: Members, lost: Collection[int]) -> Members:
        """Return these members in the layout of earlier ones; those that are new since wait as spares."""
        hosts = {member: self.hosts.get(member, "") for member in self.all if member not in before.all}
        return before.joined(hosts).without({*lost, *set(before.all).difference(self.all)})

    def joined(self, hosts: Mapping[int, str]) -> Members:
        """Return these members and further ones, each on its host, which are spares."""
        started = max([self.started, *(member + 1 for member in hosts)])
        return replace(self, spares=(*self.spares, *hosts), started=started, hosts={**self.hosts, **hosts})

    def larger(self, more: int = 0) -> Plan | None:
        """Return the plan with the most replicas that these and ``more`` members suffice for, at most as at the start.

        None if they do not suffice for more replicas than now.
        """
        sizes = self.sizes
        now, first = sizes.replicas(self.plan), sizes.replicas(sizes.first)
        most = (len(self.all) + more) // (self.plan.mesh.size // now)
        return sizes.largest(range(min(first, most), now, -1))

    def grown(self) -> Members:
        """Return these members with as many replicas as they suffice for, at most as many as at the start."""
        plan = self.larger()
        if plan is None:
            return self
        return self._placed(plan, list(self.ranks), list(self.spares), range(self.sizes.replicas(self.plan)))

    def _placed(self, plan: Plan, ranks: Sequence[int], spares: list[int], kept: Sequence[int]) -> Members:
        """Return these members in another plan: its first coordinates are the ``kept`` ones, the spares' follow."""
        shrink, mesh = str(self.sizes.shrink), self.plan.mesh
        placed = []
        for rank in range(plan.mesh.size):
            coordinate = plan.mesh.coordinate(rank)
            if coordinate[shrink] < len(kept):
                placed.append(ranks[mesh.rank(view=None, **{**coordinate, shrink: kept[coordinate[shrink]]})])
            else:
                placed.append(spares.pop(0))
        return replace(self, plan=plan, ranks=tuple(placed), spares=tuple(spares))

    def _replica(self, rank: int) -> int:
        shrink = self.sizes.shrink
        return 0 if shrink is None else self.plan.mesh.coordinate(rank)[shrink]

    def _nearest(self, spares: Collection[int], lost: int) -> int:
        host = self.hosts.get(lost)
        return min(spares, key=lambda member: (host is None or self.hosts.get(member) != host, member))

    def _part(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank along all axes but the one that may shrink."""
        at = self.plan.mesh.coordinate(rank)
        return tuple(at[axis] for axis in at if axis != self.sizes.shrink)

    def _largest(self, alive: int, lost: Collection[int]) -> Plan:
        """Return the plan of as many replicas as now, or of as many as this many members suffice for."""
        sizes, now = self.sizes, self.sizes.replicas(self.plan)
        if alive >= self.plan.mesh.size:
            return self.plan
        if sizes.shrink is None:
            free = [rank for rank, member in enumerate(self.ranks) if member in lost]
            raise PlanError(
                f"{in_words(free)} of the plan lost {'its member' if len(free) == 1 else 'their members'} and no spare "
                "is left; start more ranks than the plan has, or name an axis that may lose replicas, such as "
                "shrink='dp'",
                lost=tuple(sorted(lost)),
            )
        each = self.plan.mesh.size // now
        if (plan := sizes.largest(range(alive // each, 0, -1))) is not None:
            return plan
        few = f"{alive} members are left, fewer than the {each} of one replica along {sizes.shrink}"
        raise PlanError(
            f"{few if alive < each else f'the layout fits no smaller size of {sizes.shrink}'}; start more ranks than "
            "the plan has, which wait as spares",
            lost=tuple(sorted(lost)),
        )

    def __repr__(self) -> str:
        return f"Members({self.plan.mesh}, ranks={self.ranks}, spares={self.spares})"


def plan_of(layout: PlanLike, ranks: int) -> Plan:
    """Return the plan of a layout that has sizes of its own; a size of ``*`` is what is left of so many ranks."""
    with suppress(LayoutError, PlanError):
        return read_plan(layout)
    return read_plan(layout, world_size=ranks)
