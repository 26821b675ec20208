"""Process groups: their members, kind and coordinate in the job, whichever library made and named them.

```
name          description     members    with a plan    without
tp/0/f116…    tp@dp0          [0, 1]     tp   tp@dp0    tp   tp@dp0              ours
5             undefined       [0, 2]     dp   dp@tp0         group of [0, 2]     torch's new_group
mesh_dp       mesh_dp         [0, 2]     dp   dp@tp0    mesh_dp   mesh_dp [0, 2] a DeviceMesh
0             default_pg      [0 .. 3]   world   world  world   world            the world
```
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rankmesh.core.local import LocalGroup
from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.columns import GroupName
from rankmesh.debug.doctor.recording import Recording
from rankmesh.errors import listed

__all__ = [
    "DEFAULT",
    "KnownGroup",
    "group_at",
    "group_of_plan",
    "kinds_of_size",
    "known_group",
    "known_groups",
    "members_listed",
]

DEFAULT = "default_pg"
# The kind of groups of which only the members are known.
_UNNAMED = "group"
# Our names, whose description has no coordinate where a kind spans the whole mesh.
_OURS = re.compile(r".+/\d+/[0-9a-f]{16}")


@dataclass(frozen=True, eq=False)
class KnownGroup:
    """A process group of the job: ``kind`` is tp, ``label`` tp@dp0; ``members`` in the order of their positions."""

    name: str
    kind: str
    label: str
    members: tuple[int, ...]

    @cached_property
    def family(self) -> Hashable:
        """A key of groups with the same role: the kind; without one, the number of members and their distance."""
        if self.kind != _UNNAMED or len(self.members) < 2:
            return self.kind
        steps = {after - before for before, after in pairwise(self.members)}
        return (self.kind, len(self.members), steps.pop() if len(steps) == 1 else self.members)

    def __str__(self) -> str:
        return self.label


def known_groups(
    recordings: Mapping[int, Recording], plan: Plan | None, world_size: int
) -> dict[tuple[int, int], KnownGroup]:
    """Map a rank and the index of a group in its recording to the group of the job.

    Groups with equal names and members are one. The description is from the first rank that has one.
    """
    seen: dict[str, set[int]] = {}
    for rank, recording in recordings.items():
        for group in recording.groups:
            seen.setdefault(group.name, set()).add(rank)
    # Equal members as one object, which is hashed once: all ranks list their world.
    one_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    same = {number: one_of.setdefault(each, each) for number, each in members_listed(recordings.values()).items()}
    members_of, world = _listed_members(recordings, seen, same), tuple(range(world_size))
    guessed: dict[tuple[str, bool], tuple[int, ...]] = {}
    keys: dict[tuple[int, int], tuple[str, int]] = {}
    described: dict[tuple[str, int], tuple[GroupName, tuple[int, ...]]] = {}
    for rank, recording in sorted(recordings.items()):
        for index, group in enumerate(recording.groups):
            members = same[id(group.members)] if group.members else members_of.get((group.name, rank))
            if members is None:
                name = group.name, group.desc == DEFAULT
                if name not in guessed:
                    found = _guess(group, seen[group.name], plan, world)
                    guessed[name] = one_of.setdefault(found, found)
                members = guessed[name]
            key = keys[rank, index] = group.name, id(members)
            if key not in described or (group.is_described and not described[key][0].is_described):
                described[key] = group, members
    made = {key: known_group(group, members, plan) for key, (group, members) in described.items()}
    return {place: made[key] for place, key in keys.items()}


def members_listed(recordings: Iterable[Recording]) -> dict[int, tuple[int, ...]]:
    """Return the members that groups list, each object once, by its ``id``."""
    return {id(group.members): group.members for one in recordings for group in one.groups if group.members}


def _listed_members(
    recordings: Mapping[int, Recording], seen: Mapping[str, set[int]], same: Mapping[int, tuple[int, ...]]
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the members by group and rank; a rank that lists none has those that another member lists."""
    listed = ((group.name, same[id(group.members)]) for r in recordings.values() for group in r.groups if group.members)
    given = {(name, id(members)): (name, members) for name, members in listed}
    return {
        (name, rank): members
        for name, members in sorted(given.values(), key=str)
        for rank in members
        if rank in seen[name]
    }


def _guess(group: GroupName, seen: Iterable[int], plan: Plan | None, world: tuple[int, ...]) -> tuple[int, ...]:
    """Infer unlisted members: the world, the one group of the plan that fits, or the ranks that used it."""
    if group.desc == DEFAULT:
        return world
    ranks = tuple(sorted(seen))
    fitting = {local.ranks for local in _local(plan, ranks[0]) if set(ranks) <= set(local.ranks)}
    return fitting.pop() if len(fitting) == 1 else ranks


def _local(plan: Plan | None, rank: int) -> list[LocalGroup]:
    if plan is None or not 0 <= rank < plan.world_size or rank not in plan.mesh:
        return []
    return list(plan.of(rank).values())


def group_of_plan(plan: Plan | None, members: tuple[int, ...], kind: str = "") -> LocalGroup | None:
    """Return the group of a plan that has these members, of this kind if there are several; None if none has them."""
    locals_of = _local(plan, members[0]) if members else []
    fitting = [local for local in locals_of if sorted(local.ranks) == sorted(members)]
    return next((local for local in fitting if local.name == kind), next(iter(fitting), None))


def group_at(plan: Plan | None, ranks: Mapping[int, int], kind: str = "") -> LocalGroup | None:
    """Return the group of a plan that has these ranks at these positions: the one of this kind, or the only one."""
    locals_of = _local(plan, next(iter(ranks.values()))) if ranks else []
    fitting = [local for local in locals_of if ranks.items() <= dict(enumerate(local.ranks)).items()]
    return next((local for local in fitting if local.name == kind), fitting[0] if len(fitting) == 1 else None)


def kinds_of_size(plan: Plan | None, size: int) -> list[str]:
    """Return the kinds of a plan whose first group has this many ranks."""
    return [local.name for local in _local(plan, 0) if len(local.ranks) == size]


def known_group(group: GroupName, members: tuple[int, ...], plan: Plan | None = None) -> KnownGroup:
    """Return the group under its name in the plan, or under the name that torch has for it."""
    desc = group.desc.rpartition(":")[2] if "@" in group.desc else group.desc
    kind = desc.partition("@")[0]
    if group.desc == DEFAULT:
        return KnownGroup(group.name, "world", "world", members)
    if (chosen := group_of_plan(plan, members, kind)) is not None:
        return KnownGroup(group.name, chosen.name, str(chosen), members)
    if "@" in group.desc or _OURS.fullmatch(group.name):
        return KnownGroup(group.name, kind, desc, members)
    if not group.is_described:
        return KnownGroup(group.name, _UNNAMED, f"group of {listed(members)}", members)
    return KnownGroup(group.name, kind, f"{kind} {listed(members)}", members)
