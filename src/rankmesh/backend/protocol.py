"""The protocol of backends: how they make and destroy process groups, and the request for one.

```
create     a group that this rank is in
decline    the part of a rank that is in no group of a kind, where every rank of the world takes part
destroy    undo the first
abort      whoever is blocked in a collective of these groups returns with an error
```

``MemberBackend`` (``members.py``) uses private pieces of torch, one class for each family of releases;
``PublicBackend`` (``public.py``) uses torch's public API alone; ``ThreadBackend`` (``torch_threads.py``) makes the
groups of simulated ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from rankmesh.core.options import Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rankmesh.backend.cut import Drain

__all__ = ["Backend", "GroupRequest", "Kind", "NotJoined"]


@dataclass(frozen=True)
class Kind:
    """The groups of one kind, as every rank of the world describes them: members of each, backend, timeout, options."""

    name: str
    groups: Iterable[Sequence[int]]
    backend: str
    timeout: timedelta
    options: Options

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (tuple(int(rank) for rank in group) for group in self.groups)


@dataclass(frozen=True)
class GroupRequest:
    """One process group that this rank is in: its members by position, this rank's position, its name and options.

    A ``lazy`` group is one whose members join at their own time, and wait for each other as long as its timeout.
    """

    kind: Kind
    name: str
    desc: str
    ranks: Sequence[int]
    rank: int
    lazy: bool = False


class Backend(Protocol):
    """Everything that rankmesh does with torch's process groups."""

    # Whether every rank of the world takes part in making every group.
    collective: bool = False
    # Set where the connection to the store was ended: nothing is deleted there.
    store_lost: bool = False
    # Up to how many members a group of gloo connects when it is made; None: as many as is fastest.
    eager_size: int | None = None
    # What reads on connections that an abort cut; None: one of its own.
    drain: Drain | None = None

    @property
    def shares(self) -> bool:
        """True if kinds of group with equal members and options share one process group."""
        return True

    def check(self, kind: Kind) -> None:
        """Raise ``PlanError`` or ``ConnectError`` for a kind that this backend cannot make; nothing is made here."""

    def create(self, request: GroupRequest, deadline: float) -> ProcessGroup:
        """Make a group with its members; raise ``NotJoined`` if one does not join by ``deadline`` (``monotonic``)."""

    def decline(self, kind: Kind) -> None:
        """Take part in making the groups of a kind as a rank that is in none of them."""

    def destroy(self, pg: ProcessGroup, *, connected: bool = True) -> None:
        """Destroy a group; a world that was destroyed before took it along already.

        ``connected``: all of its members have made it. Until then they may still look for this one in the store.
        """

    def abort(self, groups: Sequence[ProcessGroup]) -> None:
        """Have every collective that is blocked in these groups return with an error; they are only destroyed then."""

    def release(self) -> None:
        """Keep nothing between groups: none is left."""


class NotJoined(RuntimeError):
    """A process group whose members did not all join in time; ``seen`` are those that had joined, by global rank."""

    def __init__(self, reason: str, seen: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.seen = seen
