"""Check a plan: with the ranks of this job, or with ranks that are started on this machine (``ranks``).

The ranks agree in one round, independent of their collectives:

```
every rank   a thread verifies the groups (``work``); at its end the rank arrives with its report
the last     completes the arrivals: nobody is lost
in trouble   a rank that failed, made no progress for the timeout, or got SIGTERM, sends a probe:
             ranks that do not respond are lost
rank 0       collects the reports ──> result: shown, then announced to all, who end with the same status
```

If rank 0 is lost, the lowest responsive rank reports; if it served the store, each rank reports that itself.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.ranks import Progress, check_size, run_here
from rankmesh.debug.verification.results import CheckResult, KindResult, RankFailure, collect
from rankmesh.debug.verification.work import WORKER, Report, Work
from rankmesh.errors import ConnectError, PlanError, StoreLost, quoted
from rankmesh.launch.local import handling
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import NO_LAUNCHER
from rankmesh.rendezvous import Arrivals, Codec, Outcome, Proposal, Round, StoreChannel, lost
from rankmesh.rendezvous.step import parsed
from rankmesh.runtime.served_store import is_served, open_store

__all__ = ["check", "is_single_process", "is_stuck"]

# The steps of the round: all ranks' work has ended, or some are lost; the result.
_ENDED, _RESULT = "ended", "result"
# Seconds for the last reports of ranks after a failure, for the result, and beyond the timeout before a rank is stuck.
_LAST_REPORTS, _GRACE, _MORE = 2.0, 3.0, 1.0
_REPORTED = 64
# The end of a lost rank that no other process saw.
_UNRESPONSIVE = "does not answer"

Show = Callable[[CheckResult], None]


def check(
    plan: Plan,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    since: float | None = None,
    progress: Progress | None = None,
    show: Show | None = None,
) -> CheckResult:
    """Build every group of a plan on real processes and prove each with collectives; how that went, rank by rank.

    Inside a job every rank calls it, and gets the result; without a launcher it starts the ranks itself, on this
    machine. ``timeout`` is how long ranks wait for each other, in seconds; ``progress`` is given how many of its groups
    rank 0 has verified; ``show`` gets the result on the one process that prints it. ``since`` is when the clock of
    the whole check began (``time.perf_counter()``), without it that is now.

    Raises ``PlanError`` for a plan of another size than the job, or too large for one machine; ``ConnectError`` when
    the ranks of a job cannot meet. Ranks that fail or die are in the result.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"cannot check {quoted(plan)}, which is not a plan; use rankmesh.read('tp=2,dp=4') or "
            "Plan(mesh, [GroupSpec('tp'), ...])",
            received=plan,
        )
    launch = started_by()
    started = time.perf_counter() if since is None else since
    if not is_single_process(launch):
        return _check_in_job(plan, launch, backend, timeout, started, progress, show)
    result = _check_here(plan, backend, timeout, started, progress)
    if show is not None:
        show(result)
    return result


def is_single_process(launch: Launch) -> bool:
    """Return whether there are no ranks but those that this process starts; a shell in a Slurm allocation is one task.

    >>> is_single_process(started_by({}))
    True
    >>> is_single_process(started_by({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0"}))
    False
    """
    return launch.launcher == NO_LAUNCHER or (launch.launcher == "slurm" and launch.single_rank)


def _check_here(
    plan: Plan, backend: str | None, timeout: float, started: float, progress: Progress | None
) -> CheckResult:
    """Return the result that ranks of this machine show; how their processes ended is known here alone."""

    def work(launch: Launch, far: Progress, give: Show) -> None:
        _check_in_job(plan, launch, backend, timeout, started, far, give)

    ended = run_here(check_size(plan), work, progress, "checked")
    failures = (
        replace(one, message=ended.how.get(one.rank, one.message)) if one.kind == "lost" else one
        for one in ended.found.failures
    )
    return replace(ended.found, failures=tuple(failures))


def _check_in_job(
    plan: Plan,
    launch: Launch,
    backend: str | None,
    timeout: float,
    started: float,
    progress: Progress | None,
    show: Show | None,
) -> CheckResult:
    """Return the result on every rank of this job, its first failures on the others than rank 0.

    The rank that reports gives it to ``show`` before any rank returns: launchers end all ranks when one ends in
    failure.
    """
    if plan.world_size != launch.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, but the job has {launch.world_size}; "
            f"start {plan.world_size} ranks, or check a layout of {launch.world_size}",
            plan_world_size=plan.world_size,
            world_size=launch.world_size,
        )
    to_end = threading.Event()
    # Outlive the launcher's SIGTERM, which follows the death of any rank: time to report what was seen. It kills half a
    # minute later.
    with handling(lambda *_: to_end.set(), signal.SIGTERM):
        launch, among = _round(launch, timeout)
        work = Work(plan, launch, backend, timeout, progress if launch.rank == 0 else None)
        try:
            missing = _missing(among, work, timeout, to_end)
            return _result(plan, among, work, started, missing, show)
        except StoreLost as error:
            raise _no_response(launch) from error
        finally:
            work.join(_GRACE if work.over.is_set() else 0)


