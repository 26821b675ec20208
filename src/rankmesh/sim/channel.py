"""Channels: the calls of a group's members, matched and compared. Each process group has one, on all ranks.

```
member 0   all_reduce ─┐
member 1   all_reduce ─┼─ collective 0: equal calls, computed when the last one joins
member 2   all_reduce ─┘
member 0   send to 1 ──── recv of member 1: a pair, matched in the order of their posting, by tag
```

The n-th call of each member is one collective. A collective whose calls differ fails for all of its members as soon as
all have joined, or nobody can run; so does one that some member never joins. After a failure a channel refuses calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankmesh.debug.doctor.calls import difference
from rankmesh.errors import first_line, listed
from rankmesh.sim.calls import Call
from rankmesh.sim.compute import compute

if TYPE_CHECKING:
    from rankmesh.sim.group import SimulatedGroup

__all__ = ["Channel", "Collective", "Failure", "Observer", "PendingOperation"]


@dataclass(frozen=True)
class Failure:
    """Why calls failed: each rank raises it as a ``DivergenceError``."""

    kind: str
    text: str
    channel: Channel
    calls: dict[int, Call]


@dataclass(eq=False)
class PendingOperation:
    """One call of one rank, on its way: settled when it is done, or has failed."""

    channel: Channel
    call: Call
    collective: Collective | None = None
    peer: int | None = None
    tag: int = 0
    settled: bool = False
    delivered: bool = False
    failure: Failure | None = None
    source: int = -1

    @property
    def awaited(self) -> list[int]:
        """The global ranks whose calls are missing; empty for a receive from anybody."""
        if self.collective is not None:
            return self.collective.absent
        return [] if self.peer is None else [self.channel.ranks[self.peer]]


@dataclass(eq=False)
class Collective:
    """The n-th collective of a channel."""

    channel: Channel
    number: int
    operations: dict[int, PendingOperation] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        """The calls that were made, in the order of positions."""
        return [self.operations[position].call for position in sorted(self.operations)]

    @property
    def absent(self) -> list[int]:
        """The global ranks that have not joined."""
        return [rank for position, rank in enumerate(self.channel.ranks) if position not in self.operations]


class Observer:
    """Base of observers, which see the calls of a simulation and may change them; this one does nothing.

    ```
    rank ── SimulatedGroup ── route ── channel ── compute ── computed ── results
                              another group?                 another result?
    ```
    """

    def route(self, pg: SimulatedGroup, call: Call) -> SimulatedGroup:
        """Return the group on which a collective is made; called on the thread of its rank."""
        return pg

    def computed(self, channel: Channel, calls: Sequence[Call]) -> None:
        """Look at the members' calls, whose results may be replaced."""


class Channel:
    """The calls of one process group: ``ranks`` are its members, ``label`` its kind and coordinate."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        label: str,
        settled: Callable[[int, PendingOperation], None],
        observer: Observer | None = None,
    ) -> None:
        self.name, self.ranks, self.label = name, tuple(ranks), label
        self.failure: Failure | None = None
        self._settled, self._observer = settled, observer
        self._collectives: dict[int, Collective] = {}
        self._next = [0] * len(self.ranks)
        self._unmatched: list[PendingOperation] = []

    def __str__(self) -> str:
        return f"{self.label} of ranks {listed(self.ranks)}"

    def join(self, call: Call) -> PendingOperation:
        """Join the next collective of this member with a call."""
        number = self._next[call.position]
        self._next[call.position] += 1
        collective = self._collectives.setdefault(number, Collective(self, number))
        pending = collective.operations[call.position] = PendingOperation(self, call, collective=collective)
        if len(collective.operations) == len(self.ranks):
            del self._collectives[number]
            self._hold(collective)
        return pending

    def _hold(self, collective: Collective) -> None:
        try:
            different = difference(collective.calls) or compute(collective.calls)
            if different is not None:
                self.fail([*collective.operations.values()], "mismatch", different)
                return
            if self._observer is not None:
                self._observer.computed(self, collective.calls)
        except Exception as error:  # noqa: BLE001  - whatever it is, no member may wait for the others
            why = f"these tensors cannot be computed ({first_line(error)})"
            self.fail([*collective.operations.values()], "refused", why)
            return
        for pending in collective.operations.values():
            self.settle(pending)

    def settle(self, pending: PendingOperation, failure: Failure | None = None) -> None:
        """Settle a call that is done, or failed, so that the rank that waits for it goes on."""
        # With its collective a call would be a cycle, which keeps the tensors of all members.
        pending.settled, pending.failure, pending.collective = True, failure, None
        self._settled(pending.call.rank, pending)

    def fail(self, operations: Sequence[PendingOperation], kind: str, text: str) -> None:
        """Fail these calls, and refuse every further call of the channel."""
        failure = Failure(kind, text, self, {pending.call.rank: pending.call for pending in operations})
        self.failure = self.failure or failure
        for pending in operations:
            if not pending.settled:
                self.settle(pending, failure)

    def abort(self) -> None:
        """Fail every open call, and every further one."""
        failure = Failure("aborted", f"the connections of group {self} were cut", self, {})
        operations = self.open
        self.failure = self.failure or failure
        self.forget(operations)
        for pending in operations:
            self.settle(pending, failure)

    @property
    def open(self) -> list[PendingOperation]:
        """Calls that are not matched yet."""
        joined = [pending for collective in self._collectives.values() for pending in collective.operations.values()]
        return joined + self._unmatched

    def forget(self, operations: Sequence[PendingOperation]) -> None:
        """Take open calls out of the channel."""
        gone = {id(pending) for pending in operations}
        self._unmatched = [pending for pending in self._unmatched if id(pending) not in gone]
        for number, collective in list(self._collectives.items()):
            if any(id(pending) in gone for pending in collective.operations.values()):
                del self._collectives[number]

    # -- point to point -----------------------------------------------------------------------------------------

    def post(
        self, call: Call, peer: int | None, tag: int, choose: Callable[[Sequence[object]], int]
    ) -> PendingOperation:
        """Post a send to, or a receive from, the member at position ``peer``; None receives from anybody."""
        pending = PendingOperation(self, call, peer=peer, tag=tag)
        partners = self._partners(pending)
        if not partners:
            self._unmatched.append(pending)
            return pending
        partner = partners[choose(partners)] if peer is None else partners[0]
        self._unmatched.remove(partner)
        self._transfer(*((pending, partner) if call.operation == "send" else (partner, pending)))
        return pending

    def _partners(self, pending: PendingOperation) -> list[PendingOperation]:
        """Return the posts that match, of each sender the oldest: what one rank sends to another stays in order."""
        found: dict[int, PendingOperation] = {}
        for other in self._unmatched:
            if (
                other.call.operation != pending.call.operation
                and other.tag == pending.tag
                and other.peer in (None, pending.call.position)
                and pending.peer in (None, other.call.position)
            ):
                found.setdefault(other.call.position, other)
        return list(found.values())

    def _transfer(self, send: PendingOperation, recv: PendingOperation) -> None:
        gives, takes = send.call.given[0], recv.call.outputs[0]
        if (gives.numel(), gives.dtype) != (takes.numel(), takes.dtype):
            self.fail([send, recv], "mismatch", "what is sent is not what is received")
            return
        recv.call.results, recv.source, send.call.results = [gives], send.call.position, []
        for pending in (send, recv):
            self.settle(pending)
