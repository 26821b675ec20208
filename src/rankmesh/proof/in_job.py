"""Check inside a job: the ranks that torchrun or srun started prove the plan; rank 0 gathers what they say.

```
every rank   diary, after each event ──> store         (a connection of its own: it works when collectives do not)
rank 0       waits for the diaries ──> result: shown, then put into the store
the others   wait for the result ──> the same result, hence the same exit status
```

A rank that hears nothing of rank 0 says so itself: rank 0, its host, or the way to it is gone.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import ConnectError, PlanError
from rankmesh.launch.started import Launch
from rankmesh.launch.store import open_store
from rankmesh.plan.plan import Plan
from rankmesh.proof.results import CheckResult, Diary, KindResult, RankFailure, collect, next_group, run_rank

__all__ = ["check_in_job"]

# How long rank 0 waits for ranks that say nothing, once it has ended itself.
_GRACE = 5.0
_POLL = 0.05
_LARGEST = 2**20
_TOLD = 64


def check_in_job(
    plan: Plan,
    job: Launch,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
    show: Callable[[CheckResult], None] | None = None,
) -> CheckResult:
    """Check a plan on the ranks of this job; the result on every rank, its first failures on the others than rank 0.

    Rank 0 gives the result to ``show`` before any rank returns: launchers end all ranks when one ends in failure.

    Raises ``PlanError`` when the job has another size than the plan, ``ConnectError`` when the ranks cannot meet or
    nothing is heard of rank 0.
    """
    if plan.world_size != job.world_size:
        raise PlanError(
            f"received a plan for {plan.world_size} ranks in a job of {job.world_size}; they must be equal; "
            f"start {plan.world_size} ranks, or check a layout of {job.world_size}",
            plan_world_size=plan.world_size,
            world_size=job.world_size,
        )
    started = time.perf_counter()
    board = _Board(job, timeout)
    diary: Diary = []

    def write(event: dict[str, Any]) -> None:
        diary.append(event)
        board.write(f"diary/{job.rank}", diary)
        if progress is not None and event["event"] == "proved":
            progress(sum(entry["event"] == "proved" for entry in diary), len(plan.of(job.rank)))

    with _notice_of_the_end():
        run_rank(plan, board.launch, backend, timeout, write)
        if job.rank:
            return _heard(board, plan, job, diary, timeout)
        diaries = {**board.diaries(job.world_size), 0: diary}
        result = collect(plan, diaries, time.perf_counter() - started)
        if show is not None:
            show(result)
        board.write("result", asdict(replace(result, failures=result.failures[:_TOLD])))
        board.await_readers(job.world_size - 1 - len(result.lost))
    return result


@contextmanager
def _notice_of_the_end() -> Iterator[None]:
    """Outlive the launcher's SIGTERM, which follows the death of any rank: time to say what was seen.

    Launchers kill half a minute later; the collectives with the dead rank fail before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _heard(board: _Board, plan: Plan, job: Launch, diary: Diary, timeout: float) -> CheckResult:
    """The result that rank 0 gives; ``ConnectError`` with this rank's own last words when it gives none."""
    data = board.result(timeout + 2 * _GRACE)
    if data is not None:
        kinds = (KindResult(**{**kind, "operations": tuple(kind["operations"])}) for kind in data["kinds"])
        failures = (RankFailure(**failure) for failure in data["failures"])
        return CheckResult(**{**data, "kinds": tuple(kinds), "failures": tuple(failures)})
    raise ConnectError(
        f"rank {job.rank}: nothing was heard of rank 0 at {job.meeting}{_own_words(plan, job.rank, diary)}; "
        "rank 0, its host, or the way to it is gone; look at the logs of rank 0",
        rank=job.rank,
        missing=(0,),
    )


def _own_words(plan: Plan, rank: int, diary: Diary) -> str:
    if diary[-1]["event"] != "failed":
        return ""
    name = next_group(plan, rank, diary)
    place = f" at group {name} of the ranks {plan.of(rank)[name].group.array.tolist()[:16]}" if name else ""
    return f", and this rank failed{place} ({diary[-1]['kind']}: {diary[-1]['message']})"


class _Board:
    """The keys of this check in the job's store; a store that goes away leaves what was read until then."""

    def __init__(self, job: Launch, timeout: float) -> None:
        self.launch, store = open_store(job, timedelta(seconds=timeout))
        self._store = PrefixStore(f"rankmesh/check/{job.attempt}", store)

    def write(self, key: str, data: object) -> None:
        try:
            self._store.set(key, json.dumps(data))
        except RuntimeError:
            return

    def diaries(self, size: int) -> dict[int, Diary]:
        """The diaries of all ranks, once they have ended; what there is of those that do not end in time."""
        found: dict[int, Diary] = {}
        pending = list(range(size))
        end = time.monotonic() + _GRACE
        try:
            while pending and time.monotonic() < end:
                found |= {rank: self._read(f"diary/{rank}") or [] for rank in pending}
                pending = [rank for rank in pending if not _ended(found[rank])]
                time.sleep(_POLL if pending else 0)
        except RuntimeError:
            pass
        return found

    def result(self, seconds: float) -> Mapping[str, Any] | None:
        """Rank 0's result, None when it gives none in time.

        A thread waits: where the way to the store is cut, torch's client does not come back at its timeout.
        """
        box: list[Mapping[str, Any]] = []

        def wait() -> None:
            try:
                self._store.wait(["result"], timedelta(seconds=seconds))
                box.append(self._read("result"))
                self._store.add("readers", 1)
            except RuntimeError:
                return

        waiting = threading.Thread(target=wait, daemon=True, name="rankmesh-check")
        waiting.start()
        waiting.join(seconds + 1)
        return box[0] if box else None

    def await_readers(self, readers: int) -> None:
        """Stay until the others have read the result: the store may live in this process."""
        end = time.monotonic() + _GRACE
        try:
            while self._store.add("readers", 0) < readers and time.monotonic() < end:
                time.sleep(_POLL)
        except RuntimeError:
            return

    def _read(self, key: str) -> Any:
        """The JSON under a key, None where there is none or more than a rank of ours would write."""
        text = self._store.get(key) if self._store.check([key]) else b""
        return json.loads(text) if 0 < len(text) <= _LARGEST else None


def _ended(diary: Diary) -> bool:
    return bool(diary) and diary[-1]["event"] in ("done", "failed")
