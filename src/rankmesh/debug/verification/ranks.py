"""Ranks on this machine, forked from this process, which loads torch once: sixteen start in a second.

```
this process     fork, fork, ... ──> store ──> go: its port ──> wait for the last rank (launch/local.py)
rank             wait for "go" ──────────────────────────────> its work ──> found, by one of them for all
```

A fork copies the locks of all other threads as they are at that moment, the resolver's and the loader's among them. So
nothing here has a thread before the last rank is forked: neither does the store, which torchrun's launcher would start
first.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

from rankmesh.core.plan import Plan
from rankmesh.core.private import write_whole
from rankmesh.errors import ConnectError, PlanError, RankmeshError, first_line
from rankmesh.launch.local import end_all, ended_by, handling, output_to, wait
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import torchrun_variables

__all__ = ["LIMIT", "NO_NAME_SERVER", "Ended", "Progress", "check_size", "run_here"]

# Each rank is a process with about 35 threads and 100 descriptors.
LIMIT = 256

_POLL = 0.02
# torch looks up the name of each peer's address for its messages, and a name server that does not answer holds up each
# look-up for ten seconds. Ranks of one machine need none: /etc/hosts is read without. For the resolver of glibc, which
# reads it once in a process; so it is set in processes of our own, never in one that imports rankmesh.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}
# Seconds for forking all ranks, which depends on this machine alone.
_FORKING = 60.0
# How long ranks may take to end once one of them has what is looked for, or has failed; one that is stopped never ends.
_ENDING, _AFTER_FAILURE = 3.0, 30.0

_Found = TypeVar("_Found")
Progress = Callable[[int, int], None]
# What each rank does: who it is, what takes how far it is, and what takes what is found.
Work = Callable[[Launch, Progress, Callable[[_Found], None]], object]


def check_size(plan: Plan) -> int:
    """Return the number of ranks that a plan starts on this machine; raise ``PlanError`` for too many."""
    size = plan.world_size
    if size > LIMIT:
        raise PlanError(
            f"the plan is for {size} ranks, and at most {LIMIT} can be started on this machine; "
            "run the same command inside a job of that size (torchrun or srun), or take a smaller layout",
            world_size=size,
            limit=LIMIT,
        )
    return size


@dataclass(frozen=True)
class Ended(Generic[_Found]):
    """Results that ranks ``found``, and ``how`` each process ended that was not terminated."""

    found: _Found
    how: Mapping[int, str]


def run_here(size: int, work: Work[_Found], progress: Progress | None, done: str) -> Ended[_Found]:
    """Fork ``size`` ranks which do this work, and wait until all have ended.

    Raises ``ConnectError`` if nothing was found; ``done`` names the work in the error: ``"checked"``.
    """
    with tempfile.TemporaryDirectory(prefix="rankmesh-ranks-") as folder:
        place = Path(folder)
        how = _run(place, size, work, progress)
        if (place / "found").exists():
            return Ended(pickle.loads((place / "found").read_bytes()), how)  # noqa: S301  - ours
        errors = [path.read_text(encoding="utf-8") for path in sorted(place.glob("failed-*"))]
    errors += [f"{rank} {end}" for rank, end in how.items()]
    why = next(iter(errors), "0 ended without a result")
    raise ConnectError(f"nothing was {done}: rank {why}; look at its output", ranks=tuple(how))


# -- in a rank ------------------------------------------------------------------------------------------------------


def _rank(rank: int, place: Path, size: int, work: Work[_Found]) -> None:
    # The parent's handlers are inherited; a rank that waits in a collective would never run them.
    for number in (signal.SIGINT, *_ENDS):
        signal.signal(number, signal.SIG_DFL)
    # Sent to all when one has failed: those that have not begun are to say what they see.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.update(NO_NAME_SERVER)
    output_to(place / f"output-{rank}")

    def far(done: int, total: int) -> None:
        write_whole(place / "far", f"{done} {total}".encode())

    def give(found: _Found) -> None:
        write_whole(place / "found", pickle.dumps(found))

    try:
        launch = _begin(place, rank, size)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work(launch, far, give)
    except (RankmeshError, RuntimeError) as error:
        write_whole(place / f"failed-{rank}", f"{rank} failed: {first_line(error)}".encode())
        raise SystemExit(1) from None


def _begin(place: Path, rank: int, size: int) -> Launch:
    """Return this rank, once all are forked and the store serves; torchrun's variables are set for it."""
    import torch

    go, end = place / "go", time.monotonic() + _FORKING
    while not go.exists():
        if time.monotonic() > end:
            raise ConnectError(f"rank {rank} waited {_FORKING:g} s for the other ranks to be started", rank=rank)
        time.sleep(_POLL)
    port = int(go.read_bytes())
    os.environ.update(torchrun_variables(rank, size, local_rank=rank, local_world_size=size, port=port))
    os.environ.update(TORCHELASTIC_RUN_ID="rankmesh", TORCHELASTIC_RESTART_COUNT="0")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    tempfile.tempdir = str(place)  # what a rank leaves that is killed goes with the folder
    torch.set_num_threads(1)
    return started_by()


# -- in the parent --------------------------------------------------------------------------------------------------

# What ends a command from outside; it takes its ranks along.
_ENDS = (signal.SIGTERM, signal.SIGHUP)


def _run(place: Path, size: int, work: Work[_Found], progress: Progress | None) -> dict[int, str]:
    """Fork the ranks, which write to the folder ``place``, and wait for them; how those ended that failed."""
    from torch.multiprocessing.spawn import start_processes

    from rankmesh.runtime.served_store import serve_at

    processes: list[Any] = []
    terminated: list[int] = []

    def seconds_left() -> float:
        if progress is not None and (place / "far").exists():
            progress(*map(int, (place / "far").read_bytes().split()))
        if not terminated and any(process.exitcode for process in processes):
            terminated.extend(process.pid for process in processes if process.is_alive())
            for process in processes:
                process.terminate()
        if (place / "found").exists():
            return _ENDING
        return _AFTER_FAILURE if terminated else inf

    with handling(_end, *_ENDS):
        try:
            ranks: Any = start_processes(_rank, (place, size, work), size, join=False, start_method="fork")
            processes += ranks.processes
            # All are forked: serve their store, and write down where.
            store = serve_at("127.0.0.1")
            write_whole(place / "go", str(store.port).encode())
            statuses = wait(processes, seconds_left)
        finally:
            end_all(processes)
    seconds_left()
    # SIGTERM is from here, for the others when one has failed.
    return {rank: ended_by(status) for rank, status in enumerate(statuses) if status and status != -signal.SIGTERM}


def _end(number: int, _: object) -> None:
    """Raise, so that the ranks are ended and their folder is removed."""
    raise SystemExit(128 + number)
