"""Processes of this machine that are ranks: what they leave, how long they may take, how they ended. No torch.

```
this process     start ──────────> wait, until the time is over for those that are left ──> status of each
rank             output to a file ──> work ──> leave a file: whole, or not at all
```
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["end_all", "ended_by", "handling", "output_to", "wait"]

_LOOK = 0.02


def output_to(path: Path) -> None:
    """Write what this process prints to a file, from now on."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)


def wait(processes: Sequence[BaseProcess], seconds_left: Callable[[], float], limit: float = inf) -> list[int | None]:
    """Wait until all have ended, and kill those that are left when the time is over.

    ``seconds_left`` is called repeatedly; the earliest end that it gives counts. Returns the status of each
    process, None of one that was killed here.
    """
    end = time.monotonic() + limit
    try:
        while any(process.is_alive() for process in processes):
            end = min(end, time.monotonic() + seconds_left())
            if time.monotonic() >= end:
                break
            time.sleep(_LOOK)
    finally:
        killed = end_all(processes)
    return [None if process in killed else process.exitcode for process in processes]


def end_all(processes: Sequence[BaseProcess]) -> list[BaseProcess]:
    """Kill the processes that are left, and return them."""
    left = [process for process in processes if process.is_alive()]
    for process in left:
        process.kill()
    for process in processes:
        process.join()
    return left


def ended_by(status: int) -> str:
    """Describe the end of a process with this status; a negative one is a signal.

    >>> ended_by(1), ended_by(-9), ended_by(-40)
    ('ended with status 1', 'was ended by SIGKILL', 'was ended by signal 40')
    """
    names = {number.value: number.name for number in signal.Signals}
    return f"ended with status {status}" if status >= 0 else f"was ended by {names.get(-status, f'signal {-status}')}"


@contextmanager
def handling(handler: Callable[[int, object], object], *numbers: int) -> Iterator[None]:
    """Let a handler take these signals inside; outside the main thread, which alone can, change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
