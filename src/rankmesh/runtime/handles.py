"""Handles: one live group as its member sees it.

A handle is the plan's part of the group (members, place, coordinate, options) with the process group beside it.
A rank has handles of its own groups only, so a handle never means an absent group, or the world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rankmesh.core.local import LocalGroup
from rankmesh.errors import ConnectError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LiveGroup"]


@dataclass(frozen=True, eq=False)
class LiveGroup:
    """A group that this rank is in, and its process group.

    Ranks of the world are global; ``rank`` is this process's position among the members.
    """

    local: LocalGroup
    opener: Callable[[], ProcessGroup]

    # Kept in the handle after the first use, where Python finds it as fast as any attribute.
    @cached_property
    def pg(self) -> ProcessGroup:
        """The ``torch.distributed`` process group: what ``group=`` of a collective takes.

        Raises ``ConnectError`` when the groups are closed.
        """
        return self.opener()

    def forget(self) -> None:
        """Keep no process group: its owner is about to destroy it."""
        vars(self).pop("pg", None)

    @property
    def name(self) -> str:
        """The name of the kind in the plan."""
        return self.local.name

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that vary inside the group."""
        return self.local.spec.axes

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The members as global ranks, in the order of their positions."""
        return self.local.ranks

    @cached_property
    def size(self) -> int:
        """Number of members."""
        return self.local.size

    @cached_property
    def rank(self) -> int:
        """The position of this process among the members."""
        return self.local.rank

    @property
    def coordinate(self) -> dict[str, int]:
        """Coordinate of the group: its position along each axis that the group does not span."""
        return dict(self.local.coordinate)

    @cached_property
    def first(self) -> int:
        """The global rank of the first member."""
        return self.local.group[0]

    @cached_property
    def last(self) -> int:
        """The global rank of the last member."""
        return self.local.group[-1]

    @property
    def root(self) -> int:
        """The global rank from which the group broadcasts: its first member."""
        return self.first

    @cached_property
    def next(self) -> int:
        """The global rank after this one in the ring: the first, on the last member."""
        return self.local.group[(self.rank + 1) % self.size]

    @cached_property
    def prev(self) -> int:
        """The global rank before this one in the ring: the last, on the first member."""
        return self.local.group[self.rank - 1]

    @property
    def is_first(self) -> bool:
        """True if this process is the first member."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True if this process is the last member."""
        return self.rank == self.size - 1

    def describe(self) -> dict[str, object]:
        """Return the group as plain, picklable data for logs."""
        return {
            "name": self.name,
            "description": str(self.local),
            "axes": list(self.axes),
            "ranks": list(self.ranks),
            "rank": self.rank,
            "coordinate": self.coordinate,
            "communicator": self.local.canonical if self.size > 1 else None,
            "options": self.local.options.to_dict(),
        }

    def __reduce__(self) -> tuple[object, ...]:
        raise ConnectError(f"live group {self.name!r} cannot be pickled, as it belongs to its process; use describe()")

    def __repr__(self) -> str:
        return f"LiveGroup({self.local}, ranks={self.local.group!r}, rank={self.rank})"
