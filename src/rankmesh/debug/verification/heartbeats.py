"""Heartbeats: how a process knows of the ranks that it forked whether they are alive, stopped or gone.

```
rank    writes a heartbeat into its pipe, five times a second, from a thread of its own
parent  a heartbeat        alive, even while the rank waits in a collective
        none for a while   stopped, or thrashing
        the end            gone: the system closes the pipe, in the order in which ranks die
```

A rank that ends on its own account writes so in its log before. How it ended is looked at without taking it from
whoever waits for it, or asked of the one who was faster.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

__all__ = ["INTERVAL", "Heartbeats", "ended_by"]

# Seconds between two heartbeats.
INTERVAL = 0.2


@dataclass
class Heartbeats:
    """The pipes of so many ranks; made before they are forked."""

    size: int
    pipes: list[tuple[int, int]] = field(default_factory=list)
    last: dict[int, float] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    processes: dict[int, BaseProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pipes = [os.pipe() for _ in range(self.size)]
        self._selector = selectors.DefaultSelector()
        for rank, (reader, _) in enumerate(self.pipes):
            os.set_blocking(reader, False)
            self._selector.register(reader, selectors.EVENT_READ, rank)

    # -- in a rank ----------------------------------------------------------------------------------------------

    def hold(self, rank: int) -> None:
        """This process is one of the ranks: close the others' pipes, and send heartbeats from now on."""
        mine = self.pipes[rank][1]
        for end in (end for pipe in self.pipes for end in pipe if end != mine):
            os.close(end)
        os.set_blocking(mine, False)
        threading.Thread(target=_send, args=(mine,), daemon=True, name="rankmesh-heartbeats").start()

    # -- in the parent ------------------------------------------------------------------------------------------

    def forked(self, processes: Mapping[int, BaseProcess]) -> None:
        """All ranks are there, as these processes: from now on a pipe ends when its rank does."""
        self.processes = dict(processes)
        self.last = dict.fromkeys(processes, time.monotonic())
        for _, writer in self.pipes:
            os.close(writer)

    def listen(self, seconds: float) -> None:
        """Take what comes until then: heartbeats, and ends."""
        for key, _ in self._selector.select(seconds):
            with suppress(BlockingIOError):
                if os.read(key.fd, 4096):
                    self.last[key.data] = time.monotonic()
                else:
                    self._selector.unregister(key.fd)
                    self.gone[key.data] = _how(self.processes[key.data])

    def unresponsive_since(self, moment: float) -> list[int]:
        """The ranks that are there and have sent no heartbeat since."""
        return [rank for rank, sent in self.last.items() if rank not in self.gone and sent < moment]

    def close(self) -> None:
        """Close every pipe."""
        self._selector.close()
        for reader, writer in self.pipes:
            os.close(reader)
            if not self.processes:
                os.close(writer)


def _send(end: int) -> None:
    while True:
        try:
            os.write(end, b".")
        except BlockingIOError:  # the parent is slow to read: what is in the pipe says the same
            pass
        except OSError:
            return
        time.sleep(INTERVAL)


def _how(process: BaseProcess) -> str:
    """How a child of this process ended."""
    try:
        seen = os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        seen = None
    if seen is not None:
        return ended_by(seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status)
    while process.exitcode is None:  # another thread has just waited for it, and is about to say
        time.sleep(0.001)
    return ended_by(process.exitcode)


def ended_by(status: int) -> str:
    """What a status of a process says, that of a signal being negative.

    >>> ended_by(1), ended_by(-9), ended_by(-40)
    ('ended with status 1', 'was ended by SIGKILL', 'was ended by signal 40')
    """
    names = {number.value: number.name for number in signal.Signals}
    return f"ended with status {status}" if status >= 0 else f"was ended by {names.get(-status, f'signal {-status}')}"
