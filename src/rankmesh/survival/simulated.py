"""Simulated ranks as members of a job that survives: messages are calls, time is simulated, and each rank has a store.

A rank that is lost gets ``Abandoned`` where it is, and makes no call any more. Whoever watches it learns of it at once,
as where the connections of a process close that was killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from rankmesh.errors import ConnectError
from rankmesh.rendezvous import Round, StoreChannel
from rankmesh.rendezvous.gather import gather
from rankmesh.survival.epoch import Contact, Epoch
from rankmesh.survival.heartbeat import Message, Presence
from rankmesh.survival.members import Members
from rankmesh.survival.transport import Connection
from rankmesh.survival.world import EpochWorld, old_keys

__all__ = ["SimulatedEvent", "SimulatedMembers", "SimulatedPeers", "SimulatedWorld", "joined"]

# A ``RankContext`` and the ``Simulation`` of `rankmesh.sim.simulation`, which nothing of a job that survives imports.
_Context: TypeAlias = Any
_Simulation: TypeAlias = Any

_Result = TypeVar("_Result")

# Simulated seconds in which all ranks call rm.survive().
_LIMIT = 300.0
# Seconds that bound each wait in a world: simulated ones, and those of the system where many ranks take long.
_LONG = 3600.0


class SimulatedMembers:
    """The members of the job of a simulation, which has what their stores hold, and which to lose at which step."""

    def __init__(self, simulation: _Simulation) -> None:
        self.simulation = simulation
        self.living: dict[int, SimulatedPeers] = {}

    def join(self, context: _Context, reply: Callable[[Message], Message]) -> SimulatedPeers:
        """Make a rank a member, as soon as all have joined."""
        peers = self.living[context.rank] = SimulatedPeers(self, context, reply)
        everyone = range(self.simulation.size)
        found = Round(StoreChannel(self.simulation.store, "rankmesh/survive"), "members", everyone, context.rank)
        gather(found, None, lambda _: None, _LIMIT, "survive()")
        return peers

    def committed(self, rank: int, step: int) -> None:
        """Lose the ranks that do not survive a step that one has committed."""
        due = {other: last for other, last in self.simulation.lose.items() if step >= last}
        now = [
            other
            for other, last in due.items()
            if last == due.get(rank) or (other in self.living and self.living[other].is_spare)
        ]
        if now:
            self.lost(now)

    def lost(self, ranks: Collection[int]) -> None:
        """Ranks end, as if their processes were killed; on whichever rank's thread this is called."""
        running = self.simulation.scheduler.holder
        for rank in ranks:
            self.living.pop(rank, None)
        self.simulation.unreach(ranks)
        for rank in ranks:
            self.left(rank)
        self.simulation.end(ranks, running)

    def left(self, rank: int) -> None:
        """Remove a rank, which replies no more, and tell those that watch it."""
        self.living.pop(rank, None)
        for peers in list(self.living.values()):
            peers.noticed(rank)


