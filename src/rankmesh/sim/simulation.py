"""A simulation: the scheduler, a channel for each process group, the store, and what each rank is doing.

```
rank's thread ── torch.distributed ── SimulatedGroup ── join, post ──┐
                                 └─── SimulatedWork ─── wait ────────┼── channels, store, scheduler
                                 └─── SimulatedStore ── await_keys ──┘
```
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rankmesh.backend import torch_threads
from rankmesh.debug.doctor.calls import difference
from rankmesh.sim.calls import Call, call_site
from rankmesh.sim.channel import Channel, Failure, Observer, PendingOperation
from rankmesh.sim.failures import DivergenceError, divergence, mismatch, stuck, unmatched
from rankmesh.sim.group import SimulatedGroup
from rankmesh.sim.process import Process
from rankmesh.sim.scheduler import Abandoned, Order, Scheduler, Waiting
from rankmesh.sim.store import Keys, ServedStore, SimulatedStore, unreachable

__all__ = ["RankContext", "Simulation", "current_context"]

_thread = threading.local()


@dataclass(eq=False)
class RankContext:
    """One rank of a simulation, on its thread. ``world`` holds what torch registers for it.

    Where it is a member of a job that survives, ``standing`` has the epoch and the member at each rank of the world;
    ``groups`` are those that were made since the world began.
    """

    simulation: Simulation
    rank: int
    world: torch_threads.RankWorld
    standing: tuple[str, Sequence[int]] | None = None
    groups: list[SimulatedGroup] = field(default_factory=list)

    def enter(self) -> None:
        """Make this thread the rank."""
        _thread.context = self

    # -- what torch asks for ------------------------------------------------------------------------------------

    @property
    def identity(self) -> object:
        """Return the key that separates this rank's device meshes from the others' meshes."""
        return id(self.simulation), self.rank

    @property
    def is_observed(self) -> bool:
        """Return whether someone observes the calls."""
        return self.simulation.observer is not None

    def make(self, name: str, ranks: Sequence[int], desc: str, *, meet: bool) -> SimulatedGroup:
        """Make a process group for torch; with ``meet`` its members wait for each other here."""
        known = {"default_pg": "the world", "undefined": f"group {name!r}"}
        if self.standing is not None:
            epoch, members = self.standing
            name, ranks = f"epoch {epoch}/{name}", [members[rank] for rank in ranks]
        pg = self.simulation.group(self.rank, name, ranks, known.get(desc, desc))
        self.groups.append(pg)
        if meet and len(pg.channel.ranks) > 1:
            pg.meet()
        return pg

    def rendezvous(self) -> tuple[SimulatedStore, int, int]:
        """Return store, rank and world size, for a rank that initialises the world itself."""
        return self.simulation.store, self.rank, self.simulation.size

    def refuse(self, operation: str) -> NoReturn:
        """Raise for a call on torch's placeholder for a group that the rank is not in."""
        site = call_site()
        raise DivergenceError(
            f"rank {self.rank} calls {operation} on a group that it is not in, at {site}, where torch.distributed "
            "only warns and leaves the tensors as they are; call it on members only",
            kind="outside",
            rank=self.rank,
            calls={self.rank: operation},
            sites={self.rank: site.place},
        )


def current_context() -> RankContext | None:
    """Return the rank that this thread is; None outside, ``Abandoned`` for a rank that was given up."""
    context: RankContext | None = getattr(_thread, "context", None)
    if context is not None:
        context.simulation.scheduler.check(context.rank)
    return context


