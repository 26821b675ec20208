"""Check inside a job: the ranks that a launcher started prove the plan; one of them gathers what they say.

```
every rank   a thread proves and writes the diary; the main thread watches it, and the notices of all
trouble      this rank failed, stands still for the timeout, or is told by its launcher to end: the roll is called
rank 0       once all have ended, or the roll is over: who did not answer is lost ──> result: shown, then a notice
the others   wait for the result ──> the same result, hence the same exit status
```

Where rank 0 itself does not answer, the first of the others reports; where it served the store, each says so itself.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.diary import Diary, ended, next_group, run_rank
from rankmesh.debug.verification.notices import Notices
from rankmesh.debug.verification.results import CheckResult, KindResult, RankFailure, collect
from rankmesh.errors import ConnectError, PlanError
from rankmesh.launch.started import Launch
from rankmesh.runtime.served_store import open_store

__all__ = ["check_in_job", "is_stuck"]

# How long a rank may take to answer the roll, to report, and how much longer than they may wait ranks are let wait.
_ROLL, _GRACE, _MORE = 3.0, 3.0, 1.0
_LOOK = 0.05
_TOLD = 64
_WORKER = "rankmesh-check"

Show = Callable[[CheckResult], None]


def check_in_job(
    plan: Plan,
    launch: Launch,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    since: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    show: Show | None = None,
) -> CheckResult:
    """Check a plan on the ranks of this job; the result on every rank, its first failures on the others than rank 0.

    The rank that reports gives the result to ``show`` before any rank returns: launchers end all ranks when one ends
    in failure.

    Raises ``PlanError`` when the job has another size than the plan, ``ConnectError`` when the ranks cannot meet or
    the rank that serves the store is gone.
    """
    if plan.world_size != launch.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, but the job has {launch.world_size}; "
            f"start {plan.world_size} ranks, or check a layout of {launch.world_size}",
            plan_world_size=plan.world_size,
            world_size=launch.world_size,
        )
    started = time.perf_counter() if since is None else since
    launch, store = open_store(launch, timedelta(seconds=timeout))
    notices = Notices(launch, store, lambda: open_store(launch, timedelta(seconds=timeout))[1])
    diary: Diary = []

    def write(event: dict[str, Any]) -> None:
        diary.append(event)
        notices.write(diary)
        if progress is not None and event["event"] == "proved":
            progress(sum(entry["event"] == "proved" for entry in diary), len(plan.of(launch.rank)))

    verdicts: list[str] = []
    with _notice_of_the_end() as told_to_end:
        work = threading.Thread(
            target=run_rank, args=(plan, launch, backend, timeout, write, verdicts.append), daemon=True, name=_WORKER
        )
        work.start()
        try:
            if _reports(notices, launch, diary, timeout, told_to_end):
                return _report(notices, plan, launch, diary, started, verdicts, show)
            return _heard(notices, plan, launch, diary)
        finally:
            notices.close()
            work.join(_GRACE if ended(diary) else 0)


def is_stuck() -> bool:
    """Whether a check has left a thread in a call that does not come back; this process can still end itself."""
    return any(thread.name in (_WORKER, "rankmesh-notices", "rankmesh-store") for thread in threading.enumerate())


def _reports(notices: Notices, launch: Launch, diary: Diary, timeout: float, told_to_end: threading.Event) -> bool:
    """Wait until this rank is to report (True), or has heard the result or that there will be none."""
    moved, entries, answered = time.monotonic(), 0, 0
    while True:
        time.sleep(_LOOK)
        now = time.monotonic()
        if (len(diary), notices.ended) != (entries, answered):
            moved, entries, answered = now, len(diary), notices.ended
        if notices.result is not None or notices.gone or now - notices.heard > timeout + _MORE + _ROLL:
            return False
        if launch.rank == 0 and notices.ended == launch.world_size:
            return True
        failed = ended(diary) and diary[-1]["event"] == "failed"
        if notices.called is None:
            if failed or told_to_end.is_set() or now - moved > timeout + _MORE:
                notices.call_the_roll()
                moved = now
        elif now - notices.called > _ROLL + (_GRACE if launch.rank else 0):
            return launch.rank == 0 or notices.is_first()


def _report(
    notices: Notices,
    plan: Plan,
    launch: Launch,
    diary: Diary,
    started: float,
    verdicts: list[str],
    show: Show | None,
) -> CheckResult:
    diaries = {**notices.diaries(), launch.rank: list(diary)}
    silent = notices.silent() if notices.called is not None else []
    lost = {rank: "does not answer" for rank in silent if not ended(diaries.get(rank, []))}
    lost.pop(launch.rank, None)
    result = collect(plan, diaries, time.perf_counter() - started, lost, "".join(verdicts[-1:]))
    if show is not None:
        show(result)
    notices.show(asdict(replace(result, failures=result.failures[:_TOLD], followed=result.followed[:_TOLD])))
    notices.await_readers(launch.world_size - len(result.lost), _GRACE)
    return result


@contextmanager
def _notice_of_the_end() -> Iterator[threading.Event]:
    """Outlive the launcher's SIGTERM, which follows the death of any rank: time to say what was seen.

    Launchers kill half a minute later.
    """
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _heard(notices: Notices, plan: Plan, launch: Launch, diary: Diary) -> CheckResult:
    """The result that another rank gives; ``ConnectError`` with this rank's own last words where there is none."""
    end = time.monotonic() + _GRACE
    # Without a store nothing more is heard; what this rank's own work ends with is about to come.
    while notices.result is None and not (notices.gone and ended(diary)) and time.monotonic() < end:
        time.sleep(_LOOK)
    if notices.result is not None:
        return _result(notices.result)
    raise ConnectError(
        f"rank {launch.rank}: nothing was heard of rank 0 at {launch.meeting}{_own_words(plan, launch.rank, diary)}; "
        "rank 0, its host, or the way to it is gone; look at the logs of rank 0",
        rank=launch.rank,
        missing=(0,),
    )


def _result(data: Mapping[str, Any]) -> CheckResult:
    kinds = (KindResult(**{**kind, "operations": tuple(kind["operations"])}) for kind in data["kinds"])
    failures, followed = (tuple(RankFailure(**one) for one in data[name]) for name in ("failures", "followed"))
    return CheckResult(**{**data, "kinds": tuple(kinds), "failures": failures, "followed": followed})


def _own_words(plan: Plan, rank: int, diary: Diary) -> str:
    if not ended(diary) or diary[-1]["event"] != "failed":
        return ""
    name = next_group(plan, rank, diary)
    place = f" at group {name} of the ranks {plan.of(rank)[name].group.array.tolist()[:16]}" if name else ""
    return f", and this rank failed{place} ({diary[-1]['kind']}: {diary[-1]['message']})"
