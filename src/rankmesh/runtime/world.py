"""The world: what all plans of this process share, and who owns it.

```
                 ┌─ store        the keys of its rounds, deleted when a round is over
World ───────────┼─ epochs       counted in the store, the same on every rank; names of process groups carry the epoch
(one a process)  ├─ schedule     one order of what all ranks do together: making and declining splits
                 ├─ devices      gloo's sockets, shared by the groups that connect at once
                 └─ live groups  of every plan that is connected; LiveGroups is a view of one of them
```

A world begins with ``torch.distributed``'s default group and ends with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from rankmesh.backend.default import DefaultGroup, default_group, default_pg
from rankmesh.backend.protocol import Kind
from rankmesh.backend.registries import every_group
from rankmesh.backend.releases import backend_of
from rankmesh.core.local import LocalGroups
from rankmesh.core.options import Options
from rankmesh.core.plan import Plan
from rankmesh.core.rank_range import RankRange
from rankmesh.core.saved import contents
from rankmesh.errors import AgreementError, ConnectError, RankmeshError
from rankmesh.rendezvous import Round, StoreChannel
from rankmesh.runtime.agreement import Agreement, PlanProposal, agree
from rankmesh.runtime.connection import Connection
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.schedule import check_kinds, check_lazy, check_world, participants, schedule
from rankmesh.runtime.served_store import is_served

__all__ = ["World", "close_all"]

_Result = TypeVar("_Result")

_worlds: WeakKeyDictionary[torch.distributed.ProcessGroup, World] = WeakKeyDictionary()


class World:
    """The world of this process: its default group, and everything that rankmesh has made in it.

    ``default`` has what torch knows of the default group: rank, size, store, backend, timeout, and the bound device.
    """

    def __init__(self, default: DefaultGroup) -> None:
        self.default = default
        self.backend = backend_of(default)
        # Diagnoses of what hangs, from the watches that run, the newest last; each is called with the reason.
        self.diagnosing: list[Callable[[str], str | None]] = []
        # Whether the store lives in this process: it is rank 0's, or the launcher's, where nobody says otherwise.
        self.serves = default.rank == 0 and not is_served()
        self._live: list[LiveGroups] = []
        self._connecting = threading.Lock()

    @classmethod
    def current(cls) -> World:
        """Return the world of ``torch.distributed``'s default group; ``ConnectError`` where there is none."""
        pg = default_pg()
        return _worlds.get(pg) or _worlds.setdefault(pg, cls(default_group()))

    @property
    def live(self) -> tuple[LiveGroups, ...]:
        """The live groups of every plan that is connected, in the order in which they were made."""
        return tuple(self._live)

    def round(self, name: str, ranks: Sequence[int]) -> Round:
        """Return a round of these ranks of the world, through its store."""
        return Round(StoreChannel(self.default.store), name, ranks, self.default.rank, self.serves)

    # -- connect ------------------------------------------------------------------------------------------------

    def connect(self, plans: Mapping[str, Plan], limit: timedelta) -> dict[str, LiveGroups]:
        """One agreement on all these plans, then one schedule: the live groups of each, by its key."""
        with self._one_at_a_time():
            started = time.perf_counter()
            phases: dict[str, float] = {}
            if not self.backend.shares:
                plans = {key: plan.with_options(Options(share=False)) for key, plan in plans.items()}
            refusal = self._refusal(plans)
            phases["check"] = time.perf_counter() - started
            try:
                local = {} if refusal else {key: plan.of(self.default.rank) for key, plan in plans.items()}
                agreement = self._agree(plans, refusal, limit, phases)
            except AgreementError as error:
                raise refusal or error from None
            if refusal is not None:
                if agreement is not None:  # all ranks refuse alike
                    agreement.leave()
                raise refusal
            return self._make(plans, local, agreement, limit, phases, started)

    def refuse(self, error: RankmeshError, limit: timedelta) -> None:
        """Tell the ranks of the world, which would wait for this one, why it has no plan to connect."""
        with self._one_at_a_time(), suppress(AgreementError):
            if (agreement := self._agree({}, error, limit, {})) is not None:
                agreement.leave()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Two threads would connect in another order on another rank."""
        if not self._connecting.acquire(blocking=False):
            raise ConnectError(
                f"rank {self.default.rank} connects on two threads at the same time, and so in an order of its own; "
                "connect on one thread, or several plans together, in one mapping",
                rank=self.default.rank,
            )
        try:
            yield
        finally:
            self._connecting.release()

    def _refusal(self, plans: Mapping[str, Plan]) -> RankmeshError | None:
        """Why this rank cannot serve the plans. It proposes the reason: the others would wait for it."""
        try:
            for plan in plans.values():
                check_world(plan, self.default, collective=self.backend.collective)
                check_lazy(plan, self.default)
                check_kinds(plan, self.default, self.backend)
        except RankmeshError as error:
            return error
        return None

    def _agree(
        self,
        plans: Mapping[str, Plan],
        refusal: RankmeshError | None,
        limit: timedelta,
        phases: dict[str, float],
    ) -> Agreement | None:
        """Agree with all ranks that the plans concern; return None in a dry run, which has no other ranks."""
        ranks = participants(plans.values(), self.default)
        if self.default.dry or (refusal is not None and self.default.rank not in ranks):
            return None
        if self.default.store is None:
            raise ConnectError(
                f"the world's backend {self.default.backend!r} has no store, which the ranks need to agree; "
                "initialise the world with gloo or nccl, and give groups backend='mpi' where they need it",
                backend=self.default.backend,
            )
        proposal = self._proposal(plans, refusal, ranks)
        seconds = limit.total_seconds()
        return _timed(phases, "agree", lambda: agree(self.default.store, proposal, seconds, serves=self.serves))

    def _proposal(self, plans: Mapping[str, Plan], refusal: RankmeshError | None, ranks: RankRange) -> PlanProposal:
        from rankmesh import __version__

        rank, size = self.default.rank, self.default.size
        common: dict[str, object] = {"version": __version__, "live_world_size": size}
        if self.backend.collective:
            common["made"] = "through torch's public API"
        if refusal is not None:
            return PlanProposal(rank, ranks, common | {"refused": str(refusal)})

        def fields() -> dict[str, object]:
            if list(plans) == [""]:
                return contents(plans[""]) | common
            return {"plans": [{"name": key, "plan": contents(plan)} for key, plan in plans.items()]} | common

        # A plan has its digest already, for the names of its groups.
        stands = repr((common, [(key, plan.digest) for key, plan in plans.items()]))
        return PlanProposal(rank, ranks, fields, stands)

    # -- make ---------------------------------------------------------------------------------------------------

    def _make(
        self,
        plans: Mapping[str, Plan],
        local: Mapping[str, LocalGroups],
        agreement: Agreement | None,
        limit: timedelta,
        phases: dict[str, float],
        started: float,
    ) -> dict[str, LiveGroups]:
        """Make the groups of this rank, in the one order of all ranks; then wait until every rank has its own."""
        within = limit.total_seconds()
        deadline = time.monotonic() + within
        epoch = agreement.epoch if agreement else 0
        made = {key: Connection(self, plan, local[key], key, epoch) for key, plan in plans.items()}
        live = {key: LiveGroups(connection, phases) for key, connection in made.items()}
        self._live += live.values()
        try:
            _timed(phases, "create", lambda: self._create(made, deadline, phases))
            if agreement:
                _timed(phases, "complete", lambda: agreement.complete(deadline - time.monotonic(), within))
        except BaseException as error:
            for connection in reversed(made.values()):
                with suppress(ConnectError):
                    connection.close()
            if agreement:
                # The others need not wait for a rank that goes away.
                agreement.give_up(error, deadline - time.monotonic(), within)
            raise
        phases["all"] = time.perf_counter() - started
        for connection in made.values():
            connection.is_complete = True
        return live

    def outside(self, plan: Plan) -> LiveGroups:
        """Return the live groups of a rank that is in none of the plan's."""
        return LiveGroups(Connection(self, plan, plan.of(self.default.rank)), {})

    def _create(self, made: Mapping[str, Connection], deadline: float, phases: dict[str, float]) -> None:
        plans = {key: connection.plan for key, connection in made.items()}
        local = {key: connection.local for key, connection in made.items()}
        epoch = next((connection.epoch for connection in made.values()), 0)
        for step in schedule(plans, local, self.default, epoch, collective=self.backend.collective):
            started = time.perf_counter()
            if isinstance(step.action, Kind):
                self.backend.decline(step.action)
            else:
                made[step.key].make(step.name, step.action, deadline)
                phase = " ".join(filter(None, ("create", step.key, step.name)))
                phases[phase] = time.perf_counter() - started

    @contextmanager
    def diagnosed(self, what: str) -> Iterator[None]:
        """Errors inside that name missing ranks end with the diagnosis of the watch, where one runs."""
        try:
            yield
        except (AgreementError, ConnectError) as error:
            if not self.diagnosing or not (error.missing or error.values.get("late")):
                raise
            diagnosis = self.diagnosing[-1](f"{what} waited too long")
            if diagnosis is None:
                raise
            raise type(error)(f"{error.message}; by the recordings: {diagnosis}", **error.values) from error

    def abort(self) -> None:
        """Make every collective of this process return with an error; on NCCL, also on torch's own groups.

        As ``LiveGroups.abort``, for all that is connected: communicators have to be aborted together.
        """
        self.backend.abort(every_group())

    # -- what there is ------------------------------------------------------------------------------------------

    def forget_closed(self) -> None:
        """Own no groups of what is closed."""
        self._live = [live for live in self._live if not live.closed]
        if not self._live:
            self.backend.release()


def close_all() -> None:
    """Destroy the groups of every plan that this process still holds, last connected first.

    For when an exception has lost the mapping that ``connect`` gave. Every rank calls it, as ``close``.
    """
    world = _worlds.get(default_pg(inherited=True))
    for live in reversed(world.live if world else ()):
        live.close()


def _timed(phases: dict[str, float], phase: str, work: Callable[[], _Result]) -> _Result:
    started = time.perf_counter()
    result = work()
    phases[phase] = time.perf_counter() - started
    return result
