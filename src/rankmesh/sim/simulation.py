"""A simulation: the baton, the rooms of all process groups, the store, and what each rank is doing.

```
rank's thread ── torch.distributed ── SimulatedGroup ── join, post ──┐
                                 └─── SimulatedWork ─── wait ────────┼── rooms, store, baton
                                 └─── SimulatedStore ── await_keys ──┘
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from rankmesh.backend import torch_threads
from rankmesh.sim.baton import Baton, Chooser, Order, Waiting
from rankmesh.sim.calls import Site, call_site
from rankmesh.sim.failures import DivergenceError
from rankmesh.sim.group import SimulatedGroup
from rankmesh.sim.process import Process
from rankmesh.sim.reports import divergence, mismatch, stuck, unmatched
from rankmesh.sim.rooms import Complaint, Room, Ticket
from rankmesh.sim.store import Keys, SimulatedStore
from rankmesh.sim.works import SimulatedWork, deliver

__all__ = ["Seat", "Simulation", "current_seat"]

_thread = threading.local()


@dataclass(eq=False)
class Seat:
    """One rank of a simulation: its thread sits here. ``world`` holds what torch registers for it."""

    simulation: Simulation
    rank: int
    world: torch_threads.RankWorld

    def sit(self) -> None:
        """This thread is the rank."""
        _thread.seat = self


def current_seat() -> Seat | None:
    """The rank that this thread is; None outside, ``Abandoned`` for a rank that was given up."""
    seat: Seat | None = getattr(_thread, "seat", None)
    if seat is not None:
        seat.simulation.baton.check(seat.rank)
    return seat


class Simulation:
    """``size`` ranks that meet in rooms; ``order`` says who runs next."""

    def __init__(self, size: int, order: Order, backend: str, process: Process | None = None) -> None:
        self.size, self.backend = size, backend
        self.chooser = Chooser(order)
        switch = (lambda before, after: None) if process is None else process.switch
        self.baton = Baton(size, self.chooser, self._stuck, switch)
        self.store = SimulatedStore(self)
        self.ends: dict[int, str] = {}
        self._rooms: dict[tuple[str, tuple[int, ...]], Room] = {}
        self._awaited: dict[int, Callable[[], bool]] = {}

    # -- process groups -----------------------------------------------------------------------------------------

    def group(self, rank: int, name: str, ranks: Sequence[int], label: str) -> SimulatedGroup:
        """The process group of one rank; its room is that of the name and the members."""
        key = (name, tuple(ranks))
        if key not in self._rooms:
            self._rooms[key] = Room(name, ranks, label, self._settled)
        return SimulatedGroup(self, self._rooms[key], key[1].index(rank))

    def join(self, pg: SimulatedGroup, call: object) -> SimulatedWork:
        """A collective call."""
        return self._post(pg, lambda: pg.room.join(call))  # type: ignore[arg-type]

    def post(self, pg: SimulatedGroup, call: object, peer: int | None, tag: int) -> SimulatedWork:
        """A send or a receive."""
        return self._post(pg, lambda: pg.room.post(call, peer, tag, self.chooser.next))  # type: ignore[arg-type]

    def _post(self, pg: SimulatedGroup, put: Callable[[], Ticket]) -> SimulatedWork:
        seat = current_seat()
        self._check_use(pg, seat)
        if self.chooser.random is not None:
            self.baton.pause(pg.owner)
        if pg.room.complaint is not None:
            raise divergence(pg.room.complaint, pg.owner, again=True)
        return SimulatedWork(put(), self._wait, self._look)

    def _check_use(self, pg: SimulatedGroup, seat: Seat | None) -> None:
        if seat is None or seat.simulation is not self or seat.rank != pg.owner:
            who = "a thread that is no rank" if seat is None else f"rank {seat.rank}"
            raise DivergenceError(
                f"received the process group of rank {pg.owner} ({pg.room}) on {who}, at {call_site()}; each rank has "
                "its own; keep no process group where ranks share it, or name the module whose globals hold it: "
                "run(..., modules=['package.module'])",
                kind="foreign",
                group=pg.room.label,
                ranks=pg.room.ranks,
                rank=None if seat is None else seat.rank,
            )
        if pg.destroyed:
            raise DivergenceError(
                f"rank {pg.owner}: received a call on the destroyed group {pg.room}, at {call_site()}; a group is used "
                "before it is closed; make the call earlier, or connect again",
                kind="destroyed",
                group=pg.room.label,
                ranks=pg.room.ranks,
                rank=pg.owner,
            )

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait(self, ticket: Ticket) -> None:
        rank = ticket.call.rank
        self.baton.check(rank)
        if not ticket.settled:
            self.baton.block(rank, ticket)
        if ticket.complaint is not None:
            raise divergence(ticket.complaint, rank)
        if not deliver(ticket):
            text = f"rank {rank} changed a tensor between the call and the wait"
            raise divergence(Complaint("race", text, ticket.room, {rank: ticket.call}), rank)

    def _look(self, ticket: Ticket) -> bool:
        if not ticket.settled:
            self.baton.pause(ticket.call.rank, idle=True)
        if ticket.settled and ticket.complaint is None:
            deliver(ticket)
        return ticket.settled

    def _settled(self, ticket: Ticket) -> None:
        waiting = self.baton.waiting.get(ticket.call.rank)
        if waiting is not None and waiting.what is ticket:
            self.baton.wake(ticket.call.rank)

    def look(self) -> bool:
        """Let the others run, for a rank that looks again and again."""
        seat = current_seat()
        if seat is not None:
            self.baton.pause(seat.rank, idle=True)
        return True

    def await_keys(self, here: Callable[[], bool], keys: Sequence[str], limit: float) -> bool:
        """Wait until the keys are there; False when they are not within the limit."""
        seat = current_seat()
        while not here():
            if seat is None:
                return False
            self._awaited[seat.rank] = here
            if not self.baton.block(seat.rank, Keys(keys, call_site()), limit=limit):
                return here()
        return True

    def stored(self) -> None:
        """Something was written to the store: wake those whose keys are there now."""
        for rank, here in list(self._awaited.items()):
            if here():
                del self._awaited[rank]
                self.baton.wake(rank)

    # -- the end ------------------------------------------------------------------------------------------------

    def _stuck(self, waiting: dict[int, Waiting]) -> None:
        """Nobody can run: what differs is told first, else who waits for whom."""
        tickets = {rank: wait.what for rank, wait in waiting.items() if isinstance(wait.what, Ticket)}
        for ticket in tickets.values():
            difference = ticket.collective and ticket.collective.difference()
            if ticket.collective and difference:
                room, posted = ticket.room, list(ticket.collective.tickets.values())
                room.forget(posted)
                room.fail(posted, "mismatch", mismatch(ticket.collective, difference, self.doing))
                return
        text = stuck(tickets, self.doing)
        for ticket in tickets.values():
            ticket.room.forget([ticket])
            ticket.room.fail([ticket], "deadlock", text)

    def doing(self, rank: int) -> str:
        """What a rank does or how it ended, in words."""
        if rank in self.ends:
            return self.ends[rank]
        waiting = self.baton.waiting.get(rank)
        if waiting is None:
            return "runs"
        if isinstance(waiting.what, Ticket):
            return f"waits in {waiting.what.call} on {waiting.what.room}, at {waiting.what.call.site}"
        return f"waits for {waiting.what}"

    def left_over(self) -> dict[int, DivergenceError]:
        """Calls that had met nobody when the ranks ended, as the error of each rank that made one."""
        found: dict[int, DivergenceError] = {}
        for room in self._rooms.values():
            tickets = [] if room.complaint is not None else room.open
            for ticket in tickets:
                complaint = Complaint("unmatched", unmatched(ticket), room, {ticket.call.rank: ticket.call})
                found.setdefault(ticket.call.rank, divergence(complaint, ticket.call.rank))
        return found

    # -- what torch asks for ------------------------------------------------------------------------------------

    def make(self, seat: Seat, name: str, ranks: Sequence[int], label: str, *, meet: bool) -> SimulatedGroup:
        """A process group for torch; with ``meet`` its members wait for each other here."""
        known = {"default_pg": "the world", "undefined": f"group {name!r}"}
        pg = self.group(seat.rank, name, ranks, known.get(label, label))
        if meet and len(pg.room.ranks) > 1:
            pg.meet()
        return pg

    def not_a_member(self, seat: Seat, operation: str) -> DivergenceError:
        """The error of a call on torch's placeholder for a group that the rank is not in."""
        site: Site = call_site()
        return DivergenceError(
            f"rank {seat.rank}: received {operation} on a group that this rank is not in, at {site}; torch.distributed "
            "only warns, does nothing, and leaves the tensors as they are; call it on members only",
            kind="outside",
            group="",
            ranks=(),
            rank=seat.rank,
            calls={seat.rank: operation},
            sites={seat.rank: site.place},
        )

    @property
    def timeout(self) -> timedelta:
        """The timeout of the simulated world, in simulated time."""
        return timedelta(minutes=30)
