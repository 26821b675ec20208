"""The life of one member: its place in each epoch, how it notices a change, and the round that ends the epoch.

```
start ── epoch 0 ── train ── a member is lost, or fails ── abort ── round of all members ── epoch 1 ── train ── ...
            │                                                │
            └─ a spare waits                                 └─ all have returned: the end
```
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rankmesh.backend import torch_threads
from rankmesh.backend.nccl import device_done
from rankmesh.core.axes import integer
from rankmesh.core.sharding import Sharding
from rankmesh.debug.watch.recorder import prepare
from rankmesh.errors import ConnectError, Diverged, LostState, PlanError, RankmeshError, first_line, in_words
from rankmesh.guard.model_state import model_state
from rankmesh.rendezvous import Outcome
from rankmesh.survival.agreement import Report
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.guarding import Guarding, Suspicion, check_copies
from rankmesh.survival.heartbeat import PING, Message, Presence
from rankmesh.survival.job import Job
from rankmesh.survival.joining import Newcomers, addresses, history_of
from rankmesh.survival.members import Members, PlanLike
from rankmesh.survival.peers import Peers
from rankmesh.survival.redundancy import checked, same_step
from rankmesh.survival.rounds import Ending, Rounds
from rankmesh.survival.state import EpochState, Load, load_all, restore
from rankmesh.survival.transport import Connection, Event, Transport
from rankmesh.survival.world import EpochWorld

__all__ = ["Session"]

_log = logging.getLogger("rankmesh.survival")

_Result = TypeVar("_Result")

# Seconds that the members have at the start, and to reach the store of an epoch; and to move the state of one.
_LIMIT, _MOVING = 300.0, 3600.0
# Seconds after which a call over NCCL has hung: as many as torch's watchdog, which is off, lets it take.
_STUCK = 600.0
# Seconds after which an error counts as this member's own, where no change has been announced.
_SETTLE = 0.05
# Of the timeout: who gave no reply for so long was stopped, and the others may have noticed.
_STOPPED = 0.5


class _Interrupted(BaseException):
    """Leaves ``train`` when the members change: no error of the program, so none that it catches."""


class _Over(BaseException):
    """Leaves ``train`` when the job has ended for this member; ``error`` is why, None where all have returned."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error


@dataclass
class _Left:
    """How this member left an epoch: ``train`` is ``done``, or an ``error`` ended it, for ``certain`` its own.

    ``first``: this member began the change; ``handled``: the program handles the error.
    """

    done: bool = False
    error: Exception | None = None
    certain: bool = False
    first: bool = False
    handled: bool = False


@dataclass
class _End:
    """How an epoch ends: by a change of the members, or since the job is ``over``."""

    came: Event
    over: bool = False
    suspects: set[int] = field(default_factory=set)
    # Members that the watch named as the cause of a hang, each with its sentence.
    evicted: dict[int, str] = field(default_factory=dict)
    # Its sentence on a hang of which it named none.
    unclear: str = ""
    noticed: float | None = None


def _is_certain(error: Exception) -> bool:
    """Whether an error is of the program, for certain: that of a collective may be the loss of another member."""
    return isinstance(error, LostState | PlanError | Diverged) or not isinstance(error, RuntimeError | RankmeshError)