def is_stuck() -> bool:
    """Return whether a check has left a thread in a call that does not return; this process can still end itself."""
    return any(thread.name in (WORKER, "rankmesh-store", "rankmesh-work") for thread in threading.enumerate())


# -- the round ------------------------------------------------------------------------------------------------------


def _round(launch: Launch, timeout: float) -> tuple[Launch, Round]:
    """Join the round of this check, in which rank 0 takes part.

    A rank that is early may find the store of the job before, which rank 0 is about to close: it tries again.
    """
    end, served = time.monotonic() + timeout, is_served()
    while True:
        launch, store = open_store(launch, timedelta(seconds=max(1.0, end - time.monotonic())))
        channel, ranks = StoreChannel(store, f"rankmesh/check/{launch.attempt}"), range(launch.world_size)
        try:
            identity = f"process {os.getpid()} on {launch.host}"
            serves = launch.rank == 0 and not served
            among = Round(channel, "check", ranks, launch.rank, serves, identity, patience=timeout)
            among.introduce()
            while not served and not among.seen(0):
                if time.monotonic() > end:
                    raise _no_response(launch)
                time.sleep(_pace(launch.world_size))
        except StoreLost as error:
            if launch.rank == 0 or served or time.monotonic() > end:
                raise _no_response(launch) from error
        else:
            return launch, among


def _pace(world_size: int) -> float:
    """Return the seconds between two looks at the store, which answers all ranks."""
    return 0.1 if world_size <= 256 else 1.0


def _missing(among: Round, work: Work, timeout: float, to_end: threading.Event) -> Collection[int]:
    """Return the ranks that are lost, once the work of all others has ended or the responsive ranks have given up."""
    pace, arrived, complete = _pace(len(among.participants)), False, False

    def who_responds(arrivals: Arrivals) -> Outcome:
        arrivals.probe(_LAST_REPORTS)
        absent = arrivals.still_absent(_LAST_REPORTS)
        unresponsive = arrivals.unresponsive(besides=set(among.participants).difference(absent))
        return lost(unresponsive, "took part") if unresponsive else Outcome()

    while True:
        if work.over.is_set() and not arrived:
            arrived, complete = True, among.arrive(_ENDED, Proposal(text=json.dumps(asdict(work.report))))
        if complete:
            return among.conclude(_ENDED, lambda _: Outcome(), complete=True).missing
        if work.report.kind or to_end.is_set() or time.monotonic() - work.moved > timeout + _MORE:
            return among.conclude(_ENDED, who_responds).missing
        if (outcome := among.listen(_ENDED)) is not None:
            return outcome.missing
        time.sleep(pace) if arrived else work.over.wait(pace)


def _result(
    plan: Plan, among: Round, work: Work, started: float, missing: Collection[int], show: Show | None
) -> CheckResult:
    """Return the result, made and shown by the lowest responsive rank."""
    made: list[CheckResult] = []

    def report(_: Arrivals) -> Outcome[CheckResult]:
        texts = among.arrivals(_ENDED).texts
        reports = {rank: Report(**parsed(listed[-1], "a report")) for rank, listed in texts.items()}
        gone = {one: _UNRESPONSIVE for one in missing if one not in (among.rank, *reports)}
        result = collect(plan, reports, time.perf_counter() - started, gone, work.diagnosis)
        if show is not None:
            show(result)
        made.append(result)
        return Outcome(
            value=replace(result, failures=result.failures[:_REPORTED], followed=result.followed[:_REPORTED])
        )

    responsive = [one for one in among.participants if one not in missing]
    reporter = min(responsive, default=among.rank)
    outcome = among.reported(_RESULT, reporter, report, _GRACE + among.moment, Codec(asdict, _read))
    among.leave(Outcome(missing=tuple(missing)), stay=True, all_read=True)
    if made:
        return made[0]
    if not outcome.agreed:
        raise ConnectError(outcome.message, rank=among.rank, missing=outcome.missing)
    return outcome.value


def _read(data: Mapping[str, Any]) -> CheckResult:
    kinds = (KindResult(**{**kind, "operations": tuple(kind["operations"])}) for kind in data["kinds"])
    failures, followed = (tuple(RankFailure(**one) for one in data[name]) for name in ("failures", "followed"))
    return CheckResult(**{**data, "kinds": tuple(kinds), "failures": failures, "followed": followed})


def _no_response(launch: Launch) -> ConnectError:
    return ConnectError(
        f"rank {launch.rank}: no response from rank 0 at {launch.meeting}; "
        "rank 0, its host, or the way to it is gone; look at the logs of rank 0",
        rank=launch.rank,
        missing=(0,),
    )
