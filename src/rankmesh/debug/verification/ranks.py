"""Ranks on this machine, forked from this process, which loads torch once: sixteen start in a second.

```
this process     fork, fork, ... ──> store ──> go: its port ──> a thread looks on ──> wait for the last rank
rank             wait for "go" ──────────────────────────────> its work ──> found, by one of them for all
```

A fork copies the locks of all other threads as they are at that moment, the resolver's and the loader's among them. So
nothing here has a thread before the last rank is forked: neither the store, which torchrun's launcher would start
first, nor the watcher.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from rankmesh.core.plan import Plan
from rankmesh.core.private import write_whole
from rankmesh.errors import ConnectError, PlanError, RankmeshError, first_line
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import torchrun_variables

__all__ = ["LIMIT", "NO_NAME_SERVER", "Ended", "Progress", "check_size", "ended_by", "handling", "run_here"]

# Each rank is a process with about 35 threads and 100 descriptors.
LIMIT = 256

_POLL, _LOOK = 0.02, 0.1
# torch looks up the name of each peer's address for its messages, and a name server that does not answer holds up each
# look-up for ten seconds. Ranks of one machine need none: /etc/hosts is read without. For the resolver of glibc, which
# reads it once in a process; so it is set in processes of our own, never in one that imports rankmesh.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}
# How long forking all ranks may take: that is this machine's work, in which no rank waits for another one's.
_FORKING = 60.0
# How long ranks may take to end once one of them has what is looked for; one that is stopped never ends.
_ENDING = 3.0

_Found = TypeVar("_Found")
Progress = Callable[[int, int], None]
# What each rank does: who it is, what takes how far it is, and what takes what is found.
Work = Callable[[Launch, Progress, Callable[[_Found], None]], object]


def check_size(plan: Plan) -> int:
    """How many ranks a plan starts on this machine; ``PlanError`` for more than one machine runs."""
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
    """What ranks ``found``, None where that is nothing; the ``error`` of one; ``how`` those ended that nobody ended."""

    found: _Found | None
    error: str
    how: Mapping[int, str]


def run_here(size: int, work: Work[_Found], progress: Progress | None) -> Ended[_Found]:
    """Fork ``size`` ranks which do this work, and wait until all have ended."""
    with tempfile.TemporaryDirectory(prefix="rankmesh-ranks-") as folder:
        place = Path(folder)
        how = _Ranks(place, size, progress).run(lambda rank: _work(place, rank, size, work))
        found = pickle.loads((place / "found").read_bytes()) if (place / "found").exists() else None  # noqa: S301  - ours
        errors = [path.read_text(encoding="utf-8") for path in sorted(place.glob("failed-*"))]
    return Ended(found, next(iter(errors), ""), how)


def ended_by(status: int) -> str:
    """What a status of a process says, that of a signal being negative.

    >>> ended_by(1), ended_by(-9), ended_by(-40)
    ('ended with status 1', 'was ended by SIGKILL', 'was ended by signal 40')
    """
    names = {number.value: number.name for number in signal.Signals}
    return f"ended with status {status}" if status >= 0 else f"was ended by {names.get(-status, f'signal {-status}')}"


# -- in a rank ------------------------------------------------------------------------------------------------------


def _rank(rank: int, place: Path, work: Callable[[int], None]) -> None:
    # The parent's handlers came along with the fork; a rank that waits in a collective would never run them.
    for number in (signal.SIGINT, *_ENDS):
        signal.signal(number, signal.SIG_DFL)
    # Sent to all when one has failed: those that have not begun are to say what they see.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.update(NO_NAME_SERVER)
    output = os.open(place / f"output-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    work(rank)


def _work(place: Path, rank: int, size: int, work: Work[_Found]) -> None:
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
    """Who this rank is, once all are forked and the store is there; torchrun's variables are set for it."""
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


class _Ranks:
    """So many ranks of this machine, which write to the folder ``place``."""

    def __init__(self, place: Path, size: int, progress: Progress | None) -> None:
        self._place, self._size, self._progress = place, size, progress
        self._over = threading.Event()
        self._processes: dict[int, BaseProcess] = {}
        self._killed: set[int] = set()

    def run(self, work: Callable[[int], None]) -> dict[int, str]:
        """Fork the ranks, of which each calls ``work(rank)``, and wait for them; how those ended that failed."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__
        from torch.multiprocessing.spawn import ProcessException, start_processes

        with _quiet(), handling(_end, *_ENDS):
            try:
                ranks: Any = start_processes(_rank, (self._place, work), self._size, join=False, start_method="fork")
                self._processes = dict(enumerate(ranks.processes))
                # All are forked: serve their store, and write down where.
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                write_whole(self._place / "go", str(store.port).encode())
                with self._watched():
                    while not ranks.join():
                        pass
            except ProcessException:
                pass  # how each ended says more
            finally:
                self._end_all()
                for process in self._processes.values():
                    process.join()
        statuses = {rank: process.exitcode for rank, process in self._processes.items() if rank not in self._killed}
        # SIGTERM is torch's, for the others when one has failed.
        return {rank: ended_by(status) for rank, status in statuses.items() if status not in (None, 0, -signal.SIGTERM)}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._watch, daemon=True, name="rankmesh-watcher")
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()
            self._update()

    def _watch(self) -> None:
        """Report how far the ranks are; kill those that do not end although they have found what is looked for."""
        while not self._over.wait(_LOOK):
            self._update()
            if (self._place / "found").exists() and not self._over.wait(_ENDING):
                self._end_all()

    def _update(self) -> None:
        far = self._place / "far"
        if self._progress is not None and far.exists():
            self._progress(*map(int, far.read_bytes().split()))

    def _end_all(self) -> None:
        """Kill the ranks that are left: one that is stopped would be waited for half a minute."""
        for rank, process in self._processes.items():
            if _runs(process):
                self._killed.add(rank)
                process.kill()


def _runs(process: BaseProcess) -> bool:
    """Whether a child of this process runs; asked without taking how it ended from the thread that waits for it."""
    try:
        return os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    except ChildProcessError:
        return False


def _end(number: int, _: object) -> None:
    """Raise, so that what was begun is cleaned up."""
    raise SystemExit(128 + number)


@contextmanager
def handling(handler: Callable[[int, object], object], *numbers: int) -> Iterator[None]:
    """Inside, a handler takes these signals; on another thread than the main one, which alone can, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def _quiet() -> Iterator[None]:
    """No words of torch on ranks that are ended: what they did is in their logs."""
    logger = logging.getLogger("torch.multiprocessing.spawn")
    level = logger.level
    logger.setLevel(level if os.environ.get("RANKMESH_DEBUG") else logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
