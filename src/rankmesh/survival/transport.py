"""Transport: how a member reaches the others, and how it waits, whether it is a process or a simulated rank.

```
Peers              heartbeats and stores over TCP, threads, the clock of the system
SimulatedPeers     simulated ranks: messages are calls, time is simulated
```
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.survival.epoch import Contact, Epoch
from rankmesh.survival.heartbeat import Message, Presence
from rankmesh.survival.members import Members
from rankmesh.survival.world import EpochWorld

__all__ = ["Connection", "Event", "Transport"]


class Event(Protocol):
    """An event that one thread of a member waits for and another one sets, as ``threading.Event``."""

    def is_set(self) -> bool:
        """Return whether it was set."""

    def set(self) -> None:
        """Wake those that wait."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; whether it is."""


class Connection(Protocol):
    """A connection to the store of a member."""

    @property
    def store(self) -> Store:
        """The store."""

    def cut(self) -> None:
        """End the connection: every call fails from now on."""


class Transport(Protocol):
    """The surroundings that a member of a job needs.

    ``device`` is where this member's tensors live; ``key`` is the text of the job's key, "" before ``introduce``.
    """

    member: int
    key: str
    device: torch.device

    def introduce(self) -> Message | None:
        """Tell the others where this member is reached, and learn where they are; what they tell one that joins.

        Messages come from now on, before it returns.
        """

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each member."""

    @property
    def contacts(self) -> Mapping[int, Contact]:
        """The contact of each member."""

    def admit(self, joined: Mapping[int, Contact]) -> None:
        """Further members, and where they are reached."""

    def exchange(self, members: Collection[int], message: Message, seconds: float) -> Mapping[int, Message | Presence]:
        """Send a message to other members; the reply of each, or why there is none."""

    def announce(self, members: Collection[int], message: Message, seconds: float) -> None:
        """Send a message without waiting for the replies; again to who gives none, for so many seconds."""

    def watch(self, member: int, timeout: float, late: Callable[[], object], lost: Callable[[Presence], None]) -> None:
        """Watch another member from now on, instead of the one before; ``lost`` is called at most once.

        ``late`` is called shortly before the end of ``timeout`` seconds without a reply.
        """

    def ended(self, members: Collection[int]) -> set[int]:
        """Return the members on this host whose processes have ended for certain, as its kernel shows."""

    def stood_still(self) -> float:
        """Return the longest time, in seconds, that this member gave no reply, since ``start_over``."""

    def start_over(self) -> None:
        """Count anew how long this member stood still."""

    def client(self, server: int, seconds: float) -> Connection:
        """Return a connection to the store of a member; ``ConnectError`` where it does not answer in time."""

    def prepare(self, servers: Collection[int], seconds: float) -> None:
        """Connect to the stores of these members meanwhile, and to no others: ``client`` then finds a connection."""

    def forget(self, before: int) -> None:
        """Delete what epochs before this number have left in the store of this member, meanwhile."""

    def world(self, connection: Connection, epoch: Epoch, members: Members, seconds: float) -> EpochWorld:
        """Return this member's world of an epoch, not entered yet, in which this many seconds bound each wait."""

    def event(self) -> Event:
        """Record an event of this member."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def committed(self, step: int) -> None:
        """Record that this member has committed a step."""

    def close(self) -> None:
        """Reply no more, and watch nobody."""
