"""Launch: ranks on this machine, started by torchrun's own launcher.

torch is imported once and the ranks are forked from this process, so sixteen start in a second. A fork copies the
locks of the other threads as they are at that moment, and the launcher's store has a thread that takes the resolver's
lock whenever a rank connects; so no rank touches the network before all of them are forked (the *gate*).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankmesh.errors import ConnectError, PlanError
from rankmesh.launch.started import Launch, started_by
from rankmesh.plan.plan import Plan
from rankmesh.proof.results import CheckResult, Diary, collect, line, run_rank

__all__ = ["LIMIT", "Watcher", "begin", "check_here", "check_size", "start_ranks"]

# Each rank is a process with about 35 threads and 100 descriptors.
LIMIT = 256

_POLL = 0.02


def check_here(
    plan: Plan,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> CheckResult:
    """Check a plan on ranks of this machine; ``progress`` is told how many of how many proofs are done.

    Raises ``PlanError`` for a world that is too large for one machine. Ranks that fail or die are in the result.
    """
    size = check_size(plan)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rankmesh-check-") as folder:
        place = Path(folder)
        watcher = Watcher(place, size, sum(len(kind) * kind.size for kind in plan.kinds.values()), progress)
        with watcher:
            stopped = start_ranks(plan, place, backend, timeout, _rank)
        diaries = {rank: _diary(place, rank) for rank in range(size)}
        _add_exits(diaries, stopped)
    return collect(plan, diaries, time.perf_counter() - started)


def check_size(plan: Plan) -> int:
    """How many ranks a plan starts on this machine; ``PlanError`` for more than one machine runs."""
    size = plan.world_size
    if size > LIMIT:
        raise PlanError(
            f"received a plan for {size} ranks to start on this machine; at most {LIMIT} are started; "
            "run the same command inside a job of that size (torchrun or srun), or take a smaller layout",
            world_size=size,
            limit=LIMIT,
        )
    return size


def start_ranks(
    plan: Plan, place: Path, backend: str | None, timeout: float, work: Callable[[str, str, str | None, float], None]
) -> dict[int, str]:
    """Run ``work`` on ranks to their end; for each rank that the launcher saw fail, what it says.

    ``work(plan as JSON, folder, backend, timeout)`` is called on each rank, and begins with ``begin``.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.world_size,
        run_id=f"rankmesh-check-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(place / "logs"), redirects=Std.ALL),
    )
    try:
        with _quiet():
            elastic_launch(config, work)(plan.to_json(), str(place), backend, timeout)
    except ChildFailedError as error:
        return {rank: _exit(failure) for rank, failure in error.failures.items()}
    return {}


@contextmanager
def _quiet() -> Iterator[None]:
    """No words from the launcher: what its ranks did is in their diaries, and it would print tracebacks."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL if not os.environ.get("RANKMESH_DEBUG") else level)
    try:
        yield
    finally:
        logger.setLevel(level)


def _exit(failure: Any) -> str:
    name = failure.signal_name()
    return f"was ended by {name}" if name and name != "<N/A>" else f"ended with status {failure.exitcode}"


def _rank(text: str, folder: str, backend: str | None, timeout: float) -> None:
    """What each started rank does."""
    place = Path(folder)
    job = begin(place, timeout)
    with (place / f"diary-{job.rank}").open("a", encoding="utf-8", buffering=1) as diary:
        well = run_rank(Plan.from_json(text), job, backend, timeout, lambda event: _write(diary, event))
    if not well:
        _linger(place, job.rank, job.world_size, timeout)
        raise SystemExit(1)


def begin(place: Path, timeout: float) -> Launch:
    """The first thing that a started rank does: it waits until all are forked, and then knows who it is."""
    import torch

    job = started_by()
    # The launcher's handlers came along with the fork; a rank that waits in a collective would never run them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _gate(place, job.rank, timeout)
    torch.set_num_threads(1)
    return job


def _write(diary: Any, event: dict[str, Any]) -> None:
    diary.write(line(event))


def _gate(place: Path, rank: int, timeout: float) -> None:
    (place / f"forked-{rank}").touch()
    end = time.monotonic() + timeout
    while not (place / "go").exists():
        if time.monotonic() > end:
            raise ConnectError(f"rank {rank} waited {timeout:g} s for the other ranks to be started")
        time.sleep(_POLL)


def _linger(place: Path, rank: int, size: int, timeout: float) -> None:
    """Let the others write what they saw: the launcher ends every rank soon after the first one that fails."""
    (place / f"ended-{rank}").touch()
    end = time.monotonic() + min(timeout, 2.0)
    while time.monotonic() < end and len(list(place.glob("ended-*"))) < size:
        time.sleep(_POLL)


def _diary(place: Path, rank: int) -> Diary:
    try:
        lines = (place / f"diary-{rank}").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(text) for text in lines if text.endswith("}")]


def _add_exits(diaries: dict[int, Diary], stopped: dict[int, str]) -> None:
    """Ranks that the launcher saw die say so, ranks that it stopped then say so too; others keep their words."""
    for rank, diary in diaries.items():
        if any(event["event"] in ("failed", "done") for event in diary):
            continue
        if rank in stopped and "SIGTERM" not in stopped[rank]:
            diary.append({"event": "failed", "kind": "lost", "message": stopped[rank]})
        elif stopped:
            message = "was stopped by the launcher, because another rank had failed"
            diary.append({"event": "failed", "kind": "stopped", "message": message})


class Watcher(threading.Thread):
    """Opens the gate when every rank is forked, and tells how far the ranks are."""

    def __init__(
        self,
        place: Path,
        size: int,
        proofs: int,
        progress: Callable[[int, int], None] | None,
        word: str = '"proved"',
    ) -> None:
        super().__init__(daemon=True, name="rankmesh-check")
        self._place, self._size, self._proofs, self._progress = place, size, proofs, progress
        self._word = word
        self._over = threading.Event()

    def run(self) -> None:
        """Open the gate, then tell how far the ranks are until it is over."""
        while not self._over.wait(_POLL) and len(list(self._place.glob("forked-*"))) < self._size:
            continue
        (self._place / "go").touch()
        while not self._over.wait(0.1):
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            done = sum(path.read_text().count(self._word) for path in self._place.glob("diary-*"))
            self._progress(done, self._proofs)

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()
        self._tell()
