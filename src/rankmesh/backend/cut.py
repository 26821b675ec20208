"""Cut gloo's connections, so that whoever waits in a call of gloo returns with an error: gloo itself has no abort.

```
device     a thread that polls an epoll descriptor: a socket that listens, and the connections of its groups
address    where that socket listens; gloo publishes it in the store of a group
cut        the connections of each epoll descriptor that polls a socket at a published address
```

Only gloo polls the socket that listens there, so no connection of anybody else is cut.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from rankmesh.backend.drain import ARRIVAL, LOOK, Drain, duplicate_of

__all__ = ["SNDBUFFORCE", "cut"]

# A connection on which nothing arrived for this share of the time that is left to wait has no message under way.
_STILL = 0.04
# Where struct tcp_info has the milliseconds since data arrived, tcpi_last_data_recv.
_LAST_RECEIVED = 52
# SO_SNDBUFFORCE, which the socket module does not name: beyond net.core.wmem_max, for who may administer the network.
SNDBUFFORCE, _BUFFER = 32, 2**30
# Bytes between port and address in struct sockaddr_in and sockaddr_in6.
_FLOW = {socket.AF_INET: 0, socket.AF_INET6: 4}


def cut(published: Collection[bytes], drain: Drain) -> None:
    """Have every call on the devices at these addresses return, with an error where it waits for a member.

    A connection is cut when nothing is under way on it: gloo forgets a message of which it has sent or received a
    part, or that it cannot write, when its connection ends, and whoever waits for it waits for the timeout. So
    only what arrives is ended here, and ``drain`` reads for a while what others still send.

    Returns once gloo has closed its ends: a device that goes away before, with the last group on it, leaves them
    polled while they are read here, and gloo ends the process where an event arrives for a closed one.
    """
    devices = _devices(published)
    end, all_ended, in_use = time.monotonic() + ARRIVAL, set[int](), True
    while in_use:
        in_use, ended = _end_receives(devices, end - time.monotonic())
        all_ended.update(ended)
        drain.take(ended, lambda: _connections(devices).keys())
        time.sleep(LOOK)
    end = time.monotonic() + ARRIVAL
    while not all_ended.isdisjoint(_connections(devices)) and time.monotonic() < end:
        time.sleep(LOOK)


class _Polled(NamedTuple):
    """A descriptor that an epoll descriptor polls, what it is by its inode, and whether to write there."""

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
    """Return what an epoll descriptor polls; nothing for another kind of descriptor."""
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
    """Return what devices poll besides, by inode; nothing for one that is gone, as its number may be another's."""
    found = [(listening, {one.inode: one for one in _polled(poll)}) for poll, listening in devices.items()]
    there = {inode: one for listening, polled in found if listening in polled for inode, one in polled.items()}
    return {inode: one for inode, one in there.items() if inode not in devices.values()}


def _listens_at(polled: _Polled, published: Collection[bytes]) -> bool:
    """Whether this is a socket that listens at one of the addresses, each in a ``struct sockaddr``."""
    with suppress(OSError), duplicate_of(polled.descriptor, polled.inode) or nullcontext() as one:
        if one and one.family in _FLOW and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = one.getsockname()[:2]
            head = struct.pack("=H", one.family) + struct.pack("!H", port) + bytes(_FLOW[one.family])
            packed = head + socket.inet_pton(one.family, host.partition("%")[0])
            return any(packed in each for each in published)
    return False


def _end_receives(devices: Mapping[int, int], left: float) -> tuple[bool, dict[int, socket.socket]]:
    """End what arrives on connections, except on those in use while seconds are left; whether there are such."""
    in_use, ended = False, {}
    for inode, polled in _connections(devices).items():
        one = duplicate_of(polled.descriptor, inode)
        if one is None:
            continue
        with suppress(OSError):  # what is written is then under way for a shorter time, where this is permitted
            one.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, _BUFFER)
        if left > 0 and _is_in_use(one, polled.waits_to_write, _STILL * left):
            in_use = True
            one.close()
        else:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RD)
            ended[inode] = one
    return in_use, ended


def _is_in_use(one: socket.socket, waits_to_write: bool, within: float) -> bool:
    """Whether a connection waits to write, has something to read, or had within the last seconds."""
    with suppress(OSError):
        one.getpeername()  # raises where it is not connected
        (ago,) = struct.unpack_from("I", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), _LAST_RECEIVED)
        return waits_to_write or ago < 1000 * within or bool(one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False
