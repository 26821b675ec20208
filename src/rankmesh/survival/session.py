"""The life of one member: it carries out what its state machine says, with threads, a world and tensors.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from rankmesh.backend import torch_threads
from rankmesh.backend.nccl import device_done
from rankmesh.core.axes import integer
from rankmesh.core.sharding import Sharding
from rankmesh.debug.watch.recorder import prepare
from rankmesh.errors import ConnectError, LayoutError, PlanError, quoted
from rankmesh.guard.everyone import gathered
from rankmesh.guard.model_state import CurrentTensors, model_state, unreplicated_axes
from rankmesh.rendezvous import Outcome
from rankmesh.survival.agreement import Report, same_step
from rankmesh.survival.epoch import Contact, Epoch, addresses
from rankmesh.survival.guarding import Guarding, are_equal, check_copies, replica_digests
from rankmesh.survival.heartbeat import PING, Message, Presence
from rankmesh.survival.job import Job
from rankmesh.survival.machine import Abort, Action, Left, Machine, Stop
from rankmesh.survival.members import Members, PlanLike, Sizes, plan_of
from rankmesh.survival.peers import Peers
from rankmesh.survival.redundancy import StateLayout, checked
from rankmesh.survival.rounds import Rounds
from rankmesh.survival.simulated import joined
from rankmesh.survival.state import EpochState, Load, load_all, restore
from rankmesh.survival.transport import Connection, Transport
from rankmesh.survival.world import FINISHED, EpochWorld
from rankmesh.transfer.planning.transfer import BUDGET

__all__ = ["Session", "drop_failed_backward"]

_log = logging.getLogger("rankmesh.survival")

_Result = TypeVar("_Result")
_P = ParamSpec("_P")

# Seconds that the members have at the start, and to reach the store of an epoch.
_LIMIT = 300.0
# Seconds after which a call over NCCL has hung: as many as torch's watchdog, which is off, lets it take.
_STUCK = 600.0
# Seconds after which an error counts as this member's own, where no change has been announced.
_SETTLE = 0.05
# Bytes for each member that a budget has at least: of two messages.
_LEAST = 128
# Of the timeout: who gave no reply for so long was stopped, and the others may have noticed.
_STOPPED = 0.5


class _Interrupted(BaseException):
    """Leaves ``train`` when the members change: no error of the program, so none that it catches."""


class _Over(BaseException):
    """Leaves ``train`` when the job has ended for this member; ``error`` is why, None where all have returned."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error


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
        # What every thread of this member reads and changes, under the lock.
        self._lock = threading.Lock()
        self._machine = Machine()
        self._rounds = Rounds(timeout)  # a message that comes while the peers are made has a reply
        self._world: EpochWorld | None = None
        self._states: list[EpochState] = []
        self._spare: list[Tensor] = []  # the memory of former snapshots
        self._is_prepared = False
        self._seconds: dict[str, float] = {}
        self._noticed: float | None = None
        self._left = Left()
        simulated = torch_threads.this_rank()
        self._peers: Transport
        self._peers = Peers(self._reply, _LIMIT, join) if simulated is None else joined(simulated, self._reply)
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
        with self._lock:
            self._machine.begin(self.member, first)
            if welcome is not None:
                self._enter_as_new(welcome)
            self._begun()

    @property
    def _members(self) -> Members:
        return self._machine.members

    @property
    def _epoch(self) -> Epoch:
        return self._machine.epoch

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
                    self._ended.wait()
                except _Interrupted:
                    pass
                except Exception as raised:  # noqa: BLE001 - of the program, or of a collective that was interrupted
                    self._left.error = raised
                del job  # and what its program held: the next epoch's tensors come beside the snapshots alone
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
        self._left = Left(error=error if isinstance(error, Exception) else None, first=self._announce(), handled=True)
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
                self._ended.wait()
            except _Interrupted:
                pass
            except Exception as raised:  # noqa: BLE001 - of this member, or since another one was lost
                self._left.error = raised
            self._finish()

    def close(self) -> None:
        """End the session: no socket, thread or store is left of it."""
        self._leave_world()
        self._peers.close()
        self._rounds.close()

    # -- one epoch ----------------------------------------------------------------------------------------------

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
            self._machine.entered()
        if self._ended.is_set():
            raise _Interrupted
        self._seconds["connect"] = world.enter()
        if self._evict:
            world.watch(None if self._evict is True else self._evict, partial(self._diagnosed, self._epoch))
        if self._machine.unequal:
            self._compare(world)
        if world.groups is None:
            self._follow()
            return None
        step = self._machine.step
        return Job(members.plan, world.groups, self._epoch.number, step, self.device, self._seconds, self)

    def _compare(self, world: EpochWorld) -> None:
        """Go on from the last commit only if replicas are equal there; else from the last that was found equal.

        A replica whose other ranks are lost has nothing to be compared to.
        """
        machine, step = self._machine, self._machine.step
        state = None if machine.source is None else self._state_of(machine.source)
        given = {} if state is None else world.wait_for(partial(replica_digests, state, step))
        equal = are_equal(world.gathered(given))
        with self._lock:
            machine.compared(equal=equal)
        if state is not None:
            state.equal_at = machine.step
        self._forget_later()
        if not equal and world.rank == 0:
            _log.warning(
                "rankmesh: at step %d replicas differ, or one has no other left to compare with; all ranks repeat the "
                "steps from %d on, where they were equal",
                step,
                machine.step,
            )

    def _connected(self, server: int) -> Connection:
        """Connect to the store of a member; its loss ends the epoch, and with that the attempts."""
        end = self._peers.now() + _LIMIT
        while True:
            try:
                return self._peers.client(server, self._timeout)
            except ConnectError:  # noqa: PERF203 - a loop of attempts
                if self._ended.wait(_SETTLE):
                    raise _Interrupted from None
                if self._peers.now() > end:
                    raise

    def _finished(self) -> None:
        """``train`` has returned here: the last one for which this is so ends the job."""
        if self._machine.source is not None:
            raise ConnectError(
                f"rank {self._rank}: train() returned without a call of hold(), with which the others wait for it; "
                "call hold() on every rank",
                rank=self._rank,
            )
        world = self._world
        if world is not None and world.is_last(FINISHED):
            self._do(self._machine.end, over=True)

    @property
    def _entered(self) -> EpochWorld:
        if self._world is None:
            raise ConnectError("the job has ended; hold() is called inside train()")
        return self._world

    @property
    def _rank(self) -> int:
        return -1 if self._world is None else self._world.rank

    # -- what is held -------------------------------------------------------------------------------------------

    def hold(self, job: Job, tensors: Mapping[str, Tensor], shardings: dict[str, Sharding]) -> None:
        """Keep these from now on, after they have been set to what was held before."""
        self._check(job)
        hosts = tuple(self._members.hosts.get(member, "") for member in self._members.ranks)
        layout = StateLayout(job.plan.mesh, shardings, hosts, self._redundancy)
        new = EpochState(self._epoch.number, layout, tensors, rank=job.rank, device=self.device, spare=self._spare)
        new.equal_at = None if self._guard_every is None else -1
        digest = hashlib.sha256(layout.text.encode()).hexdigest()
        if self._entered.first("layout", digest) != digest:
            raise PlanError(
                f"rank {job.rank}: hold() was given other shardings than on another rank; give every rank the "
                "shardings of all tensors of the job, with the same names, shapes, dtypes and axes"
            )
        if job.rank == 0 and not self._warned:
            self._warned = new.warn_of_fewer_copies()
        self._restored(new)
        if self._machine.source is not None and (old := self._state_of(self._machine.source)) is not None:
            old.keep((self._machine.step, self._machine.equal))  # from which all go on if another member is lost
        new.commit(self._machine.step, self._entered.wait_for, partial(self._check, job), wait=True)
        if self._guard_every is not None:
            self._settle(self._entered.wait_for(lambda: self._guarded(job, new)))
            new.equal_at = self._machine.step
        self._all_hold([*self._states, new], new)

    def _guarded(self, job: Job, new: EpochState) -> Guarding:
        every, suspicion = self._guard_every or 1, self._machine.suspicion
        self._guarding = guarding = Guarding(job.groups, new.tensors, new.shardings, every, suspicion)
        guarding.start(self._machine.step)
        return guarding

    def _settle(self, guarding: Guarding) -> None:
        """Wait until the guards of all ranks have found the same, so that each acts on it; raise its failure."""
        with suppress(ConnectError):  # another rank was through before, and ended the epoch
            self._entered.wait_for(guarding.meet)
        if guarding.failure is not None:
            raise guarding.failure

    def described(
        self, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, replicated: str | None
    ) -> tuple[CurrentTensors, dict[str, Sharding]]:
        """Return a model's and its optimizer's state, with shardings whose copies are equal where nothing is restored.

        Raises ``PlanError`` for tensors that differ between ranks which hold copies of them. Where the job is guarded,
        that is found in ``hold``.
        """
        self._check(job)

        def describe() -> tuple[CurrentTensors, dict[str, Sharding]]:
            found = model_state(model, optimizer, job.groups, replicated)
            if self._machine.source is None and not self._machine.load and self._guard_every is None:
                check_copies(job.groups, *found)
            return found

        tensors, shardings = self._entered.wait_for(describe)
        self._machine.unreplicated = unreplicated_axes(shardings, job.plan.mesh, replicated)
        return tensors, shardings

    def _follow(self) -> None:
        """Take a spare's part in ``hold``: it may have been at a rank of the old plan."""
        self._restored(None)
        self._all_hold(self._states, None)
        self._prepare()

    def _restored(self, new: EpochState | None) -> None:
        machine = self._machine
        if machine.load and new is not None and self._restore is not None:
            load_all(new, machine.step, self._restore)
        if machine.source is None:
            return
        started = time.perf_counter()
        everyone, before = self._members.all, machine.history[machine.source]
        places = {member: position for position, member in enumerate(everyone)}
        beyond = iter(range(len(everyone), len(everyone) + len(before.ranks)))
        positions = [places[member] if member in places else next(beyond) for member in before.ranks]
        old = self._state_of(machine.source)
        restore(self._entered, old, machine.step, positions, new, self._restore, machine.budget or BUDGET)
        self._seconds["transfer"] = time.perf_counter() - started

    def _all_hold(self, until_then: list[EpochState], new: EpochState | None) -> None:
        """Every member has its part: what was held before is needed by nobody."""
        self._states = until_then
        self._entered.meet("held")
        for state in self._states:
            state.keep(() if state is not new else state.snapshots.keys())
        self._states = [] if new is None else [new]
        if new is None:
            self._spare.clear()
        with self._lock:
            self._machine.all_hold()
        self._peers.forget(self._epoch.number - 1)

    def commit(self, job: Job, step: int) -> None:
        """Keep a copy of what is held, as it is at the beginning of a step."""
        state = self._state(job, "commit")
        if step != self._machine.step and state.commits == {0: self._machine.step}:  # the first one
            same_step(job.rank, step, "another rank", int(self._entered.first("commit", str(step))))
        self._look(job, step)
        if self._guarding is not None:
            state.equal_at = self._guarding.equal_at
        state.commit(step, self._entered.wait_for, partial(self._check, job))
        job.step = step
        self._peers.committed(step)
        self._prepare()
        if self._do(self._machine.committed, step):
            self._check(job)

    def relayout(self, job: Job, layout: PlanLike, budget: int | None) -> None:
        """Go on in another layout, which every rank asks for; where it is refused, every rank raises ``PlanError``."""
        state, members, refused = self._state(job, "relayout"), self._members, None
        try:
            sizes = Sizes.of(layout, plan_of(layout, members.plan.mesh.size), members.sizes.shrink)
            integer(BUDGET if budget is None else budget, "budget", least=_LEAST * len(members.all))
            checked(self._redundancy, self._machine.relaid(sizes).plan.mesh.size)
            text = f"{sizes.first.mesh}, budget={budget} ({sizes.first.digest[:12]})"
        except (LayoutError, PlanError) as error:
            refused, text = error, error.message
        texts = self._entered.wait_for(lambda: gathered(job.groups, text, "relayout()"))
        for rank, other in texts.items():
            if other != text:
                raise PlanError(
                    f"rank {job.rank}: relayout() was called for {quoted(text)}, and on rank {rank} for "
                    f"{quoted(other)}; call it for the same on every rank",
                    rank=job.rank,
                )
        if refused is not None:
            raise refused
        state.settle(self._entered.wait_for, partial(self._check, job))
        with self._lock:
            changes = self._machine.relayout(sizes, budget)
        if changes:
            if self._entered.is_last("relayout"):  # nobody waits for the store when its connections are cut
                self._announce()
            self._ended.wait()
            self._check(job)

    def _state(self, job: Job, call: str) -> EpochState:
        """Return what is held in this epoch, for a call that needs it."""
        self._check(job)
        if (state := self._state_of(self._epoch.number)) is None:
            raise ConnectError(
                f"rank {job.rank}: {call}() was called before hold(); name what must survive first", rank=job.rank
            )
        return state

    def _state_of(self, epoch: int) -> EpochState | None:
        return next((state for state in self._states if state.epoch == epoch), None)

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
            self._do(self._machine.end, evicted=members)
            self._check(job)

    def _prepare(self) -> None:
        """Connect to the store that the next round will be in: of the lowest member that lives, of two to be sure."""
        if not self._is_prepared:
            self._is_prepared = True
            self._peers.prepare(sorted(self._members.all)[:2], self._timeout)

    def _check(self, job: Job) -> None:
        if self._ended.is_set():
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
            self._do(self._machine.end, suspects=found, epoch=epoch)

        self._peers.watch(watched, self._timeout, late, lost)

    @property
    def _unlimited(self) -> bool:
        """Whether calls have no limit of their own: NCCL's have none, as torch's watchdog is off."""
        return self.device.type == "cuda"

    def _diagnosed(self, epoch: Epoch, reason: str, members: tuple[int, ...]) -> None:
        self._do(self._machine.diagnosed, epoch, reason, members, unlimited=self._unlimited)

    def _announce(self) -> bool:
        """End the epoch on every member; return whether this member is the first that does, as far as it knows."""
        actions = self._do(self._machine.end)
        return any(isinstance(action, Abort) for action in actions)

    def _do(self, event: Callable[_P, list[Action]], *given: _P.args, **how: _P.kwargs) -> list[Action]:
        """Give the state machine an event, and carry out what follows; from any thread."""
        with self._lock:
            actions = event(*given, **how)
        self._carry_out(actions)
        return actions

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Abort):
                self._abort(action.epoch)
            else:
                self._peers.announce(action.members, action.message, self._timeout)

    def _abort(self, epoch: Epoch) -> None:
        with self._lock:
            if epoch != self._epoch:
                return
            self._noticed, world = self._peers.now(), self._world
            self._ended.set()
        if world is not None:
            world.abort()

    def _reply(self, message: Message) -> Message:
        """Return what this member replies to a message of another."""
        with self._lock:
            reply, actions = self._machine.received(message, self._rounds.server)
            if "last_change" in reply:
                reply["last_change"]["seconds"] = dict(self._seconds)
            if "welcome" in reply:
                reply["members"] = addresses(self._members.ranks, self._peers.contacts)
            if reply.get("welcome"):
                contacts = {str(member): vars(contact) for member, contact in self._peers.contacts.items()}
                reply["welcome"] |= {"world_size": self._world_size, "contacts": contacts}
        self._carry_out(actions)
        return reply

    @property
    def address(self) -> str:
        """Where this member is reached by a process that joins."""
        found = self._peers.contacts.get(self.member)
        return f"{found.address}:{found.heartbeat}" if found else ""

    @property
    def key(self) -> str:
        """The key of the job, which a process that joins needs."""
        return self._peers.key

    def _enter_as_new(self, welcome: Message) -> None:
        """Become a member in the epoch that the others have agreed on."""
        self._peers.admit({int(member): Contact.read(contact) for member, contact in welcome["contacts"].items()})
        self._peers.admit(self._machine.welcomed(welcome, self._peers.hosts).joined)

    # -- the end of an epoch ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Leave the world, and agree with the others how to go on."""
        left, self._left = self._left, Left()
        if left.error is not None and not left.handled:
            left.first = self._announce_error()
        left.suspicion = self._machine.suspicion if self._guarding is None else self._guarding.open
        self._leave_world()
        started = self._peers.now()
        noticed = started if self._noticed is None else self._noticed
        outcome = self._rounds.agree(self._peers, self._machine.epoch_end, self._report(left))
        self._seconds = {"free": started - noticed, "agree": self._peers.now() - started}
        self._adopt(outcome, left)

    def _announce_error(self) -> bool:
        """Return whether this member began the change: the loss of another one shows as an error of a collective, too.

        A member that was stopped for a while did not: its calls fail because the others went on without it.
        """
        if self._ended.wait(_SETTLE):
            return False
        return self._announce() and self._peers.stood_still() < _STOPPED * self._timeout

    def _leave_world(self) -> None:
        with self._lock:
            world, self._world = self._world, None
        guarding, self._guarding = self._guarding, None
        if world is not None:
            if guarding is not None:
                with suppress(ConnectError):
                    guarding.close()
            world.close()
            for state in self._states:
                state.leave()
            drop_failed_backward()

    def _report(self, left: Left) -> Report:
        state = self._state_of(self._epoch.number)
        with self._lock:
            return self._machine.report(
                left,
                {state.epoch: state.steps for state in self._states},
                {} if state is None else state.commits,
                self._last_step,
                loads=self._restore is not None,
                equal={one.epoch: one.equal_at for one in self._states if one.equal_at is not None},
            )

    @property
    def _last_step(self) -> int:
        """The step of the last commit."""
        state = self._state_of(self._epoch.number)
        return max(() if state is None else state.snapshots, default=self._machine.step)

    def _adopt(self, outcome: Outcome, left: Left) -> None:
        """Go on to the next epoch, or stop."""
        with self._lock:
            action = self._machine.concluded(outcome, left, took_part=self._rounds.took_part)
            if isinstance(action, Stop):
                raise _Over(action.error)
            if reasons := self._machine.reasons:
                members = ", ".join(f"member {member} ({why})" for member, why in reasons.items())
                level = logging.WARNING if self.member == min(self._members.all) else logging.INFO
                _log.log(level, "rankmesh: epoch %d goes on without %s", self._epoch.number, members)
            self._peers.start_over()
            self._peers.admit(action.joined)
            self._begun()
        self._forget_later()
        if self._machine.last_change in self._machine.refused.values() and self.member == min(self._members.all):
            _log.warning("rankmesh: %s", self._machine.last_change)

    def _forget_later(self) -> None:
        """Drop what was held after the step that all go back to: whoever is lost meanwhile, nobody goes on from it."""
        source = self._machine.source
        if source is not None:
            self._states = [state for state in self._states if state.epoch <= source]
            if (state := self._state_of(source)) is not None:
                state.forget(self._machine.step)

    def _begun(self) -> None:
        """Begin an epoch, which may have ended: others may announce that before this member is in it."""
        self._ended, self._noticed = self._peers.event(), None
        if self._machine.has_ended:
            self._ended.set()


def drop_failed_backward() -> None:
    """Have torch drop what a failed backward pass on this thread did not reach, with its activations and groups.

    It keeps that until the next pass on the thread, and a spare makes none.
    """
    torch.zeros((), device="cpu", requires_grad=True).backward()
