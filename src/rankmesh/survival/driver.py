"""The driver of a member's state machine: it gives the machine events, from any thread, and carries out its actions.

```
the program's thread ──┐                                 ┌── abort the world of this epoch, wake who waits for its end
messages of others   ──┼── event ── machine ── actions ──┤
the watch            ──┘  (one lock)                     └── announce it to the other members
```
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from rankmesh.errors import ConnectError
from rankmesh.rendezvous import Outcome
from rankmesh.survival.epoch import Contact, Epoch, addresses
from rankmesh.survival.heartbeat import PING, Message, Presence
from rankmesh.survival.machine import Abort, Action, Enter, Left, Machine, Stop
from rankmesh.survival.members import Members
from rankmesh.survival.rounds import Rounds
from rankmesh.survival.transport import Transport
from rankmesh.survival.world import EpochWorld

if TYPE_CHECKING:
    from rankmesh.survival.job import Job

__all__ = ["Driver", "Interrupted"]

_log = logging.getLogger("rankmesh.survival")

_Result = TypeVar("_Result")
_P = ParamSpec("_P")


class Interrupted(BaseException):
    """Leaves ``train`` when the members change: no error of the program, so none that it catches."""


class Driver:
    """One member of a job: its machine, how it reaches the others, and the world of its epoch, None outside of one.

    All that several threads change is here, and changes under one lock. ``ended`` is set when this epoch has ended,
    ``noticed`` is when that was; ``seconds`` has the duration of each phase of the last change.
    """

    def __init__(self, timeout: float, reach: Callable[[Callable[[Message], Message]], Transport]) -> None:
        self.timeout = timeout
        self.machine = Machine()
        self.rounds = Rounds(timeout)  # a message that comes while the peers are made has a reply
        self.world: EpochWorld | None = None
        self.seconds: dict[str, float] = {}
        self.noticed: float | None = None
        self._lock = threading.Lock()
        self._world_size, self._is_prepared = 0, False
        self.peers = reach(self._reply)

    def start(self, first: Callable[[int, Mapping[int, str]], Members]) -> None:
        """Meet the others, or become a further member; ``first(size, hosts)`` returns the members of the job."""
        try:
            welcome = self.peers.introduce()
            hosts = self.peers.hosts
            self._world_size = len(hosts) if welcome is None else welcome["world_size"]
            members = first(self._world_size, hosts)
        except BaseException:
            self.peers.close()
            raise
        if welcome is not None:
            self.peers.member = welcome["member"]
        with self._lock:
            self.machine.begin(self.member, members)
            if welcome is not None:
                contacts = {int(member): Contact.read(contact) for member, contact in welcome["contacts"].items()}
                self.peers.admit(contacts)
                self.peers.admit(self.machine.welcomed(welcome, self.peers.hosts).joined)
            self._begun()

    def close(self) -> None:
        """Reply no more."""
        self.peers.close()
        self.rounds.close()

    # -- this member, and its epoch -----------------------------------------------------------------------------------

    @property
    def member(self) -> int:
        """The number of this member."""
        return self.peers.member

    @property
    def members(self) -> Members:
        """The members of this epoch."""
        return self.machine.members

    @property
    def epoch(self) -> Epoch:
        """This epoch."""
        return self.machine.epoch

    @property
    def entered(self) -> EpochWorld:
        """The world of this epoch."""
        if self.world is None:
            raise ConnectError("the job has ended; hold() is called inside train()")
        return self.world

    @property
    def unlimited(self) -> bool:
        """Return whether calls have no limit of their own: NCCL's have none, as torch's watchdog is off."""
        return self.peers.device.type == "cuda"

    @property
    def address(self) -> str:
        """The contact by which a process that joins reaches this member."""
        found = self.peers.contacts.get(self.member)
        return f"{found.address}:{found.heartbeat}" if found else ""

    def check(self, job: Job) -> None:
        """Leave ``train`` if the epoch has ended; refuse the job of an epoch before."""
        if self.ended.is_set():
            raise Interrupted
        if job.epoch != self.epoch.number:
            raise ConnectError(
                f"this job is of epoch {job.epoch}, and the members are in epoch {self.epoch.number}; use the one "
                "that train() was called with last",
                epoch=job.epoch,
            )

    # -- events and actions -------------------------------------------------------------------------------------------

    def note(self, event: Callable[_P, _Result], *given: _P.args, **how: _P.kwargs) -> _Result:
        """Pass the machine an event from which no action follows; return its answer."""
        with self._lock:
            return event(*given, **how)

    def do(self, event: Callable[_P, list[Action]], *given: _P.args, **how: _P.kwargs) -> list[Action]:
        """Give the machine an event, carry out the actions that follow, and return them."""
        actions = self.note(event, *given, **how)
        self._carry_out(actions)
        return actions

    def announce(self) -> bool:
        """End the epoch on every member; return whether this member is the first that does, as far as it knows."""
        return any(isinstance(action, Abort) for action in self.do(self.machine.end))

    def diagnosed(self, epoch: Epoch, reason: str, members: tuple[int, ...]) -> None:
        """Note that a call of an epoch hangs because of these members; of none that is known if there are none."""
        self.do(self.machine.diagnosed, epoch, reason, members, unlimited=self.unlimited)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Abort):
                self._abort(action.epoch)
            else:
                self.peers.announce(action.members, action.message, self.timeout)

    def _abort(self, epoch: Epoch) -> None:
        with self._lock:
            if epoch != self.epoch:
                return
            self.noticed, world = self.peers.now(), self.world
            self.ended.set()
        if world is not None:
            world.abort()

    def _reply(self, message: Message) -> Message:
        """Return this member's reply to a message of another."""
        with self._lock:
            reply, actions = self.machine.received(message, self.rounds.server)
            if "last_change" in reply:
                reply["last_change"]["seconds"] = dict(self.seconds)
            if "welcome" in reply:
                reply["members"] = addresses(self.members.ranks, self.peers.contacts)
            if reply.get("welcome"):
                contacts = {str(member): vars(contact) for member, contact in self.peers.contacts.items()}
                reply["welcome"] |= {"world_size": self._world_size, "contacts": contacts}
        self._carry_out(actions)
        return reply

    # -- from epoch to epoch ------------------------------------------------------------------------------------------

    def enter(self, world: EpochWorld) -> None:
        """Take the world of this epoch, which an end of the epoch aborts from now on."""
        self._is_prepared = False
        with self._lock:
            self.world = world
            self.machine.entered()
        if self.ended.is_set():
            raise Interrupted

    def watch(self) -> None:
        """Watch the next member of a ring, so that each is watched by one."""
        everyone = sorted(self.members.all)
        if len(everyone) < 2:
            return
        epoch, watched = self.epoch, everyone[(everyone.index(self.member) + 1) % len(everyone)]
        suspects: set[int] = set()

        def late() -> None:
            # A whole host may have stopped: the others there are asked before the time is up.
            replies = self.peers.exchange(everyone, PING, min(1.0, self.timeout / 4))
            suspects.update(member for member, reply in replies.items() if reply == "unresponsive")

        def lost(presence: Presence) -> None:
            # Who is gone, everybody finds out at once; who does not reply, only after the timeout.
            found = {watched} | suspects if presence == "unresponsive" else ()
            self.do(self.machine.end, suspects=found, epoch=epoch)

        self.peers.watch(watched, self.timeout, late, lost)

    def prepare(self) -> None:
        """Connect to the store that the next round will be in: of the lowest member that lives, of two to be sure."""
        if not self._is_prepared:
            self._is_prepared = True
            self.peers.prepare(sorted(self.members.all)[:2], self.timeout)

    def leave(self) -> EpochWorld | None:
        """Return the world that this member was in: from now on it is in none."""
        with self._lock:
            world, self.world = self.world, None
        return world

    def adopt(self, outcome: Outcome, left: Left) -> Enter | Stop:
        """Go on to the next epoch, or stop."""
        with self._lock:
            action = self.machine.concluded(outcome, left, took_part=self.rounds.took_part)
            if isinstance(action, Stop):
                return action
            if reasons := self.machine.reasons:
                members = ", ".join(f"member {member} ({why})" for member, why in reasons.items())
                level = logging.WARNING if self.member == min(self.members.all) else logging.INFO
                _log.log(level, "rankmesh: epoch %d goes on without %s", self.epoch.number, members)
            self.peers.start_over()
            self.peers.admit(action.joined)
            self._begun()
        if self.machine.last_change in self.machine.refused.values() and self.member == min(self.members.all):
            _log.warning("rankmesh: %s", self.machine.last_change)
        return action

    def _begun(self) -> None:
        """Begin an epoch, which may have ended: others may announce that before this member is in it."""
        self.ended, self.noticed = self.peers.event(), None
        if self.machine.has_ended:
            self.ended.set()
