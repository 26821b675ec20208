"""A client of torch's store whose calls can be ended from another thread."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.cut import duplicate_of

__all__ = ["CutStore"]


class CutStore:
    """A client of the store at a numeric address whose calls can be ended from another thread.

    A call waits in torch for as long as the store takes, and has no way out but the end of its connection.
    """

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        before = _sockets()
        self.store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._connections = [one for one in _sockets() - before if _leads_to(_place(host, port), *one)]

    def cut(self) -> None:
        """End the connection: every call fails from now on."""
        for descriptor, inode in self._connections:
            one = duplicate_of(descriptor, inode)
            if one is not None:
                with suppress(OSError), one:
                    one.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[tuple[int, int]]:
    """Return the sockets that are open, with their inodes."""
    found = set()
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            target = str(path.readlink())
            if target.startswith("socket:["):
                found.add((int(path.name), int(target[8:-1])))
    return found


def _place(host: str, port: int) -> tuple[IPv4Address | IPv6Address, int]:
    """Return the address that a socket is connected to, as IPv4 if IPv6 only wraps it."""
    address = ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, port


def _leads_to(place: tuple[IPv4Address | IPv6Address, int], descriptor: int, inode: int) -> bool:
    """Return whether a socket leads to a place; another thread may have connected to this port of another host."""
    one = duplicate_of(descriptor, inode)
    if one is None:
        return False
    with one, suppress(OSError):
        return one.family in (socket.AF_INET, socket.AF_INET6) and _place(*one.getpeername()[:2]) == place
    return False
