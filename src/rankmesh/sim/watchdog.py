"""The watch over the ranks of a simulation: it starts them, and gives up one that makes no progress.

A thread cannot be killed. One that was given up gets an exception at its next step in Python; until then, as inside a
call that sleeps, it holds nothing: its next call to torch.distributed raises, and the other ranks have gone on.

The hooks by which torch.distributed answers ranks are in place while a simulation needs them, and as long as a thread
lives on that was given up: nothing that it does reaches the process's own world.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rankmesh.backend import torch_threads
from rankmesh.sim.calls import call_site
from rankmesh.sim.failures import HungRank
from rankmesh.sim.scheduler import Abandoned
from rankmesh.sim.simulation import Simulation, current_context

__all__ = ["hooks", "watch"]

_LOOK = 0.05
# Seconds in which a thread that was given up should end.
_GRACE = 1.0
# How many times as long an import may take.
_IMPORT = 20


class Hooks:
    """Counts the simulations and threads that need the hooks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._survivors: list[threading.Thread] = []
        self._back: Callable[[], None] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the hooks in place."""
        with self._lock:
            self._users += 1
            if self._back is None:
                self._back = torch_threads.answer_threads(current_context)
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            self._survivors = [thread for thread in self._survivors if thread.is_alive()]
            if self._back is not None and not self._users and not self._survivors:
                self._back()
                self._back = None

    def keep_for(self, thread: threading.Thread) -> None:
        """Keep the hooks for a thread that could not be ended."""
        with self._lock:
            self._survivors.append(thread)


hooks = Hooks()


def watch(simulation: Simulation, threads: Sequence[threading.Thread], timeout: float) -> None:
    """Run the ranks to their end, or give up those that make no progress."""
    scheduler = simulation.scheduler
    for thread in threads:
        thread.start()
    scheduler.progress = time.monotonic()
    scheduler.start()
    progress = queued = 0.0
    try:
        while not scheduler.finished.wait(min(_LOOK, timeout)):
            queued_by_now = _queued(scheduler.holder, threads)
            if progress != scheduler.progress:
                progress, queued = scheduler.progress, queued_by_now
            waited = time.monotonic() - progress - (queued_by_now - queued)
            if waited > timeout and (waited > _IMPORT * timeout or not _is_importing(scheduler.holder, threads)):
                _give_up(simulation, threads, f"made no progress for {timeout:g} s", timeout)
    except BaseException:
        # The caller was interrupted: no rank may go on.
        for _ in threads:
            if not scheduler.finished.is_set():
                _give_up(simulation, threads, "was interrupted")
        raise
    for rank, thread in enumerate(threads):
        if rank not in scheduler.abandoned:
            thread.join()


def _queued(holder: int | None, threads: Sequence[threading.Thread]) -> float:
    """Return for how many seconds a rank has been ready to run and had no core, 0.0 where the system does not tell."""
    if holder is not None:
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/self/task/{threads[holder].native_id}/schedstat").read_text(encoding="ascii")
            return int(stat.split()[1]) / 1e9
    return 0.0


def _is_importing(holder: int | None, threads: Sequence[threading.Thread]) -> bool:
    """Return whether a rank imports a module: from a cold disk that takes a while, and cannot be interrupted."""
    frame = None if holder is None else sys._current_frames().get(threads[holder].ident or 0)
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _give_up(simulation: Simulation, threads: Sequence[threading.Thread], why: str, timeout: float = 10.0) -> None:
    scheduler = simulation.scheduler
    holder = scheduler.holder
    frame = None if holder is None else sys._current_frames().get(threads[holder].ident or 0)
    site = None if frame is None else call_site(frame)
    where = "an unknown place" if site is None else str(site)

    def error(rank: int) -> HungRank:
        return HungRank(
            f"rank {rank}: rank {holder} {why}, at {where}; no other rank can run until it calls torch.distributed; "
            f"end the loop or the call that it is in, or pass timeout={4 * timeout:g} if it works",
            hung=holder,
            rank=rank,
            site=None if site is None else site.place,
        )

    hung = scheduler.abandon(error)
    if hung is None:
        return
    simulation.failures[hung] = error(hung)
    _end(threads[hung], lambda: hung in simulation.ends)
    simulation.ends[hung] = f"was given up, at {where}"


def _end(thread: threading.Thread, is_ending: Callable[[], bool]) -> None:
    """Raise in a thread until it ends; one that does not is kept away from torch.distributed."""
    end = time.monotonic() + _GRACE
    while thread.is_alive() and time.monotonic() < end:
        if not is_ending():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Abandoned))
        thread.join(_LOOK)
    if thread.is_alive():
        hooks.keep_for(thread)
