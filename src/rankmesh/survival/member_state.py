"""The state of a member: its tensors in this epoch, its last commits, copies for others, and what its guard has found.

```
hold      restore what was held before ── first commit ── compare replicas ── all hold: what was held before goes
commit    look at the guard's last check ── keep a snapshot, send copies
follow    a spare's part in the hold of the others
leave     the snapshots stay, until all hold again
```
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankmesh.core.sharding import Sharding
from rankmesh.errors import ConnectError, PlanError
from rankmesh.guard.model_state import CurrentTensors, model_state, unreplicated_axes
from rankmesh.survival.agreement import Report, Suspicion, same_step
from rankmesh.survival.driver import Driver
from rankmesh.survival.guarding import Guarding, are_equal, check_copies, replica_digests
from rankmesh.survival.machine import Left
from rankmesh.survival.redundancy import StateLayout
from rankmesh.survival.state import EpochState, Load, load_boxes, restore
from rankmesh.survival.world import EpochWorld
from rankmesh.transfer.planning.transfer import BUDGET

if TYPE_CHECKING:
    from rankmesh.survival.job import Job

__all__ = ["MemberState"]

_log = logging.getLogger("rankmesh.survival")


class MemberState:
    """The state that one member holds; only the program's thread changes it.

    ``redundancy``, ``load`` and ``guard_every`` are ``redundancy``, ``restore`` and ``guard`` of ``rm.survive``.
    """

    def __init__(self, driver: Driver, redundancy: int, load: Load | None, guard_every: int | None) -> None:
        self.redundancy = redundancy
        self._driver, self._load, self._guard_every = driver, load, guard_every
        self._machine = driver.machine
        self._states: list[EpochState] = []
        self._spare: list[Tensor] = []  # the memory of former snapshots
        self._guarding: Guarding | None = None
        self._warned = False

    # -- hold ---------------------------------------------------------------------------------------------------------

    def hold(self, job: Job, tensors: Mapping[str, Tensor], shardings: dict[str, Sharding]) -> None:
        """Keep these from now on, after they have been set to what was held before."""
        driver, machine = self._driver, self._machine
        driver.check(job)
        hosts = tuple(driver.members.hosts.get(member, "") for member in driver.members.ranks)
        layout = StateLayout(job.plan.mesh, shardings, hosts, self.redundancy)
        new = EpochState(job.epoch, layout, tensors, rank=job.rank, device=job.device, spare=self._spare)
        new.equal_at = None if self._guard_every is None else -1
        digest = hashlib.sha256(layout.text.encode()).hexdigest()
        if driver.entered.first("layout", digest) != digest:
            raise PlanError(
                f"rank {job.rank}: hold() was given other shardings than on another rank; give every rank the "
                "shardings of all tensors of the job, with the same names, shapes, dtypes and axes"
            )
        if job.rank == 0 and not self._warned:
            self._warned = new.warn_of_fewer_copies()
        self._restored(new)
        if (old := None if machine.source is None else self._state_of(machine.source)) is not None:
            old.keep((machine.step, machine.equal))  # from which all go on if another member is lost
        new.commit(machine.step, driver.entered.wait_for, partial(driver.check, job), old)
        new.settle(driver.entered.wait_for, partial(driver.check, job))
        if self._guard_every is not None:
            self._settle(driver.entered.wait_for(partial(self._guarded, job, new, self._guard_every)))
            new.equal_at = machine.step
        self._all_hold([*self._states, new], new)

    def follow(self) -> None:
        """Take a spare's part in ``hold``: it may have been at a rank of the old plan."""
        self._restored(None)
        self._all_hold(self._states, None)
        self._driver.prepare()

    def described(
        self, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, replicated: str | None
    ) -> tuple[CurrentTensors, dict[str, Sharding]]:
        """Return a model's and its optimizer's state, with shardings whose copies are equal where nothing is restored.

        Raises ``PlanError`` for tensors that differ between ranks which hold copies of them. Where the job is guarded,
        that is found in ``hold``.
        """
        self._driver.check(job)

        def describe() -> tuple[CurrentTensors, dict[str, Sharding]]:
            found = model_state(model, optimizer, job.groups, replicated)
            if self._machine.source is None and not self._machine.load and self._guard_every is None:
                check_copies(job.groups, *found)
            return found

        tensors, shardings = self._driver.entered.wait_for(describe)
        self._machine.unreplicated = unreplicated_axes(shardings, job.plan.mesh, replicated)
        return tensors, shardings

    def _restored(self, new: EpochState | None) -> None:
        machine, members = self._machine, self._driver.members.all
        if machine.load and new is not None and self._load is not None:
            everything = [(name, box) for name in new.tensors for box in new.shardings[name].of(new.rank).boxes]
            load_boxes(new, everything, machine.step, self._load)
        if machine.source is None:
            return
        started = time.perf_counter()
        before = machine.history[machine.source]
        places = {member: position for position, member in enumerate(members)}
        beyond = iter(range(len(members), len(members) + len(before.ranks)))
        positions = [places[member] if member in places else next(beyond) for member in before.ranks]
        old = self._state_of(machine.source)
        restore(self._driver.entered, old, machine.step, positions, new, self._load, machine.budget or BUDGET)
        self._driver.seconds["transfer"] = time.perf_counter() - started

    def _all_hold(self, until_then: list[EpochState], new: EpochState | None) -> None:
        """Every member has its part: what was held before is needed by nobody."""
        self._states = until_then
        self._driver.entered.meet("held")
        for state in self._states:
            state.keep(() if state is not new else state.snapshots.keys())
        self._states = [] if new is None else [new]
        if new is None:
            self._spare.clear()
        self._driver.note(self._machine.all_hold)
        self._driver.peers.forget(self._driver.epoch.number - 1)

    # -- commit -------------------------------------------------------------------------------------------------------

    def commit(self, job: Job, step: int) -> None:
        """Keep a copy of what is held, as it is at the beginning of a step."""
        driver, state = self._driver, self.of_this_epoch(job, "commit")
        if step != self._machine.step and state.commits == {0: self._machine.step}:  # the first one
            same_step(job.rank, step, "another rank", int(driver.entered.first("commit", str(step))))
        self.look(job, step)
        if self._guarding is not None:
            state.equal_at = self._guarding.equal_at
        state.commit(step, driver.entered.wait_for, partial(driver.check, job))
        job.step = step
        driver.peers.committed(step)
        driver.prepare()
        if driver.do(self._machine.committed, step):
            driver.check(job)

    def settle(self, job: Job) -> None:
        """Wait until the copies for other ranks are there."""
        state = self.of_this_epoch(job, "relayout")
        state.settle(self._driver.entered.wait_for, partial(self._driver.check, job))

    def of_this_epoch(self, job: Job, call: str) -> EpochState:
        """Return the state of this epoch, for a call that needs it."""
        self._driver.check(job)
        if (state := self._state_of(job.epoch)) is None:
            raise ConnectError(
                f"rank {job.rank}: {call}() was called before hold(); name what must survive first", rank=job.rank
            )
        return state

    def _state_of(self, epoch: int) -> EpochState | None:
        return next((state for state in self._states if state.epoch == epoch), None)

    @property
    def last_step(self) -> int:
        """The step of the last commit."""
        state = self._state_of(self._driver.epoch.number)
        return max(() if state is None else state.snapshots, default=self._machine.step)

    # -- the guard ----------------------------------------------------------------------------------------------------

    def _guarded(self, job: Job, new: EpochState, every: int) -> Guarding:
        self._guarding = guarding = Guarding(job.groups, new.tensors, new.shardings, every, self._machine.suspicion)
        guarding.start(self._machine.step)
        return guarding

    def _settle(self, guarding: Guarding) -> None:
        """Wait until the guards of all ranks have found the same, so that each acts on it; raise its failure."""
        with suppress(ConnectError):  # another rank was through before, and ended the epoch
            self._driver.entered.wait_for(guarding.meet)
        if guarding.failure is not None:
            raise guarding.failure

    def look(self, job: Job, step: int, *, last: bool = False) -> None:
        """Have the guard look at what its last check has found: all go back, a member is left out, or nothing."""
        driver, guarding = self._driver, self._guarding
        if guarding is None:
            return
        if driver.entered.wait_for(lambda: guarding.commit(step, last=last)):
            if job.rank == 0 and guarding.found is not None:
                _log.warning("rankmesh: %s", guarding.found)
            self._settle(guarding)
            driver.announce()
            driver.check(job)
        if guarding.faulty:
            members = {driver.members.ranks[rank]: guarding.verdict for rank in guarding.faulty}
            guarding.faulty = ()
            hosts = ", ".join(sorted({driver.members.hosts.get(member, "") for member in members}))
            try:
                driver.members.without(members)
            except PlanError:
                _log.warning("rankmesh: %s (host %s); nobody can take its place: it stays", guarding.verdict, hosts)
                return
            if driver.member == min(members):
                _log.warning("rankmesh: %s (host %s, device %s); it is left out", guarding.verdict, hosts, job.device)
            self._settle(guarding)
            driver.do(self._machine.end, evicted=members)
            driver.check(job)

    def compare(self, world: EpochWorld) -> None:
        """Go on from the last commit only if replicas are equal there; else from the last that was found equal.

        A replica whose other ranks are lost has nothing to be compared to.
        """
        machine, step = self._machine, self._machine.step
        state = None if machine.source is None else self._state_of(machine.source)
        given = {} if state is None else world.wait_for(partial(replica_digests, state, step))
        equal = are_equal(world.gathered(given))
        self._driver.note(machine.compared, equal=equal)
        if state is not None:
            state.equal_at = machine.step
        self.forget_later()
        if not equal and world.rank == 0:
            _log.warning(
                "rankmesh: at step %d replicas differ, or one has no other left to compare with; all ranks repeat the "
                "steps from %d on, where they were equal",
                step,
                machine.step,
            )

    # -- between two epochs -------------------------------------------------------------------------------------------

    def leave(self) -> Suspicion | None:
        """Let the program's tensors go, and the guard; return the suspicion with which the next epoch goes on."""
        guarding, self._guarding = self._guarding, None
        if guarding is not None:
            with suppress(ConnectError):
                guarding.close()
        for state in self._states:
            state.leave()
        return self._machine.suspicion if guarding is None else guarding.open

    def report(self, left: Left) -> Report:
        """Return this member's report of an epoch that it has left."""
        state = self._state_of(self._driver.epoch.number)
        return self._driver.note(
            self._machine.report,
            left,
            {state.epoch: state.steps for state in self._states},
            {} if state is None else state.commits,
            self.last_step,
            loads=self._load is not None,
            equal={one.epoch: one.equal_at for one in self._states if one.equal_at is not None},
        )

    def forget_later(self) -> None:
        """Drop what was held after the step that all go back to: whoever is lost meanwhile, nobody goes on from it."""
        source = self._machine.source
        if source is not None:
            self._states = [state for state in self._states if state.epoch <= source]
            if (state := self._state_of(source)) is not None:
                state.forget(self._machine.step)
