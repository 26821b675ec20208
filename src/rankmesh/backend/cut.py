"""Cut gloo's connections, so that whoever waits in a call of gloo returns with an error: gloo itself has no abort.

```
device     a thread that polls an epoll descriptor: a socket that listens, and the connections of its groups
address    where that socket listens; gloo publishes it in the store of a group
cut        the connections of each epoll descriptor that polls a socket at a published address
drain      what the members still send on them is read, so that they are through
```

Only gloo polls the socket that listens there, so no connection of anybody else is cut.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["SNDBUFFORCE", "Drain", "cut", "duplicate_of"]

# Seconds that messages under way have to arrive, those while something still comes, and those between two looks.
_ARRIVAL, _LONGEST, _LOOK = 0.5, 2.0, 0.002
# A connection on which nothing arrived for this share of the time that is left to arrive has no message under way; so
# many times that where as many threads share a processor, since the sender may be in the middle of one.
_STILL, _MOST = 0.04, 10.0
# Where struct tcp_info has the milliseconds since data and since an acknowledgement arrived: tcpi_last_data_recv and
# tcpi_last_ack_recv.
_LAST_RECEIVED = 52
# SO_SNDBUFFORCE, which the socket module does not name: beyond net.core.wmem_max, for who may administer the network.
SNDBUFFORCE, _BUFFER = 32, 2**30
# Bytes between port and address in struct sockaddr_in and sockaddr_in6.
_FLOW = {socket.AF_INET: 0, socket.AF_INET6: 4}
# Seconds that a cut connection is read, as others may learn later of the abort, and the bytes of one read.
_KEPT, _BYTES = 2.0, 1 << 20
# Seconds between two looks at whether all is over, where nothing comes.
_IDLE = 0.05


def cut(published: Collection[bytes], drain: Drain) -> None:
    """Have every call on the devices at these addresses return, with an error where it waits for a member.

    A connection is cut when nothing is under way on it: gloo forgets a message of which it has sent or received a
    part, or that it cannot write, when its connection ends, and whoever waits for it waits for the timeout. So
    only what arrives is ended here, and ``drain`` reads for a while what others still send.

    Returns once gloo has closed its ends: a device that goes away before, with the last group on it, leaves them
    polled while they are read here, and gloo ends the process where an event arrives for a closed one.
    """
    devices, ended = _devices(published), set[int]()
    began, in_use = time.monotonic(), True
    still = _STILL * min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), _MOST)
    while in_use:
        found = {inode: one for inode, one in _connections(devices).items() if inode not in ended}
        in_use, cut_now = _end_receives(found, time.monotonic() - began, still)
        ended |= cut_now.keys()
        drain.take(cut_now, lambda: _connections(devices).keys())
        time.sleep(_LOOK)
    end = time.monotonic() + _ARRIVAL
    while not ended.isdisjoint(_connections(devices)) and time.monotonic() < end:
        time.sleep(_LOOK)


class _Polled(NamedTuple):
    """A descriptor that an epoll descriptor polls, the inode of its file, and whether it waits to write."""

    descriptor: int
    inode: int
    waits_to_write: bool


def _devices(published: Collection[bytes]) -> dict[int, int]:
    """Find the devices at these addresses: epoll descriptors, and the inodes of the sockets that listen."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")] if published else []  # noqa: PTH208
    except OSError:  # not Linux: nothing is cut
        descriptors = []
    polled = ((poll, one) for poll in descriptors for one in _polled(poll))
    return {poll: one.inode for poll, one in polled if _listens_at(one, published)}


def _polled(descriptor: int) -> list[_Polled]:
    """Return the descriptors that an epoll descriptor polls; none for another kind of descriptor."""
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_bytes().splitlines()
    except OSError:
        return []
    # tfd:       12 events:       1d data: ... pos:0 ino:61af sdev:7
    found = [line.split() for line in lines if line.startswith(b"tfd:")]
    return [
        _Polled(int(words[1]), int(words[-2].removeprefix(b"ino:"), 16), bool(int(words[3], 16) & select.EPOLLOUT))
        for words in found
    ]


