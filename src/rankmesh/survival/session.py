"""The life of one member, on the thread of its program: epochs, and the rounds between them.

```
start ── epoch 0 ── train ── a member is lost, or fails ── abort ── round of all members ── epoch 1 ── train ── ...
            │                                                │
            └─ a spare waits                                 └─ all have returned: the end
```

``driver`` has what other threads do meanwhile, ``member_state`` what survives from one epoch to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

from rankmesh.backend import torch_threads
from rankmesh.backend.nccl import device_done
from rankmesh.core.axes import integer
from rankmesh.debug.watch.recorder import prepare
from rankmesh.errors import ConnectError, LayoutError, PlanError, quoted
from rankmesh.guard.everyone import gathered
from rankmesh.survival.agreement import Suspicion
from rankmesh.survival.driver import Driver, Interrupted
from rankmesh.survival.heartbeat import Message
from rankmesh.survival.job import Job
from rankmesh.survival.machine import Left, Stop
from rankmesh.survival.member_state import MemberState
from rankmesh.survival.members import Members, PlanLike, Sizes, plan_of
from rankmesh.survival.peers import Peers
from rankmesh.survival.redundancy import checked
from rankmesh.survival.simulated import joined
from rankmesh.survival.state import Load
from rankmesh.survival.transport import Connection, Transport
from rankmesh.survival.world import FINISHED
from rankmesh.transfer.planning.transfer import BUDGET

__all__ = ["Session", "drop_failed_backward", "transport"]

_Result = TypeVar("_Result")

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


class _Over(BaseException):
    """Leaves ``train`` when the job has ended for this member; ``error`` is why, None where all have returned."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error


def transport(reply: Callable[[Message], Message], join: str | None = None) -> Transport:
    """Return the transport of this process, or of this simulated rank; ``join``: a member of a running job."""
    simulated = torch_threads.this_rank()
    return Peers(reply, _LIMIT, join) if simulated is None else joined(simulated, reply)


