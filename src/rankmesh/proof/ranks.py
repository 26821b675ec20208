"""Ranks on this machine, started by torchrun's own launcher.

torch is imported once and the ranks are forked from this process, so sixteen start in a second. A fork copies the
locks of the other threads as they are at that moment, and the launcher's store has a thread that takes the resolver's
lock whenever a rank connects; so no rank touches the network before all of them are forked (the *gate*).

```
this process     start_ranks ── fork ──> rank: begin() ──> forked-3 ── wait for "go" ──> its work
a thread of it   Watcher: all are forked ──> go          tells how far they are, until they have ended
```
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankmesh.errors import ConnectError, PlanError
from rankmesh.launch.started import Launch, started_by
from rankmesh.plan.plan import Plan

__all__ = ["FORKING", "LIMIT", "POLL", "Watcher", "begin", "check_size", "start_ranks"]

# Each rank is a process with about 35 threads and 100 descriptors.
LIMIT = 256

POLL = 0.02
# How long forking all ranks may take: that is this machine's work, in which no rank waits for another one's.
FORKING = 60.0


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
    """Run ``work`` on ranks to their end; the one that the launcher saw fail first, and how.

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
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL if not os.environ.get("RANKMESH_DEBUG") else logger.level)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _exit(failure: Any) -> str:
    name = failure.signal_name()
    return f"was ended by {name}" if name and name != "<N/A>" else f"ended with status {failure.exitcode}"


def begin(place: Path) -> Launch:
    """The first thing that a started rank does: it waits until all are forked, and then knows who it is."""
    import torch

    launch = started_by()
    # The launcher's handlers came along with the fork; a rank that waits in a collective would never run them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _gate(place, launch.rank)
    torch.set_num_threads(1)
    return launch


def _gate(place: Path, rank: int) -> None:
    part = place / f"part-{rank}"
    part.write_text(str(os.getpid()), encoding="ascii")
    part.rename(place / f"forked-{rank}")
    end = time.monotonic() + FORKING + 5  # the parent is the first to say who is missing
    while not (place / "go").exists():
        if time.monotonic() > end:
            raise ConnectError(f"rank {rank} waited {FORKING:g} s for the other ranks to be started")
        time.sleep(POLL)


class Watcher(threading.Thread):
    """Opens the gate when every rank is forked, and tells how far the ranks are, for which ``tell`` is called."""

    def __init__(self, place: Path, size: int, tell: Callable[[], None] | None = None) -> None:
        super().__init__(daemon=True, name="rankmesh-watcher")
        self.place, self.size, self.tell = place, size, tell or (lambda: None)
        self.over = threading.Event()
        self.processes: dict[int, int] = {}
        self._before = {child.pid for child in multiprocessing.active_children()}

    def run(self) -> None:
        """What the thread does."""
        if self.open_gate():
            self.watch()
        else:
            self.end_all()

    def watch(self) -> None:
        """Tell how far the ranks are, until they have ended."""
        while not self.over.wait(0.1):
            self.tell()

    def open_gate(self) -> bool:
        """Whether all ranks were forked in time, or ended before."""
        end = time.monotonic() + FORKING
        while not self.over.wait(POLL) and time.monotonic() < end:
            self.processes = {int(path.name[7:]): int(path.read_text("ascii")) for path in self.place.glob("forked-*")}
            if len(self.processes) == self.size:
                (self.place / "go").touch()
                return True
        return self.over.is_set()

    def end_all(self) -> None:
        """Kill the ranks: the launcher would wait half a minute for one that is stopped."""
        for child in multiprocessing.active_children():
            if child.pid not in self._before:
                child.kill()

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self.join()
        self.tell()