class Session:
    """One member of a job that survives."""

    def __init__(
        self,
        layout: PlanLike,
        *,
        spares: int,
        shrink: str | None,
        timeout: float,
        redundancy: int = 0,
        restore: Load | None = None,
        join: str | None = None,
        evict: bool | float | None = None,
        guard: int | None = None,
    ) -> None:
        self._timeout, self._restore = timeout, restore
        self._guard_every = None if guard is None else integer(guard, "guard", least=1)
        self._guarding: Guarding | None = None
        self._suspicion: Suspicion | None = None
        self._epoch = Epoch()
        self._ends: dict[Epoch, _End] = {}
        self._lock = threading.Lock()
        self._world: EpochWorld | None = None
        self._newcomers, self._rounds = Newcomers(), Rounds(timeout)
        self._history: dict[int, Members] = {}
        self._states: list[EpochState] = []
        self._exists = self._is_prepared = False
        # The epoch from whose snapshots hold() restores, or whether it loads everything; and the step of it.
        self._source: int | None = None
        self._load = False
        self._step = 0
        # The errors that ended the last epoch, by coordinate.
        self._raised: Mapping[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._left = _Left()
        simulated = torch_threads.answering()
        self._peers: Transport
        self._peers = Peers(self._reply, _LIMIT, join) if simulated is None else simulated.peers(self._reply)
        self.device = self._peers.device
        self._evict = (_STUCK if self._unlimited else False) if evict is None else evict
        if self._evict:
            prepare()
        try:
            welcome = self._peers.introduce()
            hosts = self._peers.hosts
            size = len(hosts) if welcome is None else welcome["world_size"]
            first = Members.first(layout, world_size=size, spares=spares, shrink=shrink, hosts=hosts)
            self._redundancy, self._warned = checked(redundancy, first.plan.mesh.size), False
        except BaseException:
            self._peers.close()
            raise
        if welcome is not None:
            self._peers.member = welcome["member"]
        self.member, self._world_size = self._peers.member, size
        # The members of each epoch of which there may be snapshots, and of this one.
        self._history[0] = first
        if welcome is not None:
            self._enter_as_new(first, welcome)

    @property
    def _members(self) -> Members:
        return self._history[self._epoch.number]

    # -- the life of a member -----------------------------------------------------------------------------------

    def run(self, train: Callable[[Job], _Result]) -> _Result | None:
        """Call ``train`` in each epoch in which this member has a rank, until it has returned on all."""
        result: _Result | None = None
        try:
            while True:
                result = None  # of a member that has a rank at the end
                job = self._enter()
                try:
                    result = train(job)
                    device_done(self.device, partial(self._check, job))
                    self._look(job, self._last_step, last=True)
                    self._left.done = True
                    self._finished()
                    self._end.came.wait()
                except _Interrupted:
                    pass
                except Exception as raised:  # noqa: BLE001 - of the program, or of a collective that was interrupted
                    self._left.error, self._left.certain = raised, _is_certain(raised)
                self._finish()
        except _Over as over:
            ended = over.error
        if ended is not None:
            raise ended
        return result

    def regroup(self, job: Job) -> None:
        """Go on in the next epoch in which this member has a rank, without leaving ``train``.

        The error that the program handles is reported, and no member is left out for it.
        """
        error = sys.exc_info()[1]
        self._left = _Left(error=error if isinstance(error, Exception) else None, first=self._announce(), handled=True)
        try:
            self._finish()
            following = self._enter()
        except Exception as raised:  # noqa: BLE001 - whatever ends the job, the program does not handle
            raise _Over(raised) from None
        vars(job).update(vars(following))

    def _enter(self) -> Job:
        """Enter epochs until this member has a rank in one, and agree with the others after each."""
        while True:
            try:
                job = self._begin()
                if job is not None:
                    return job
                self._end.came.wait()
            except _Interrupted:
                pass
            except Exception as raised:  # noqa: BLE001 - of this member, or since another one was lost
                self._left.error, self._left.certain = raised, _is_certain(raised)
            self._finish()

    def close(self) -> None:
        """End the session: no socket, thread or store is left of it."""
        self._leave_world()
        self._peers.close()
        self._rounds.close()

    # -- one epoch ----------------------------------------------------------------------------------------------

    @property
    def _end(self) -> _End:
        return self._end_of(self._epoch)

    def _end_of(self, epoch: Epoch) -> _End:
        return self._ends.setdefault(epoch, _End(self._peers.event()))

    def _begin(self) -> Job | None:
        """Enter the world of the epoch: the job of a member that has a rank; a spare takes part in what those do."""
        members = self._members
        self._watch()
        server = min(members.all)
        # That of the round, of which the next one has another: to connect anew may take seconds.
        connection = self._rounds.release(server) or self._connected(server)
        world = self._peers.world(connection, self._epoch, members, 2 * self._timeout)
        self._is_prepared = False
        with self._lock:
            self._world = world
            ended = self._end.came.is_set()
        if ended:
            raise _Interrupted
        self._seconds["connect"] = world.enter()
        if self._evict:
            world.watch(None if self._evict is True else self._evict, self._evicted(self._epoch))
        if world.groups is None:
            self._follow()
            return None
        return Job(members.plan, world.groups, self._epoch.number, self._step, self.device, dict(self._seconds), self)

    def _connected(self, server: int) -> Connection:
        """Connect to the store of a member; its loss ends the epoch, and with that the attempts."""
        end = self._peers.now() + _LIMIT
        while True:
            try:
                return self._peers.client(server, self._timeout)
            except ConnectError:  # noqa: PERF203 - a loop of attempts
                if self._end.came.wait(_SETTLE):
                    raise _Interrupted from None
                if self._peers.now() > end:
                    raise

    def _finished(self) -> None:
        """``train`` has returned here: the last one for which this is so ends the job."""
        if self._source is not None:
            raise ConnectError(
                f"rank {self._rank}: train() returned without a call of hold(), with which the others wait for it; "
                "call hold() on every rank",
                rank=self._rank,
            )
        world = self._world
        if world is not None and world.finish():
            self._announce(over=True)

    @property
    def _entered(self) -> EpochWorld:
        if self._world is None:
            raise ConnectError("the job has ended; hold() is called inside train()")
        return self._world

    @property
    def _rank(self) -> int:
        return -1 if self._world is None else self._world.rank

    # -- what is held -------------------------------------------------------------------------------------------

    def hold(self, job: Job, tensors: dict[str, Tensor], shardings: dict[str, Sharding]) -> None:
        """Keep these from now on, after they have been set to what was held before."""
        self._check(job)
        new = EpochState(
            self._epoch.number,
            job.plan.mesh,
            tensors,
            shardings,
            rank=job.rank,
            hosts=[self._members.hosts.get(member, "") for member in self._members.ranks],
            redundancy=self._redundancy,
            device=self.device,
        )
        digest = hashlib.sha256(new.layout.text.encode()).hexdigest()
        if self._entered.first("layout", digest) != digest:
            raise PlanError(
                f"rank {job.rank}: hold() was given other shardings than on another rank; give every rank those of all "
                "tensors of the job, with the same names, shapes, dtypes and axes"
            )
        if job.rank == 0 and not self._warned:
            self._warned = new.warn_of_fewer_copies()
        self._restored(new)
        new.commit(self._step, self._entered.wait_for, partial(self._check, job), wait=True)
        if self._guard_every is not None:
            self._settle(self._entered.wait_for(lambda: self._guarded(job, new)))
            new.equal_at = self._step
        self._all_hold([*self._states, new], new)

    def _guarded(self, job: Job, new: EpochState) -> Guarding:
        every, suspicion = self._guard_every or 1, self._suspicion
        self._guarding = guarding = Guarding(job.groups, new.tensors, new.shardings, every, suspicion)
        guarding.start(self._step)
        return guarding

    def _settle(self, guarding: Guarding) -> None:
        """Wait until the guards of all ranks have found the same, so that each acts on it; raise its failure."""
        with suppress(ConnectError):  # another rank was through before, and ended the epoch
            self._entered.wait_for(guarding.meet)
        if guarding.failure is not None:
            raise guarding.failure

    def described(
        self, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, replicated: str | None
    ) -> tuple[dict[str, Tensor], dict[str, Sharding]]:
        """The state of a model and its optimizer, with shardings whose copies are equal where nothing is restored.

        Raises ``PlanError`` for tensors that differ between ranks which hold copies of them. Where the job is guarded,
        that is found in ``hold``.
        """
        self._check(job)

        def describe() -> tuple[dict[str, Tensor], dict[str, Sharding]]:
            found = model_state(model, optimizer, job.groups, replicated)
            if self._source is None and not self._load and self._guard_every is None:
                check_copies(job.groups, *found)
            return found

        return self._entered.wait_for(describe)

    def _follow(self) -> None:
        """A spare's part in ``hold``: it may have been at a rank of the old plan."""
        self._restored(None)
        self._all_hold(self._states, None)
        self._prepare()

    def _restored(self, new: EpochState | None) -> None:
        if self._load and new is not None and self._restore is not None:
            load_all(new, self._step, self._restore)
        if self._source is None:
            return
        started = time.perf_counter()
        everyone, before = self._members.all, self._history[self._source]
        places = {member: position for position, member in enumerate(everyone)}
        beyond = iter(range(len(everyone), len(everyone) + len(before.ranks)))
        positions = [places[member] if member in places else next(beyond) for member in before.ranks]
        old = next((state for state in self._states if state.epoch == self._source), None)
        restore(self._entered, old, self._step, positions, new, timedelta(seconds=_MOVING), self._restore)
        self._seconds["transfer"] = time.perf_counter() - started

    def _all_hold(self, until_then: list[EpochState], new: EpochState | None) -> None:
        """Every member has its part: what was held before is needed by nobody."""
        self._states = until_then
        self._entered.meet("held")
        self._states = [] if new is None else [new]
        self._exists, self._source, self._load = True, None, False
        self._history = {self._epoch.number: self._members}

    def commit(self, job: Job, step: int) -> None:
        """Keep a copy of what is held, as it is at the beginning of a step."""
        self._check(job)
        if not self._states or self._states[-1].epoch != self._epoch.number:
            raise ConnectError(
                f"rank {job.rank}: commit({step}) was called before hold(); name what must survive first", step=step
            )
        state = self._states[-1]
        if step != self._step and state.commits == {0: self._step}:  # the first one
            same_step(job.rank, step, "another rank", int(self._entered.first("commit", str(step))))
        self._look(job, step)
        if self._guarding is not None:
            state.equal_at = self._guarding.equal_at
        state.commit(step, self._entered.wait_for, partial(self._check, job))
        job.step = step
        self._peers.committed(step)
        self._prepare()
        if self._newcomers.let_grow(self._members):
            self._announce()
            self._check(job)

    def _look(self, job: Job, step: int, *, last: bool = False) -> None:
        """Have the guard look at what its last check has found: all go back, a member is left out, or nothing."""
        if (guarding := self._guarding) is None:
            return
        if self._entered.wait_for(lambda: guarding.commit(step, last=last)):
            if job.rank == 0 and guarding.found is not None:
                _log.warning("rankmesh: %s", guarding.found)
            self._settle(guarding)
            self._announce()
            self._check(job)
        if guarding.faulty:
            members = {self._members.ranks[rank]: guarding.verdict for rank in guarding.faulty}
            guarding.faulty = ()
            hosts = ", ".join(sorted({self._members.hosts.get(member, "") for member in members}))
            try:
                self._members.without(members)
            except PlanError:
                _log.warning("rankmesh: %s (host %s); nobody can take its place: it stays", guarding.verdict, hosts)
                return
            if self.member == min(members):
                _log.warning("rankmesh: %s (host %s, device %s); it is left out", guarding.verdict, hosts, self.device)
            self._settle(guarding)
            self._announce(evicted=members)
            self._check(job)

    def _prepare(self) -> None:
        """Connect to the store that the next round will be in: of the lowest member that lives, of two to be sure."""
        if not self._is_prepared:
            self._is_prepared = True
            self._peers.prepare(sorted(self._members.all)[:2], self._timeout)

    def _check(self, job: Job) -> None:
        if self._end.came.is_set():
            raise _Interrupted
        if job.epoch != self._epoch.number:
            raise ConnectError(
                f"this job is of epoch {job.epoch}, and the members are in epoch {self._epoch.number}; use the one "
                "that train() was called with last",
                epoch=job.epoch,
            )

    # -- notice -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch the next member of a ring, so that each is watched by one."""
        everyone = sorted(self._members.all)
        if len(everyone) < 2:
            return
        epoch, watched = self._epoch, everyone[(everyone.index(self.member) + 1) % len(everyone)]
        suspects: set[int] = set()

        def late() -> None:
            # A whole host may have stopped: the others there are asked before the time is up.
            replies = self._peers.exchange(everyone, PING, min(1.0, self._timeout / 4))
            suspects.update(member for member, reply in replies.items() if reply == "unresponsive")

        def lost(presence: Presence) -> None:
            # Who is gone, everybody finds out at once; who does not reply, only after the timeout.
            found = {watched} | suspects if presence == "unresponsive" else ()
            self._announce(suspects=found, epoch=epoch)

        self._peers.watch(watched, self._timeout, late, lost)

    @property
    def _unlimited(self) -> bool:
        """Whether calls have no limit of their own: those of NCCL, as torch's watchdog is off."""
        return self.device.type == "cuda"

    def _evicted(self, epoch: Epoch) -> Callable[[str, tuple[int, ...]], None]:
        """What ends an epoch where a call hangs because of some members, which lose their places.

        Where none is known to be the cause, the limit of the call ends it; without one, the diagnosis.
        """

        def diagnosed(verdict: str, members: tuple[int, ...]) -> None:
            if members:
                why = f"the others waited for it ({verdict})"
                self._announce(evicted=dict.fromkeys(members, why), epoch=epoch)
            else:
                with self._lock:
                    self._end_of(epoch).unclear = verdict
                if self._unlimited:
                    self._announce(epoch=epoch)

        return diagnosed

    def _announce(
        self,
        *,
        over: bool = False,
        suspects: Collection[int] = (),
        evicted: Mapping[int, str] | None = None,
        epoch: Epoch | None = None,
    ) -> bool:
        """End the epoch on every member; whether this member is the first that does, as far as it knows."""
        epoch = epoch or self._epoch
        message = {"what": "end", "epoch": str(epoch), "over": over, "suspects": sorted(suspects)}
        message["evicted"] = {str(member): verdict for member, verdict in (evicted or {}).items()}
        first = self._ended(message)
        members = self._history.get(epoch.number, self._members)
        others = [member for member in members.all if member != self.member] if first or suspects or evicted else []
        self._peers.announce(others, message, self._timeout)
        return first

    def _ended(self, message: Mapping[str, Any]) -> bool:
        """Take note that an epoch has ended, whether by this member or by another; whether that is new."""
        with self._lock:
            epoch = Epoch.read(message["epoch"])
            end = self._end_of(epoch)
            end.suspects.update(message["suspects"])
            end.evicted.update({int(member): str(verdict) for member, verdict in message["evicted"].items()})
            new = not end.came.is_set()
            if new:
                end.over, end.noticed = message["over"], self._peers.now()
                end.came.set()
            world = self._world if epoch == self._epoch else None
        if new and world is not None:
            world.abort()
        return new

    def _reply(self, message: Message) -> Message:
        """What this member replies to a message of another."""
        with suppress(KeyError, TypeError, ValueError):
            if message["what"] == "end":
                self._ended(message)
            if message["what"] == "join":
                return self._asked_to_join(message["contact"])
            if message["what"] == "outcome":
                outcome = self._rounds.outcome_of(Epoch.read(message["epoch"]).number)
                return {**self._place, "outcome": outcome, "server": self._rounds.server}
        return self._place

    @property
    def _place(self) -> Message:
        with self._lock:
            return {"epoch": str(self._epoch)}

    @property
    def address(self) -> str:
        """Where this member is reached by a process that joins."""
        found = self._peers.reached_at.get(self.member)
        return f"{found['address']}:{found['heartbeat']}" if found else ""

    @property
    def key(self) -> str:
        """The key of the job, which a process that joins needs."""
        return self._peers.key

    # -- members that join ------------------------------------------------------------------------------------------

    def _asked_to_join(self, contact: Mapping[str, Any]) -> Message:
        """The reply to a process that asks to be a member: whom else it may ask, and in the end where it enters."""
        welcome = self._newcomers.ask(contact)
        with self._lock:
            world = self._world
        if welcome is None and world is not None and not world.has_rank and self._newcomers.let_grow(self._members):
            self._announce()  # a spare commits nothing
        return {"welcome": welcome, "members": addresses(self._members.ranks, self._peers.reached_at)}

    def _enter_as_new(self, first: Members, welcome: Message) -> None:
        """Become a member in the epoch that the others have agreed on."""
        self._peers.admit({int(member): contact for member, contact in welcome["contacts"].items()})
        self._history |= history_of(welcome, replace(first, hosts=self._peers.hosts))
        self._epoch = Epoch.read(welcome["epoch"])
        self._adopt(Outcome.read(welcome["outcome"], "welcome"), None)

    # -- the end of an epoch ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Leave the world, and agree with the others how to go on; ``_Over`` where all have returned."""
        left, self._left = self._left, _Left()
        error = left.error
        if error is not None and not left.handled:
            left.first = self._announce_error()
        self._leave_world()
        started = self._peers.now()
        noticed = self._end.noticed or started
        outcome = self._agree(self._report(left))
        self._seconds = {"free": started - noticed, "agree": self._peers.now() - started}
        verdict = self._end.evicted.get(self.member)
        if verdict and (not outcome.agreed or self.member in outcome.ranks):
            raise ConnectError(
                f"member {self.member} was left out of the job, since {verdict}",
                rank=self.member,
            ) from error
        if not outcome.agreed:
            if error is not None and (left.certain or (outcome.fields and self.member in outcome.ranks)):
                raise error
            message = f"the job ends, since {outcome.message}"
            raise ConnectError(message, rank=self.member, ranks=outcome.ranks) from error
        if outcome.value.get("over"):
            raise _Over
        blamed = self.member in outcome.ranks and self.member not in outcome.missing and self._rounds.took_part
        if error is not None and (blamed or (left.certain and self.member in outcome.ranks)):
            raise error
        self._adopt(outcome, error)

    def _announce_error(self) -> bool:
        """Return whether this member began the change: the loss of another one shows as an error of a collective, too.

        A member that was stopped for a while did not: its calls fail because the others went on without it.
        """
        end = self._end
        if end.came.wait(_SETTLE):
            return False
        return self._announce() and self._peers.stood_still() < _STOPPED * self._timeout

    def _leave_world(self) -> None:
        with self._lock:
            world, self._world = self._world, None
        self._suspicion = None if self._guarding is None else self._guarding.found
        guarding, self._guarding = self._guarding, None
        if world is not None:
            if guarding is not None:
                with suppress(ConnectError):
                    guarding.close()
            world.close()
            # torch keeps what a failed backward pass did not reach, with its activations and groups, until the next
            # one on this thread: a spare has none.
            torch.zeros((), device="cpu", requires_grad=True).backward()

    def _report(self, left: _Left) -> Report:
        text = "" if left.error is None else f"{type(left.error).__name__}: {first_line(left.error)}"[:200]
        return Report(
            done=left.done,
            over=self._end.over,
            error=text if left.certain else "",
            torn="" if left.certain else text,
            first=left.first,
            handled=left.handled,
            steps={state.epoch: tuple(state.steps) for state in self._states},
            commits=next((one.commits for one in self._states if one.epoch == self._epoch.number), {}),
            committed=self._exists,
            loads=self._restore is not None,
            joining=self._newcomers.contacts,
            evicted=sorted(self._end.evicted),
            unclear=self._end.unclear,
            suspicion=self._suspicion.data if self._suspicion else None,
            began=self._step,
            at=self._last_step,
        )

    @property
    def _last_step(self) -> int:
        """The step of the last commit."""
        here = (step for one in self._states if one.epoch == self._epoch.number for step in one.snapshots.steps)
        return max(here, default=self._step)

    def _agree(self, report: Report) -> Outcome:
        end = self._end
        ending = Ending(self._epoch, self._history, self._raised, end.suspects, end.evicted)
        return self._rounds.agree(self._peers, ending, report)

    def _adopt(self, outcome: Outcome, error: Exception | None) -> None:
        """The members, and what they hold, of the next epoch."""
        value, before = outcome.value, self._members
        following = Members(
            before.sizes,
            before.sizes.plan(value["replicas"]),
            tuple(value["ranks"]),
            tuple(value["spares"]),
            value["started"],
            {**before.hosts, **{int(member): str(contact["host"]) for member, contact in value["joined"].items()}},
        )
        if self.member not in following.all:
            raise ConnectError(
                f"member {self.member} was left out of the job, since it did not respond in time; the others went on "
                f"without {in_words(outcome.ranks)}",
                rank=self.member,
            ) from error
        self._peers.start_over()
        self._peers.admit({int(member): contact for member, contact in value["joined"].items()})
        self._newcomers.welcome(outcome, self._epoch, self._history, self._world_size, self._peers.reached_at)
        self._source, self._step, self._load = value["source"], value["step"], value["load"]
        self._raised = value["raised"]
        found = value["suspicion"]
        self._suspicion = None if found is None else Suspicion.read(found, self._suspicion)
        self._history = {
            number: members
            for number, members in self._history.items()
            if number in {state.epoch for state in self._states} or number == self._source
        }
        entered = self._epoch.after(outcome.text)
        self._history[entered.number] = following
        with self._lock:
            self._epoch = entered
            self._ends = {epoch: end for epoch, end in self._ends.items() if epoch.number >= self._epoch.number}
