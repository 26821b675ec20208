"""Rooms: where the calls of a group's members meet. One room for each process group, whatever object a rank has for it.

```
member 0   all_reduce ─┐
member 1   all_reduce ─┼─ meeting 0: equal calls, computed when the last one comes
member 2   all_reduce ─┘
member 0   send to 1 ──── recv of member 1: a pair, matched in the order of their posting, by tag
```

The n-th collective of each member is one meeting. A meeting whose calls differ fails for all of its members as soon as
all have come, or nobody can run; so does one that some member never joins. A room in which something failed stays shut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rankmesh.doctor.calls import difference
from rankmesh.sim.calls import Call
from rankmesh.sim.compute import compute, fit

__all__ = ["Complaint", "Meeting", "Room", "Ticket"]


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
    meeting: Meeting | None = None
    peer: int | None = None
    tag: int = 0
    settled: bool = False
    delivered: bool = False
    complaint: Complaint | None = None
    source: int = -1

    @property
    def awaited(self) -> list[int]:
        """The global ranks whose calls are missing; empty for a receive from anybody."""
        if self.meeting is not None:
            return self.meeting.absent
        return [] if self.peer is None else [self.room.ranks[self.peer]]


@dataclass(eq=False)
class Meeting:
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
        self._meetings: dict[int, Meeting] = {}
        self._next = [0] * len(self.ranks)
        self._posts: list[Ticket] = []

    def __str__(self) -> str:
        members = list(self.ranks)
        return f"{self.label} of ranks {members if len(members) <= 16 else f'{members[:16]} and more'}"

    def join(self, call: Call) -> Ticket:
        """A collective call: into the meeting whose turn it is for this member."""
        number = self._next[call.position]
        self._next[call.position] += 1
        meeting = self._meetings.setdefault(number, Meeting(self, number))
        ticket = meeting.tickets[call.position] = Ticket(self, call, meeting=meeting)
        if len(meeting.tickets) == len(self.ranks):
            del self._meetings[number]
            self._hold(meeting)
        return ticket

    def _hold(self, meeting: Meeting) -> None:
        difference = meeting.difference()
        if difference is not None:
            self.fail([*meeting.tickets.values()], "mismatch", difference)
            return
        try:
            compute(meeting.calls)
        except (RuntimeError, TypeError, StopIteration) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.fail([*meeting.tickets.values()], "refused", f"these tensors cannot be computed ({reason})")
            return
        for ticket in meeting.tickets.values():
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
        return [ticket for meeting in self._meetings.values() for ticket in meeting.tickets.values()] + self._posts

    def forget(self, tickets: Sequence[Ticket]) -> None:
        """Take open calls out of the room."""
        gone = {id(ticket) for ticket in tickets}
        self._posts = [ticket for ticket in self._posts if id(ticket) not in gone]
        for number, meeting in list(self._meetings.items()):
            if any(id(ticket) in gone for ticket in meeting.tickets.values()):
                del self._meetings[number]

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