class SimulatedPeers:
    """The other members, which are ranks of the same simulation, as this one reaches them."""

    def __init__(self, members: SimulatedMembers, context: _Context, reply: Callable[[Message], Message]) -> None:
        self.member, self.device, self.key = context.rank, torch.device("cpu"), ""
        self._members, self._context, self._reply = members, context, reply
        self._scheduler = context.simulation.scheduler
        self._watched: int | None = None
        self._lost: Callable[[Presence], None] = lambda _: None
        self._world: SimulatedWorld | None = None

    def introduce(self) -> None:
        """Do nothing: the ranks of a simulation know each other."""

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each member; they are all on this one."""
        return dict.fromkeys(range(self._members.simulation.size), "simulated")

    @property
    def contacts(self) -> Mapping[int, Contact]:
        """Nowhere: no rank of a simulation is started later."""
        return {}

    def admit(self, joined: Mapping[int, Contact]) -> None:
        """Do nothing: no rank joins later."""

    @property
    def is_spare(self) -> bool:
        """Return whether this member waits, in this epoch."""
        return self._world is not None and not self._world.has_rank

    def exchange(self, members: Collection[int], message: Message, seconds: float) -> Mapping[int, Message | Presence]:
        return {member: self._send(member, message) for member in members if member != self.member}

    def _send(self, member: int, message: Message) -> Message | Presence:
        if self._scheduler.random is not None and self._scheduler.holder == self.member:
            self._scheduler.pause(self.member)
        peers = self._members.living.get(member)
        return "gone" if peers is None else _plain(peers._reply(_plain(message)))

    def announce(self, members: Collection[int], message: Message, seconds: float) -> None:
        """Exchange the message: replies arrive at once here."""
        self.exchange(members, message, seconds)

    def watch(self, member: int, timeout: float, late: Callable[[], object], lost: Callable[[Presence], None]) -> None:
        self._watched, self._lost = member, lost
        if member not in self._members.living:
            self.noticed(member)

    def noticed(self, member: int) -> None:
        """Report that a member has ended."""
        if member == self._watched:
            self._watched = None
            self._lost("gone")

    def ended(self, members: Collection[int]) -> set[int]:
        """Return the lost ones of these members: all are on one host."""
        return set(members).difference(self._members.living)

    def stood_still(self) -> float:
        """Return 0: a rank runs, or is lost."""
        return 0.0

    def start_over(self) -> None:
        """Do nothing: no seconds are counted."""

    def client(self, server: int, seconds: float) -> Connection:
        if server not in self._members.living:
            raise ConnectError(
                f"member {self.member}: the store of member {server} does not answer (it is lost)",
                rank=self.member,
                missing=(server,),
            )
        made: Connection = self._members.simulation.client(server, self.member)
        return made

    def prepare(self, servers: Collection[int], seconds: float) -> None:
        """Do nothing: to connect takes no time."""

    def forget(self, before: int) -> None:
        """Delete what epochs before this number have left in the store of this rank."""
        kept = self._members.simulation.stores.get(self.member, {})
        for key in old_keys(kept, before):
            del kept[key]

    def world(self, connection: Connection, epoch: Epoch, members: Members, seconds: float) -> SimulatedWorld:
        self._world = SimulatedWorld(connection, epoch, members, self._context)
        return self._world

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self._context)

    def now(self) -> float:
        """Return the simulated seconds."""
        return float(self._scheduler.clock)

    def committed(self, step: int) -> None:
        """Report a step that this member has committed, and may not survive."""
        self._members.committed(self.member, step)

    def close(self) -> None:
        if self._members.living.get(self.member) is self:
            self._members.left(self.member)


class SimulatedEvent:
    """An event for which one rank waits, and which another one sets."""

    def __init__(self, context: _Context) -> None:
        self._rank, self._scheduler = context.rank, context.simulation.scheduler
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Wake the rank that waits."""
        self._set = True
        self._scheduler.notify(self._rank, self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` simulated seconds, and return whether it is."""
        while not self._set and self._scheduler.block(self._rank, self, limit=timeout):
            pass
        return self._set

    def __str__(self) -> str:
        return "the end of the epoch"


class SimulatedWorld(EpochWorld):
    """The world of one epoch, for one simulated rank."""

    def __init__(self, connection: Connection, epoch: Epoch, members: Members, context: _Context) -> None:
        backend, device = context.simulation.backend, torch.device("cpu")
        super().__init__(connection, epoch, members, context.rank, backend=backend, device=device, seconds=_LONG)
        self._standing, self._context = (str(epoch), members.all), context
        self._calling = None  # who waits for a spare is told so

    def enter(self) -> float:
        """Join the default group, and connect the groups of the plan; the simulated seconds that it took."""
        if dist.is_initialized():  # the world that the simulation began with
            dist.destroy_process_group()
        self._context.standing = self._standing
        self._context.groups.clear()
        started = self._context.simulation.scheduler.clock
        self._install()
        return float(self._context.simulation.scheduler.clock - started)

    def wait_for(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of a call, on the thread of this rank: an abort ends its waits."""
        return call()

    def watch(self, limit: float | None, diagnosed: object) -> None:
        """Do nothing: simulated ranks that deadlock fail immediately."""

    def abort(self) -> None:
        """Have every call of this world return with an error, now and until it is left; from any rank's thread."""
        self._client.cut()
        if self._world is not None:
            self._world.backend.store_lost = True
        if self._context.standing is self._standing:
            for pg in self._context.groups:
                pg.channel.abort()


def joined(rank: _Context, reply: Callable[[Message], Message]) -> SimulatedPeers:
    """Return the other members of the job of a simulation, of which this rank is one."""
    simulation = rank.simulation
    simulation.members = simulation.members or SimulatedMembers(simulation)
    return simulation.members.join(rank, reply)  # type: ignore[no-any-return]


def _plain(message: Message) -> Message:
    """Return a message as it arrives elsewhere."""
    received: Message = json.loads(json.dumps(message))
    return received
