"""A liveness port: the kernel closes it as soon as the process is killed, whatever of it ends later.

```
killed ── its threads end: the port is closed ── its memory is freed ── the descriptors of the process are closed
          0.1 ms                                 a second and more      once children that it forked have ended, too
```

The port belongs to a thread that has a table of descriptors of its own. That thread runs no Python: garbage is
collected on any thread that does, and what it closed there would stay open in the process. So nobody accepts the
connections of others; the kernel has them wait, and resets them when the port is closed.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rankmesh.launch.address import family_of

__all__ = ["LivenessPort", "listens_here"]

# Of close_range(2): in a copy of the table, this thread's from now on. Containers that forbid unshare(2) allow it.
_UNSHARE = 2
_LAST = ctypes.c_uint(2**32 - 1)
# Connections that may wait, as far as the system allows it, and bytes that a semaphore has at most.
_BACKLOG, _SEMAPHORE = 4096, 64


class LivenessPort:
    """The port of this process, 0 where the system has no such table: Linux since 5.9, with glibc since 2.34."""

    def __init__(self, host: str) -> None:
        self.port = 0
        self._library = ctypes.CDLL(None)
        self._end, self._holder = ctypes.create_string_buffer(_SEMAPHORE), ctypes.c_ulong()
        if not hasattr(self._library, "close_range"):
            return
        self._library.sem_init(self._end, 0, 0)
        with socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG) as listening, _no_collection():
            started: list[bool] = []
            starts = threading.Thread(target=self._start, args=(listening.fileno(), started), name="rankmesh-liveness")
            starts.start()
            starts.join()
            if started:
                self.port = int(listening.getsockname()[1])

    def _start(self, port: int, started: list[bool]) -> None:
        """On a thread whose table has nothing but the port, start the one that holds it, in the same table."""
        create, waits, close = self._library.pthread_create, self._library.sem_wait, self._library.close_range
        create.argtypes = [ctypes.c_void_p] * 4
        how = ctypes.byref(self._holder), None, ctypes.cast(waits, ctypes.c_void_p), self._end
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a signal would end the wait
        if close(ctypes.c_uint(port + 1), _LAST, _UNSHARE) == 0:
            os.closerange(0, port)
            if create(*how) == 0:
                started.append(True)

    def close(self) -> None:
        """Close the port; calling it again is nothing."""
        if self.port:
            self._library.sem_post(self._end)
            self._library.pthread_join(self._holder, None)
            self.port = 0


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def listens_here(host: str, port: int) -> bool | None:
    """Return whether a process of this host listens at a port, as its kernel shows; None if the address is not its own.

    It sends nothing, so no firewall can answer: while a process listens there, the kernel lets no other bind the port.
    """
    with socket.socket(family_of(host), socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are being closed do not count
        try:
            one.bind((host, port))
        except OSError as error:
            return True if error.errno == errno.EADDRINUSE else None
    return False
