"""Rooms: where the calls of a group's members meet. One room for each process group, whatever object a rank has for it.

```
member 0   all_reduce ─┐
member 1   all_reduce ─┼─ collective 0: equal calls, computed when the last one comes
member 2   all_reduce ─┘
member 0   send to 1 ──── recv of member 1: a pair, matched in the order of their posting, by tag
```

The n-th call of each member is one collective. A collective whose calls differ fails for all of its members as soon as
all have come, or nobody can run; so does one that some member never joins. A room in which something failed stays shut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rankmesh.debug.doctor.calls import difference
from rankmesh.errors import first_line, listed
from rankmesh.sim.calls import Call
from rankmesh.sim.compute import compute, fit

__all__ = ["Collective", "Complaint", "Room", "Ticket"]


@dataclass(frozen=True)
class Complaint:
    """Why calls failed: what a ``DivergenceError`` says on each rank."""

    kind: str
    text: str
    room: Room
    calls: dict[int, Call]


@dataclass(eq=False)
class Ticket:
    """One call of one rank, on its way: settled when it is done, or has failed with a complaint."""

    room: Room
    call: Call
    collective: Collective | None = None
    peer: int | None = None
    tag: int = 0
    settled: bool = False
    delivered: bool = False
    complaint: Complaint | None = None
    source: int = -1

    @property
    def awaited(self) -> list[int]:
        """The global ranks whose calls are missing; empty for a receive from anybody."""
        if self.collective is not None:
            return self.collective.absent
        return [] if self.peer is None else [self.room.ranks[self.peer]]


@dataclass(eq=False)
class Collective:
    """The n-th collective of a room."""

    room: Room
    number: int
    tickets: dict[int, Ticket] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        """The calls that have come, in the order of positions."""
        return [self.tickets[position].call for position in sorted(self.tickets)]

    @property
    def absent(self) -> list[int]:
        """The global ranks that have not come."""
        return [rank for position, rank in enumerate(self.room.ranks) if position not in self.tickets]

    def difference(self) -> str | None:
        """What differs between the calls that have come; None when they are one call."""
        different = difference(self.calls)
        if different is not None:
            return str(different)
        return fit(self.calls) if len(self.tickets) == len(self.room.ranks) else None


class Room:
    """The calls of one process group: ``ranks`` are its members, ``label`` its kind and coordinate."""

    def __init__(self, name: str, ranks: Sequence[int], label: str, settled: Callable[[Ticket], None]) -> None:
        self.name, self.ranks, self.label = name, tuple(ranks), label
        self.complaint: Complaint | None = None
        self._settled = settled
        self._collectives: dict[int, Collective] = {}
        self._next = [0] * len(self.ranks)
        self._posts: list[Ticket] = []

    def __str__(self) -> str:
        return f"{self.label} of ranks {listed(self.ranks)}"

    def join(self, call: Call) -> Ticket:
        """A collective call: to the one whose turn it is for this member."""
        number = self._next[call.position]
        self._next[call.position] += 1
        collective = self._collectives.setdefault(number, Collective(self, number))
        ticket = collective.tickets[call.position] = Ticket(self, call, collective=collective)
        if len(collective.tickets) == len(self.ranks):
            del self._collectives[number]
            self._hold(collective)
        return ticket

    def _hold(self, collective: Collective) -> None:
        difference = collective.difference()
        if difference is not None:
            self.fail([*collective.tickets.values()], "mismatch", difference)
            return
        try:
            compute(collective.calls)
        except (RuntimeError, TypeError, StopIteration) as error:
            why = f"these tensors cannot be computed ({first_line(error)})"
            self.fail([*collective.tickets.values()], "refused", why)
            return
        for ticket in collective.tickets.values():
            self.settle(ticket)

    def settle(self, ticket: Ticket, complaint: Complaint | None = None) -> None:
        """The call is done, or failed; the rank that waits for it can go on."""
        ticket.settled, ticket.complaint = True, complaint
        self._settled(ticket)

    def fail(self, tickets: Sequence[Ticket], kind: str, text: str) -> None:
        """These calls fail with a complaint, and the room stays shut."""
        complaint = Complaint(kind, text, self, {ticket.call.rank: ticket.call for ticket in tickets})
        self.complaint = self.complaint or complaint
        for ticket in tickets:
            if not ticket.settled:
                self.settle(ticket, complaint)

    @property
    def open(self) -> list[Ticket]:
        """Calls that have not met yet."""
        joined = [ticket for collective in self._collectives.values() for ticket in collective.tickets.values()]
        return joined + self._posts

    def forget(self, tickets: Sequence[Ticket]) -> None:
        """Take open calls out of the room."""
        gone = {id(ticket) for ticket in tickets}
        self._posts = [ticket for ticket in self._posts if id(ticket) not in gone]
        for number, collective in list(self._collectives.items()):
            if any(id(ticket) in gone for ticket in collective.tickets.values()):
                del self._collectives[number]

    # -- point to point -----------------------------------------------------------------------------------------

    def post(self, call: Call, peer: int | None, tag: int, choose: Callable[[Sequence[object]], int]) -> Ticket:
        """A send to, or a receive from, the member at position ``peer``; None receives from anybody."""
        ticket = Ticket(self, call, peer=peer, tag=tag)
        partners = self._partners(ticket)
        if not partners:
            self._posts.append(ticket)
            return ticket
        partner = partners[choose(partners)] if peer is None else partners[0]
        self._posts.remove(partner)
        self._transfer(*((ticket, partner) if call.operation == "send" else (partner, ticket)))
        return ticket

    def _partners(self, ticket: Ticket) -> list[Ticket]:
        """Posts that match, the oldest of each sender only: what one rank sends to another stays in order."""
        found: dict[int, Ticket] = {}
        for other in self._posts:
            if (
                other.call.operation != ticket.call.operation
                and other.tag == ticket.tag
                and other.peer in (None, ticket.call.position)
                and ticket.peer in (None, other.call.position)
            ):
                found.setdefault(other.call.position, other)
        return list(found.values())

    def _transfer(self, send: Ticket, recv: Ticket) -> None:
        gives, takes = send.call.given[0], recv.call.outputs[0]
        if (gives.numel(), gives.dtype) != (takes.numel(), takes.dtype):
            self.fail([send, recv], "mismatch", "what is sent is not what is received")
            return
        recv.call.results, recv.source, send.call.results = [gives], send.call.position, []
        for ticket in (send, recv):
            self.settle(ticket)
