"""Ranks on this machine, forked from this process, which loads torch once: sixteen start in a second.

```
this process     fork, fork, ... ──> store ──> go: its port ──> a thread watches ──> wait for the last rank
rank             begin(): wait for "go" ──────────────────────> its work
```

A fork copies the locks of all other threads as they are at that moment, the resolver's and the loader's among them. So
nothing here has a thread before the last rank is forked: neither the store, which torchrun's launcher would start
first, nor the watcher.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.heartbeats import ended_by
from rankmesh.errors import ConnectError, PlanError
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import torchrun_variables

__all__ = ["LIMIT", "NO_NAME_SERVER", "POLL", "Ranks", "begin", "check_size"]

# Each rank is a process with about 35 threads and 100 descriptors.
LIMIT = 256

POLL = 0.02
# torch looks up the name of each peer's address for its messages, and a name server that does not answer holds up each
# look-up for ten seconds. Ranks of one machine need none: /etc/hosts is read without. For the resolver of glibc, which
# reads it once in a process; so it is set in processes of our own, never in one that imports rankmesh.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}
# How long forking all ranks may take: that is this machine's work, in which no rank waits for another one's.
_FORKING = 60.0


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


# -- in a rank ------------------------------------------------------------------------------------------------------


def _rank(rank: int, place: Path, work: Callable[[int], None]) -> None:
    # The parent's handlers came along with the fork; a rank that waits in a collective would never run them.
    for number in (signal.SIGINT, *_ENDS):
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(NO_NAME_SERVER)
    output = os.open(place / f"output-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    work(rank)


def begin(place: Path, rank: int, size: int) -> Launch:
    """Who this rank is, once all are forked and the store is there; torchrun's variables are set for it."""
    import torch

    go, end = place / "go", time.monotonic() + _FORKING
    while not go.exists():
        if time.monotonic() > end:
            raise ConnectError(f"rank {rank} waited {_FORKING:g} s for the other ranks to be started", rank=rank)
        time.sleep(POLL)
    port = int(go.read_text(encoding="ascii"))
    os.environ.update(torchrun_variables(rank, size, local_rank=rank, local_world_size=size, port=port))
    os.environ.update(TORCHELASTIC_RUN_ID="rankmesh", TORCHELASTIC_RESTART_COUNT="0")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    return started_by()


# -- in the parent --------------------------------------------------------------------------------------------------

# What ends a command from outside; it takes its ranks along.
_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Ranks:
    """So many ranks of this machine, which write to the folder ``place``; ``update`` is called while they run."""

    def __init__(self, place: Path, size: int, update: Callable[[], None] | None = None) -> None:
        self.place, self.size, self.update = place, size, update or (lambda: None)
        self.over = threading.Event()
        self.processes: dict[int, BaseProcess] = {}

    def run(self, work: Callable[[int], None]) -> dict[int, str]:
        """Fork the ranks, of which each calls ``work(rank)``, and wait for them; the first that failed, and how."""
        from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

        with _quiet(), _ends_raise():
            try:
                ranks: Any = start_processes(_rank, (self.place, work), self.size, join=False, start_method="fork")
                self.processes = dict(enumerate(ranks.processes))
                with self._open(), self._watched():
                    while not ranks.join():
                        pass
            except ProcessExitedException as error:
                return {error.error_index: ended_by(error.exit_code)}
            except ProcessRaisedException as error:
                return {error.error_index: ended_by(1)}
            finally:
                self.end_all()
                for process in self.processes.values():
                    process.join()
        return {}

    @contextmanager
    def _open(self) -> Iterator[None]:
        """All are forked: serve their store, and write down where."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        part = self.place / "part"
        part.write_text(str(store.port), encoding="ascii")
        part.rename(self.place / "go")
        yield

    @contextmanager
    def _watched(self) -> Iterator[None]:
        watcher = threading.Thread(target=self.watch, daemon=True, name="rankmesh-watcher")
        watcher.start()
        try:
            yield
        finally:
            self.over.set()
            watcher.join()
            self.update()

    def watch(self) -> None:
        """Report how far the ranks are, until they have ended."""
        while not self.over.wait(0.1):
            self.update()

    def end_all(self) -> None:
        """Kill the ranks that are left: one that is stopped would be waited for half a minute."""
        for process in self.processes.values():
            # Not if it is alive: whoever asks that may take the answer from the thread that waits.
            process.kill()


@contextmanager
def _ends_raise() -> Iterator[None]:
    """A signal that ends this process raises ``SystemExit``, so that what was begun is cleaned up."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