class Session:
    """One member of a job that survives; ``reach`` makes its transport."""

    def __init__(
        self,
        layout: PlanLike,
        *,
        spares: int,
        shrink: str | None,
        timeout: float,
        redundancy: int = 0,
        restore: Load | None = None,
        evict: bool | float | None = None,
        guard: int | None = None,
        reach: Callable[[Callable[[Message], Message]], Transport] = transport,
    ) -> None:
        every = None if guard is None else integer(guard, "guard", least=1)
        redundancy = integer(redundancy, "redundancy", least=0)
        self.driver = Driver(timeout, reach)
        self.state = MemberState(self.driver, redundancy, restore, every)
        self.evict = (_STUCK if self.driver.unlimited else False) if evict is None else evict
        self._left = Left()
        if self.evict:
            prepare()

        def first(size: int, hosts: Mapping[int, str]) -> Members:
            members = Members.first(layout, world_size=size, spares=spares, shrink=shrink, hosts=hosts)
            checked(redundancy, members.plan.mesh.size)
            return members

        self.driver.start(first)

    def run(self, train: Callable[[Job], _Result]) -> _Result | None:
        """Call ``train`` in each epoch in which this member has a rank, until it has returned on all."""
        result: _Result | None = None
        try:
            while True:
                result = None  # of a member that has a rank at the end
                job = self._enter()
                try:
                    result = train(job)
                    device_done(job.device, partial(self.driver.check, job))
                    self.state.look(job, self.state.last_step, last=True)
                    self._finished(job)
                    self.driver.ended.wait()
                except Interrupted:
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
        error = error if isinstance(error, Exception) else None
        self._left = Left(error=error, first=self.driver.announce(), handled=True)
        try:
            self._finish()
            following = self._enter()
        except Exception as raised:  # noqa: BLE001 - whatever ends the job, the program does not handle
            raise _Over(raised) from None
        vars(job).update(vars(following))

    def relayout(self, job: Job, layout: PlanLike, budget: int | None) -> None:
        """Go on in another layout, which every rank asks for; where it is refused, every rank raises ``PlanError``."""
        driver, machine = self.driver, self.driver.machine
        self.state.of_this_epoch(job, "relayout")
        refused, members = None, driver.members
        try:
            sizes = Sizes.of(layout, plan_of(layout, members.plan.mesh.size), members.sizes.shrink)
            integer(BUDGET if budget is None else budget, "budget", least=_LEAST * len(members.all))
            checked(self.state.redundancy, machine.relaid(sizes).plan.mesh.size)
            text = f"{sizes.first.mesh}, budget={budget} ({sizes.first.digest[:12]})"
        except (LayoutError, PlanError) as error:
            refused, text = error, error.message
        texts = driver.entered.wait_for(lambda: gathered(job.groups, text, "relayout()"))
        for rank, other in texts.items():
            if other != text:
                raise PlanError(
                    f"rank {job.rank}: relayout() was called for {quoted(text)}, and on rank {rank} for "
                    f"{quoted(other)}; call it for the same on every rank",
                    rank=job.rank,
                )
        if refused is not None:
            raise refused
        self.state.settle(job)
        if driver.note(machine.relayout, sizes, budget):
            if driver.entered.is_last("relayout"):  # nobody waits for the store when its connections are cut
                driver.announce()
            driver.ended.wait()
            driver.check(job)

    def close(self) -> None:
        """End the session: no socket, thread or store is left of it."""
        self._leave_world()
        self.driver.close()

    # -- one epoch ----------------------------------------------------------------------------------------------------

    def _enter(self) -> Job:
        """Enter epochs until this member has a rank in one, and agree with the others after each."""
        while True:
            try:
                job = self._begin()
                if job is not None:
                    return job
                self.driver.ended.wait()
            except Interrupted:
                pass
            except Exception as raised:  # noqa: BLE001 - of this member, or since another one was lost
                self._left.error = raised
            self._finish()

    def _begin(self) -> Job | None:
        """Enter the world of the epoch: the job of a member that has a rank; a spare takes part in what those do."""
        driver, members, epoch = self.driver, self.driver.members, self.driver.epoch
        driver.watch()
        server = min(members.all)
        # That of the round, of which the next one has another: to connect anew may take seconds.
        connection = driver.rounds.release(server) or self._connected(server)
        world = driver.peers.world(connection, epoch, members, 2 * driver.timeout)
        driver.enter(world)
        driver.seconds["connect"] = world.enter()
        if self.evict:
            world.watch(None if self.evict is True else self.evict, partial(driver.diagnosed, epoch))
        if driver.machine.unequal:
            self.state.compare(world)
        if world.groups is None:
            self.state.follow()
            return None
        step, device = driver.machine.step, driver.peers.device
        return Job(members.plan, world.groups, epoch.number, step, device, driver.seconds, self)

    def _connected(self, server: int) -> Connection:
        """Connect to the store of a member; its loss ends the epoch, and with that the attempts."""
        peers = self.driver.peers
        end = peers.now() + _LIMIT
        while True:
            try:
                return peers.client(server, self.driver.timeout)
            except ConnectError:  # noqa: PERF203 - a loop of attempts
                if self.driver.ended.wait(_SETTLE):
                    raise Interrupted from None
                if peers.now() > end:
                    raise

    def _finished(self, job: Job) -> None:
        """``train`` has returned here: the last one for which this is so ends the job."""
        machine, world = self.driver.machine, self.driver.world
        if machine.source is not None:
            raise PlanError(
                f"rank {job.rank}: train() returned without a call of hold(), with which the others wait for it; "
                "call hold() on every rank",
                rank=job.rank,
            )
        self._left.done = True
        if world is not None and world.is_last(FINISHED):
            self.driver.do(machine.end, over=True)

    # -- the end of an epoch ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Leave the world, and agree with the others how to go on."""
        driver, peers = self.driver, self.driver.peers
        left, self._left = self._left, Left()
        if left.error is not None and not left.handled:
            left.first = self._announce_error()
        left.suspicion = self._leave_world()
        started = peers.now()
        noticed = started if driver.noticed is None else driver.noticed
        outcome = driver.rounds.agree(peers, driver.machine.epoch_end, self.state.report(left))
        driver.seconds = {"free": started - noticed, "agree": peers.now() - started}
        action = driver.adopt(outcome, left)
        if isinstance(action, Stop):
            raise _Over(action.error)
        self.state.forget_later()

    def _announce_error(self) -> bool:
        """Return whether this member began the change: the loss of another one shows as an error of a collective, too.

        A member that was stopped for a while did not: its calls fail because the others went on without it.
        """
        if self.driver.ended.wait(_SETTLE):
            return False
        return self.driver.announce() and self.driver.peers.stood_still() < _STOPPED * self.driver.timeout

    def _leave_world(self) -> Suspicion | None:
        """Leave the world; return what the guard's suspicion is then."""
        world = self.driver.leave()
        suspicion = self.state.leave()
        if world is not None:
            world.close()
            drop_failed_backward()
        return suspicion


def drop_failed_backward() -> None:
    """Have torch drop what a failed backward pass on this thread did not reach, with its activations and groups.

    It keeps that until the next pass on the thread, and a spare makes none.
    """
    torch.zeros((), device="cpu", requires_grad=True).backward()
