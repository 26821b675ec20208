"""Connections that an abort cut: kept open for a while, and read, so that whoever still sends there is through."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

__all__ = ["ARRIVAL", "LOOK", "Drain", "duplicate_of"]

# Seconds that messages under way have to arrive, and seconds between two looks at them.
ARRIVAL, LOOK = 0.5, 0.002
# Seconds that a connection is kept: others may hear later of the abort.
_KEPT = 2.0
_BYTES, _READS = 1 << 20, 16
# Seconds between two looks at whether all is over, where nothing comes.
_IDLE = 0.05


class Drain:
    """Reads what members send on connections of which their peer has cut its end."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._kept: set[int] = set()
        self._readers: list[threading.Thread] = []

    def take(self, ended: Mapping[int, socket.socket], polled: Callable[[], Collection[int]]) -> None:
        """Own these connections, by their inodes, and close them in the end; ``polled`` are those that gloo reads."""
        new = {what: one for what, one in ended.items() if what not in self._kept and not self._over.is_set()}
        for what, one in ended.items():
            if what not in new:
                one.close()
        if new:
            self._kept |= new.keys()
            reader = threading.Thread(target=self._read, args=(new, polled), daemon=True, name="rankmesh-drain")
            self._readers = [other for other in self._readers if other.is_alive()] + [reader]
            reader.start()

    def _read(self, ended: Mapping[int, socket.socket], polled: Callable[[], Collection[int]]) -> None:
        end, waste, pause = time.monotonic() + _KEPT, bytearray(_BYTES), LOOK
        known = {one.fileno(): what for what, one in ended.items()}
        gloos, came = set(ended), set[int]()
        with select.epoll() as poll:
            for number in known:
                poll.register(number, select.EPOLLIN | select.EPOLLET)  # once at first, then whenever something comes
            while (left := end - time.monotonic()) > 0 and not self._over.is_set():
                came.update(known[number] for number, _ in poll.poll(min(left, pause if came else _IDLE)))
                pause = min(2 * pause, 10 * LOOK) if came else LOOK
                if not gloos.isdisjoint(came):
                    gloos.intersection_update(polled())
                came = {what for what in came if what in gloos or not _is_emptied(ended[what], waste)}
        for what, one in ended.items():
            one.close()
            self._kept.discard(what)

    def close(self) -> None:
        """Close all of them, now and from now on; no thread is left."""
        self._over.set()
        for reader in self._readers:
            reader.join()


def _is_emptied(one: socket.socket, into: bytearray) -> bool:
    """Read what a connection has now; whether that was all."""
    with suppress(OSError):
        return any(not one.recv_into(into, flags=socket.MSG_DONTWAIT) for _ in range(_READS))
    return True


def duplicate_of(descriptor: int, inode: int) -> socket.socket | None:
    """Return a descriptor of our own of the socket with this inode, to be closed.

    None where the descriptor is not a socket, or is another's by now. In no case does a copy stay open.
    """
    with suppress(OSError):
        copy = os.dup(descriptor)
        try:
            if os.fstat(copy).st_ino == inode:
                return socket.socket(fileno=copy)
        except OSError:  # not a socket
            pass
        os.close(copy)
    return None
