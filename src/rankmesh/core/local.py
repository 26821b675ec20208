"""One rank's part of a plan: the groups that it is in, with its place in each.

>>> from rankmesh.core import Mesh, ends
>>> from rankmesh.core import GroupSpec, Plan
>>> plan = Plan(Mesh(tp=2, pp=4), [GroupSpec("tp"), GroupSpec("pp"), GroupSpec("embd", axes="pp", pick=ends)])
>>> mine = plan.of(7)
>>> list(mine), mine["pp"].ranks, mine["pp"].rank, str(mine["pp"])
(['tp', 'pp', 'embd'], (1, 3, 5, 7), 3, 'pp@tp1')
>>> plan.of(3)["embd"]
Traceback (most recent call last):
rankmesh.errors.NotAMember: rank 3 is not in group 'embd': its members here are [1, 7]; \
ask on one of them, or test with 'embd' in groups
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, overload

from rankmesh.core.groups import Group, Groups
from rankmesh.core.options import Options
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import NotAMember, listed

if TYPE_CHECKING:
    from rankmesh.core.plan import Plan

__all__ = ["ByKind", "LocalGroup", "LocalGroups"]

_Default = TypeVar("_Default")
_Group = TypeVar("_Group", covariant=True)


@dataclass(frozen=True)
class LocalGroup:
    """One group as one of its members sees it.

    ``group`` lists the members, ``rank`` is the position of this rank among them, ``kind`` are all groups of its kind,
    ``canonical`` names the group whose process group this one uses (its own name where it is the first).
    """

    spec: GroupSpec
    group: Group
    rank: int
    canonical: str
    kind: Groups = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the kind in the plan."""
        return self.spec.name

    @property
    def options(self) -> Options:
        """The effective options."""
        return self.spec.options

    @cached_property
    def coordinate(self) -> tuple[tuple[str, int], ...]:
        """Coordinate of the group: its position along each axis that the group does not span."""
        return tuple(self.kind.coordinate_of(self.group[0]).items())

    @property
    def piece(self) -> int | None:
        """Number of this piece in its whole group, if the kind is a level of a hierarchy; None for whole groups."""
        return self.kind.piece_of(self.group[0])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, global ranks in the order of their positions."""
        return self.group.ranks

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.group)

    def __iter__(self) -> Iterator[int]:
        return iter(self.group)

    def __len__(self) -> int:
        return len(self.group)

    def __contains__(self, rank: object) -> bool:
        return rank in self.group

    def __str__(self) -> str:
        """Kind and coordinate, slowest first: ``tp@pp2,dp5``; a piece of a level adds its number: ``hcp_0@dp1#3``."""
        place = ",".join(f"{axis}{position}" for axis, position in reversed(self.coordinate))
        piece = "" if self.piece is None else f"#{self.piece}"
        return f"{self.name}@{place}{piece}" if place or piece else self.name


class ByKind(Mapping[str, _Group]):
    """One rank's group of each kind that it is in; ``[name]`` raises ``NotAMember`` for another kind of the plan."""

    __slots__ = ()

    @overload
    def get(self, name: str, /) -> _Group | None: ...
    @overload
    def get(self, name: str, /, default: _Default) -> _Group | _Default: ...
    def get(self, name: str, /, default: object = None) -> object:
        """Return the group of one kind, or ``default`` where this rank is in none of that kind.

        ``UnknownGroup`` for a name that the plan does not have: a misspelt name is a mistake with a default too.
        """
        try:
            return self[name]
        except NotAMember:
            return default


class LocalGroups(ByKind[LocalGroup]):
    """The groups that one rank is in, by name, in the plan's order; each is located when it is first asked for.

    ``[name]`` raises ``NotAMember`` for a kind that this rank is in none of; ``get(name)`` is then None. A name that
    the plan does not have is ``UnknownGroup`` with both.
    """

    __slots__ = ("_known", "_plan", "_position", "rank")

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self._plan = rank, plan
        self._position = plan.mesh.rank_range.position(rank) if rank in plan.mesh else None
        self._known: dict[str, LocalGroup | None] = {}

    def _find(self, name: str) -> LocalGroup | None:
        """Return this rank's group of a kind, None where it is in none; raise ``UnknownGroup`` for another name."""
        if name not in self._known:
            kind = self._plan.groups(name)
            found = None if self._position is None else kind.locate_at(self._position)
            canonical = self._plan.canonical[name]
            self._known[name] = found and LocalGroup(self._plan.spec(name), *found, canonical, kind)
        return self._known[name]

    def __getitem__(self, name: str) -> LocalGroup:
        found = self._find(name)
        if found is None:
            raise self._absent(name, self._plan.groups(name))
        return found

    def _absent(self, name: str, groups: Groups) -> NotAMember:
        if self.rank not in groups.rank_range:
            where = f"the plan covers {groups.rank_range}"
        else:
            members = groups[groups.index_of(self.rank)]
            where = f"its members here are {listed(members)}"
        return NotAMember(
            f"rank {self.rank} is not in group {name!r}: {where}; ask on one of them, or test with {name!r} in groups",
            group=name,
            rank=self.rank,
        )

    def __contains__(self, name: object) -> bool:
        return any(name == spec.name for spec in self._plan.specs) and self._find(str(name)) is not None

    def __iter__(self) -> Iterator[str]:
        return (spec.name for spec in self._plan.specs if self._find(spec.name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def communicators(self) -> tuple[LocalGroup, ...]:
        """The groups whose process group needs a communicator: one each, canonical ones of more than one rank."""
        return tuple(local for local in self.values() if local.canonical == local.name and local.size > 1)

    def __repr__(self) -> str:
        return f"LocalGroups(rank={self.rank}, {', '.join(map(str, self.values()))})"
