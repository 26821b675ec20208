"""Check inside a job: the ranks that torchrun or srun started prove the plan; rank 0 gathers their diaries.

The diaries travel as JSON through a store of their own beside the job's (the next port), so that they arrive even
when the collectives do not.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import ConnectError, PlanError
from rankmesh.groups.check import CheckResult, Diary, collect, run_rank
from rankmesh.groups.job import JobRank
from rankmesh.plan.plan import Plan

__all__ = ["check_in_job"]

_GRACE = timedelta(seconds=10)
# Launchers kill half a minute after their notice.
_LAST_WORDS = 5.0


def check_in_job(
    plan: Plan,
    job: JobRank,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> CheckResult | None:
    """Check a plan on the ranks of this job; the result on rank 0, None on the others.

    Raises ``PlanError`` when the job has another size than the plan.
    """
    if plan.world_size != job.world_size:
        raise PlanError(
            f"received a plan for {plan.world_size} ranks in a job of {job.world_size}; they must be equal; "
            f"start {plan.world_size} ranks, or check a layout of {job.world_size}",
            plan_world_size=plan.world_size,
            world_size=job.world_size,
        )
    started = time.perf_counter()
    store = _store(job, timeout)
    diary: Diary = []

    def write(event: dict[str, Any]) -> None:
        diary.append(event)
        if event["event"] != "proved":
            store.set(f"diary/{job.rank}", json.dumps(diary))
        if progress is not None and event["event"] == "proved":
            progress(sum(entry["event"] == "proved" for entry in diary), len(plan.of(job.rank)))

    with _Notice() as notice:
        run_rank(plan, job, backend, timeout, write)
        if job.rank:
            _wait(store, "shown", _GRACE + timedelta(seconds=timeout))
            return None
        end = time.monotonic() + _GRACE.total_seconds() + timeout
        diaries = {rank: _diary(store, rank, end, notice) for rank in range(job.world_size)}
        store.set("shown", "yes")
    return collect(plan, diaries, time.perf_counter() - started)


class _Notice:
    """The launcher's SIGTERM, which follows the death of any rank: time to say what was seen, not to vanish."""

    def __init__(self) -> None:
        self.given: float | None = None
        self._before: Any = None

    def __enter__(self) -> _Notice:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        self.given = self.given or time.monotonic()

    def before(self, end: float) -> float:
        """The end of all waiting: as planned, or soon after the notice."""
        return end if self.given is None else min(end, self.given + _LAST_WORDS)


def _store(job: JobRank, timeout: float) -> Any:
    try:
        store = TCPStore(
            job.address,
            job.port + 1,
            job.world_size,
            is_master=job.rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ConnectError(
            f"rank {job.rank}: no store could be opened at {job.address}:{job.port + 1} ({reason}); "
            "check that rank 0 runs there, and that the port after MASTER_PORT is free",
            rank=job.rank,
        ) from error
    return PrefixStore("rankmesh/check", store)


def _diary(store: Any, rank: int, end: float, notice: _Notice) -> Diary:
    """A rank's diary, once it has ended; what there is of it when the rank does not end in time."""
    diary: Diary = []
    while True:
        if store.check([f"diary/{rank}"]):
            diary = json.loads(store.get(f"diary/{rank}"))
        if (diary and diary[-1]["event"] in ("done", "failed")) or time.monotonic() > notice.before(end):
            return diary
        time.sleep(0.05)


def _wait(store: Any, key: str, timeout: timedelta) -> None:
    try:
        store.wait([key], timeout)
    except RuntimeError:
        return