def _connections(devices: Mapping[int, int]) -> dict[int, _Polled]:
    """Return the other descriptors that devices poll, by inode, without closed ones, whose numbers may be reused."""
    found = [(listening, {one.inode: one for one in _polled(poll)}) for poll, listening in devices.items()]
    there = {inode: one for listening, polled in found if listening in polled for inode, one in polled.items()}
    return {inode: one for inode, one in there.items() if inode not in devices.values()}


def _listens_at(polled: _Polled, published: Collection[bytes]) -> bool:
    """Return whether this is a socket that listens at one of the addresses, each in a ``struct sockaddr``."""
    with suppress(OSError), duplicate_of(polled.descriptor, polled.inode) or nullcontext() as one:
        if one and one.family in _FLOW and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = one.getsockname()[:2]
            head = struct.pack("=H", one.family) + struct.pack("!H", port) + bytes(_FLOW[one.family])
            packed = head + socket.inet_pton(one.family, host.partition("%")[0])
            return any(packed in each for each in published)
    return False


def _end_receives(found: Mapping[int, _Polled], waited: float, still: float) -> tuple[bool, dict[int, socket.socket]]:
    """Shut connections for reading, but for those in use after these seconds; return whether any is, and those shut."""
    in_use, ended = False, {}
    for inode, polled in found.items():
        one = duplicate_of(polled.descriptor, inode)
        if one is None:
            continue
        with suppress(OSError):  # what is written is then under way for a shorter time, where this is permitted
            one.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, _BUFFER)
        if _is_in_use(one, polled.waits_to_write, waited, still):
            in_use = True
            one.close()
        else:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RD)
            ended[inode] = one
    return in_use, ended


def _is_in_use(one: socket.socket, waits_to_write: bool, waited: float, still: float) -> bool:
    """Return whether a message is under way (written, to be read, or about to be), and still moves in the end."""
    with suppress(OSError):
        one.getpeername()  # raises where it is not connected
        known = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        received, acknowledged = (ago / 1000 for ago in struct.unpack_from("II", known, _LAST_RECEIVED))
        if waited < (_LONGEST if acknowledged < _ARRIVAL else _ARRIVAL):
            within = still * (_ARRIVAL - waited)
            return waits_to_write or received < within or bool(one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


class Drain:
    """Reads for a while from connections that were cut here, so that members who still send are through."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._readers: list[threading.Thread] = []

    def take(self, ended: Mapping[int, socket.socket], polled: Callable[[], Collection[int]]) -> None:
        """Own these connections, by their inodes, and close them in the end; ``polled`` are those that gloo reads."""
        if ended:
            reader = threading.Thread(target=self._read, args=(ended, polled), daemon=True, name="rankmesh-drain")
            self._readers = [other for other in self._readers if other.is_alive()] + [reader]
            reader.start()

    def _read(self, ended: Mapping[int, socket.socket], polled: Callable[[], Collection[int]]) -> None:
        end, waste, gloos, came = time.monotonic() + _KEPT, bytearray(_BYTES), set(ended), set[socket.socket]()
        by_number = {one.fileno(): one for one in ended.values()}
        with select.epoll() as poll:
            while (left := end - time.monotonic()) > 0 and not self._over.is_set():
                for inode in gloos.difference(polled()) if gloos else ():
                    gloos.remove(inode)
                    poll.register(ended[inode], select.EPOLLIN | select.EPOLLET)  # whenever something comes, and now
                pause = 0.0 if came else _LOOK if gloos else _IDLE
                came.update(by_number[number] for number, _ in poll.poll(min(left, pause)))
                came = {one for one in came if not _is_emptied(one, waste)}
        for one in ended.values():
            one.close()

    def close(self) -> None:
        """Close all of them; no thread is left."""
        self._over.set()
        for reader in self._readers:
            reader.join()


def _is_emptied(one: socket.socket, into: bytearray) -> bool:
    """Read the bytes that a connection has now; return whether none are left."""
    with suppress(OSError):
        return not one.recv_into(into, flags=socket.MSG_DONTWAIT)
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