class Simulation:
    """``size`` ranks, and the channels of their groups; ``order`` decides which runs next."""

    def __init__(self, size: int, order: Order, backend: str, process: Process, observer: Observer | None) -> None:
        self.size, self.backend, self.observer = size, backend, observer
        self.scheduler = Scheduler(size, order, self._stuck, process.switch)
        self.store = SimulatedStore(self)
        # How each rank ended, in words; the values of some, and the errors of others in the order in which they failed.
        self.ends: dict[int, str] = {}
        self.values: dict[int, object] = {}
        self.failures: dict[int, BaseException] = {}
        # Whole tensors that a rank has drawn, by name, and how many ranks will draw them, too (``sim.random``).
        self.drawn: dict[str, tuple[object, Any, int]] = {}
        self._channels: dict[tuple[str, tuple[int, ...]], Channel] = {}
        # Who waits for each key of a store.
        self._awaited: dict[str, dict[int, Keys]] = {}
        # Of a job that survives: the step that each of these ranks is lost at, the store that each member serves, and
        # the members, which `rankmesh.survival.simulated` knows.
        self.lose: dict[int, int] = {}
        self.stores: dict[int, dict[str, bytes]] = {}
        self.members: Any = None

    # -- process groups -----------------------------------------------------------------------------------------

    def group(self, rank: int, name: str, ranks: Sequence[int], label: str) -> SimulatedGroup:
        """Return the process group of one rank; its channel belongs to the name and the members."""
        key = (name, tuple(ranks))
        if key not in self._channels:
            self._channels[key] = Channel(name, ranks, label, self.scheduler.notify, self.observer)
        return SimulatedGroup(self, self._channels[key], key[1].index(rank))

    def join(self, pg: SimulatedGroup, call: Call) -> PendingOperation:
        """Make a collective call, on the group that the observer chooses."""
        chosen = pg if self.observer is None else self.observer.route(pg, call)
        self._admit(chosen)
        return chosen.channel.join(call)

    def post(self, pg: SimulatedGroup, call: Call, peer: int | None, tag: int) -> PendingOperation:
        """Post a send or a receive."""
        self._admit(pg)
        return pg.channel.post(call, peer, tag, self.scheduler.choose)

    def _admit(self, pg: SimulatedGroup) -> None:
        """Let this rank make a call on its group, after others in a random order; refuse any other thread."""
        self._check_use(pg)
        if self.scheduler.random is not None:
            self.scheduler.pause(pg.owner)
        if pg.channel.failure is not None:
            raise divergence(pg.channel.failure, pg.owner, again=True)

    def _check_use(self, pg: SimulatedGroup) -> None:
        context = current_context()
        if context is None or context.simulation is not self or context.rank != pg.owner:
            who = "a thread that is not a rank" if context is None else f"rank {context.rank}"
            raise DivergenceError(
                f"{who} uses the process group of rank {pg.owner} ({pg.channel}), at {call_site()}, but each rank has "
                "its own; name the module whose globals hold it: run(..., modules=['package.module'])",
                kind="foreign",
                group=pg.channel.label,
                ranks=pg.channel.ranks,
                rank=None if context is None else context.rank,
            )
        if pg.destroyed:
            raise DivergenceError(
                f"rank {pg.owner} uses the destroyed group {pg.channel}, at {call_site()}; make the call before the "
                "group is closed, or connect again",
                kind="destroyed",
                group=pg.channel.label,
                ranks=pg.channel.ranks,
                rank=pg.owner,
            )

    # -- waiting ------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Let the others run, for a rank that looks again and again."""
        context = current_context()
        if context is not None:
            self.scheduler.pause(context.rank, idle=True)
        return True

    def await_keys(self, store: SimulatedStore, keys: Sequence[str], limit: float) -> bool:
        """Wait until the keys are in a store; False when they are not within the limit."""
        context = current_context()
        awaited = Keys(store, keys, call_site())
        if context is None:
            return awaited.here
        for key in awaited.keys:
            self._awaited.setdefault(key, {})[context.rank] = awaited
        try:
            while not awaited.here:
                if not self.scheduler.block(context.rank, awaited, limit=limit):
                    break
        finally:
            for key in awaited.keys:
                waiting = self._awaited.get(key, {})
                waiting.pop(context.rank, None)
                if not waiting:
                    self._awaited.pop(key, None)
        return awaited.here

    def stored(self, key: str) -> None:
        """Something was written under a key: wake those that waited for it, and have all of their keys now."""
        for rank, awaited in list(self._awaited.get(key, {}).items()):
            if awaited.here:
                self.scheduler.wake(rank)

    # -- ranks that are lost ------------------------------------------------------------------------------------

    def client(self, server: int, client: int) -> ServedStore:
        """Return a connection of one rank to the store that another one serves."""
        return ServedStore(self, server, client)

    def unreach(self, ranks: Collection[int]) -> None:
        """End the stores that these ranks serve, which are about to be lost: who waits for their keys gets an error."""
        for rank in ranks:
            self.lose.pop(rank, None)
            self.stores.pop(rank, None)
        for other, waiting in list(self.scheduler.waiting.items()):
            store = waiting.what.store if isinstance(waiting.what, Keys) else None
            if isinstance(store, ServedStore) and store.server in ranks:
                self.scheduler.wake(other, unreachable(store.server))

    def end(self, ranks: Collection[int], running: int | None) -> None:
        """End ranks as if their processes were killed, with ``Abandoned`` here if the one that is running is lost."""
        for rank in ranks:
            self.scheduler.lose(rank)
        if running in ranks:
            raise Abandoned

    # -- the end ------------------------------------------------------------------------------------------------

    def _stuck(self, waiting: dict[int, Waiting]) -> None:
        """Nobody can run: what differs is reported first, else which rank waits for which."""
        operations = {rank: wait.what for rank, wait in waiting.items() if isinstance(wait.what, PendingOperation)}
        for pending in operations.values():
            different = None if pending.collective is None else difference(pending.collective.calls)
            if pending.collective is not None and different is not None:
                channel, posted = pending.channel, list(pending.collective.operations.values())
                channel.forget(posted)
                channel.fail(posted, "mismatch", mismatch(pending.collective, different, self.doing))
                return
        for rank in waiting.keys() - operations.keys():
            text = (
                f"rank {rank} waits for {waiting[rank].what}, and no rank can go on; look at what the others wait for"
            )
            self.scheduler.wake(rank, DivergenceError(text, kind="deadlock", rank=rank))
        text = stuck(operations, self.doing)
        for pending in operations.values():
            pending.channel.forget([pending])
            pending.channel.fail([pending], "deadlock", text)

    def doing(self, rank: int) -> str:
        """Return the state of a rank in words: its call, or its end."""
        if rank in self.ends:
            return self.ends[rank]
        waiting = self.scheduler.waiting.get(rank)
        if waiting is None:
            return "runs"
        if isinstance(waiting.what, PendingOperation):
            return f"waits in {waiting.what.call} on {waiting.what.channel}, at {waiting.what.call.site}"
        return f"waits for {waiting.what}"

    def left_over(self) -> dict[int, DivergenceError]:
        """Return the errors of the calls that nobody had joined when the ranks ended, by rank."""
        found: dict[int, DivergenceError] = {}
        for channel in self._channels.values():
            operations = [] if channel.failure is not None else channel.open
            for pending in operations:
                if pending.call.rank in self.scheduler.lost:
                    continue
                failure = Failure("unmatched", unmatched(pending), channel, {pending.call.rank: pending.call})
                found.setdefault(pending.call.rank, divergence(failure, pending.call.rank))
        return found
