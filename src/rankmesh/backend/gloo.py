"""Gloo's process groups, made by their members: devices, connections, addresses in the store, and the cut of an abort.

```
eager connection   up to 16 members        one device for all such groups, all pairs connect when the group is made
lazy connection    more, or a lazy group   a device each, pairs connect when they first talk
```

A device is a socket that listens and a thread that polls it, with an epoll descriptor: in it the kernel lists the
connections of all groups on the device, which is how an abort finds them.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from rankmesh.backend.drain import ARRIVAL, LOOK, Drain
from rankmesh.backend.protocol import NotJoined
from rankmesh.rendezvous.channel import ChannelLost
from rankmesh.rendezvous.waiting import answered_within, submit, wait_for

__all__ = ["EAGER_SIZE", "PAIR_TIMEOUTS", "SNDBUFFORCE", "CutStore", "GlooDevices", "delete_address", "put_gloo_under"]

_Made = TypeVar("_Made")

# Groups up to this size connect all pairs when they are made; docs/decisions.md has the figures.
EAGER_SIZE = 16
# Seconds that a store may take to answer.
_PATIENCE = 5.0
# Gloo waits so many times as long for a pair to connect as a call of its group may take.
PAIR_TIMEOUTS = 5

# SOSNDBUFFORCE, which the socket module has no name for: beyond net.core.wmem_max, for who may administer the network.
SNDBUFFORCE, _BUFFER = 32, 2**30

# A connection on which nothing came for this share of the time that is left to wait has no message under way.
_STILL = 0.04
# Where struct tcp_info has the milliseconds since data came, tcpi_last_data_recv.
_LAST_RECEIVED = 52

_DESCRIPTORS = "/proc/self/fd"
_ONE_AT_A_TIME = threading.Lock()
# Gloo asks for it whenever it connects a group.
_TOGETHER = "GLOO_ENABLE_STORE_V2_API"


class GlooDevices:
    """The devices of one world.

    Groups that connect eagerly share a device. One that connects lazily needs its own: pairs then find each other by a
    number that counts inside one group, so two groups on one device would answer each other's calls.
    """

    def __init__(self, drain: Drain | None = None) -> None:
        # Before any thread of ours looks up a name: a variable that is added or removed moves all others in memory,
        # under whoever reads one. One that is there changes its value in place.
        os.environ.setdefault(_TOGETHER, "0")
        self._shared: list[Any] = []
        # What each epoll descriptor polled when its device was made: a pipe, and a socket that listens.
        self._polls: dict[int, frozenset[int]] = {}
        # The descriptors that were open when a call began that is observed.
        self._observed: list[dict[int, str]] = []
        # What reads on when connections are cut.
        self.drain = drain or Drain()
        self._cutting = threading.Lock()

    def of(self, *, lazily: bool) -> list[Any]:
        """The devices for one more group."""
        if lazily:
            return self._new(lazily=True)
        if not self._shared:
            self._shared = self._new(lazily=False)
        return self._shared

    def _new(self, *, lazily: bool) -> list[Any]:
        """On the interfaces that GLOO_SOCKET_IFNAME names, as for the world; else where the host's name points."""
        named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        gloo = c10d.ProcessGroupGloo
        makers = [partial(gloo.create_device, interface=name, lazy_init=lazily) for name in named]
        return [self._made(make) for make in makers or [partial(gloo.create_default_device, lazy_init=lazily)]]

    def _made(self, make: Callable[[], Any]) -> Any:
        """One device; its epoll descriptor has one of the lowest numbers that were free, or is searched for.

        One thread at a time: else the descriptor may be that of another world, whose connections would be cut as ours.
        """
        with _ONE_AT_A_TIME:
            free = _lowest_free()
            made = make()
            found = set(filter(_is_poll, free))
            if not found:
                before = _targets()
                made = make() if before else made
                found = _polls_since(before)
            self._keep(found)
        return made

    def _keep(self, polls: set[int]) -> None:
        for descriptor in polls:
            self._polls[descriptor] = frozenset(one.inode for one in _polled(descriptor))

    def observing(self, make: Callable[..., _Made]) -> Callable[..., _Made]:
        """The same function, which makes groups on devices of their own: they are cut as these, now and later."""

        @wraps(make)
        def observed(*args: Any, **named: Any) -> _Made:
            before = _targets()
            self._observed.append(before)
            try:
                return make(*args, **named)
            finally:
                self._keep(_polls_since(before))
                self._observed.remove(before)

        return observed

    def cut(self) -> None:
        """Have every call on these devices return, with an error where it waits for a member.

        A connection is cut when nothing is under way on it: gloo forgets a message of which it has sent or received a
        part, or that it cannot write, when its connection ends, and whoever waits for it waits for the timeout. So
        only what comes is ended here, and what others still send is read for a while.

        Returns once gloo has closed its ends: a device that goes away before, with the last group on it, leaves them
        polled while they are read here, and gloo ends the process where an event comes for a closed one.
        """
        for before in list(self._observed):  # a call that waits for its members
            self._keep(_polls_since(before))
        with self._cutting:
            end, all_ended = time.monotonic() + ARRIVAL, set[int]()
            while self._end_receives(end - time.monotonic(), all_ended):
                time.sleep(LOOK)
            end = time.monotonic() + ARRIVAL
            while not all_ended.isdisjoint(self._gloos()) and time.monotonic() < end:
                time.sleep(LOOK)

    def finish_cut(self) -> None:
        """Wait for a cut that another thread makes: groups are only destroyed after it."""
        with self._cutting:
            pass

    def _end_receives(self, left: float, all_ended: set[int]) -> bool:
        """End what comes on connections, but for those in use while seconds are left; whether there are such."""
        in_use, ended = False, {}
        for descriptor, listening in list(self._polls.items()):
            polled = _polled(descriptor)
            if listening.isdisjoint(one.inode for one in polled):  # the device is gone, and its number is another's
                continue
            for found in polled:
                one = _connection(found)
                if one is None:
                    continue
                _enlarge(one)
                if left > 0 and (found.waits_to_write or _comes(one, _STILL * left)) and _peer_port(one) is not None:
                    in_use = True
                    one.close()
                    continue
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RD)
                ended[found.inode] = one
        all_ended.update(ended)
        self.drain.take(ended, self._gloos)
        return in_use

    def _gloos(self) -> set[int]:
        """The connections that gloo still reads, by their inodes."""
        return {one.inode for descriptor in list(self._polls) for one in _polled(descriptor)}

    def release(self) -> None:
        """Keep no device; each ends with the last group on it."""
        self._shared = []
        self._polls.clear()


class CutStore:
    """A client of the store at an address whose calls can be ended from another thread.

    A call waits in torch for as long as the store takes, and has no way out but the end of its connection.
    """

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        before = _targets()
        self.store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        new = [(descriptor, _inode(descriptor)) for descriptor in _opened_since(before)]
        self._connections = [one for one in new if self._leads_to(port, *one)]

    @staticmethod
    def _leads_to(port: int, descriptor: int, inode: int) -> bool:
        one = _socket(descriptor, inode)
        if one is None:
            return False
        with one:
            return _peer_port(one) == port

    def cut(self) -> None:
        """End the connection: every call fails from now on."""
        for descriptor, inode in self._connections:
            one = _socket(descriptor, inode)
            if one is not None:
                with suppress(OSError), one:
                    one.shutdown(socket.SHUT_RDWR)


def _targets() -> dict[int, str]:
    """What each open descriptor is: a number alone may be another's by now, such as that of the folder just listed."""
    return {descriptor: _target(descriptor) for descriptor in _open_descriptors()}


def _opened_since(before: dict[int, str]) -> set[int]:
    """The descriptors that were not open before, or were something else."""
    return {descriptor for descriptor, _ in _targets().items() - before.items()}


def _polls_since(before: dict[int, str]) -> set[int]:
    """The epoll descriptors among them."""
    return set(filter(_is_poll, _opened_since(before)))


def _peer_port(one: socket.socket) -> int | None:
    """The port that a socket is connected to, None where it is not."""
    with suppress(OSError):
        return int(one.getpeername()[1]) if one.family in (socket.AF_INET, socket.AF_INET6) else None
    return None


def _lowest_free() -> list[int]:
    """The numbers that the next descriptors of this process get: a device has a pipe, an epoll and a socket."""
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    for descriptor in free:
        os.close(descriptor)
    return free


def _is_poll(descriptor: int) -> bool:
    return _target(descriptor).endswith("[eventpoll]")


def _open_descriptors() -> set[int]:
    try:
        return set(map(int, os.listdir(_DESCRIPTORS)))  # noqa: PTH208  - the descriptor that lists is no file
    except OSError:  # no Linux: nothing is cut here
        return set()


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"{_DESCRIPTORS}/{descriptor}")  # noqa: PTH115  - half the time of a Path
    except OSError:
        return ""


@dataclass(frozen=True)
class _Polled:
    """A descriptor that an epoll descriptor waits for, what it is by its inode, and whether to write there."""

    descriptor: int
    inode: int
    waits_to_write: bool


def _polled(poll: int) -> list[_Polled]:
    """What an epoll descriptor waits for."""
    try:
        lines = Path(f"/proc/self/fdinfo/{poll}").read_bytes().splitlines()
    except OSError:
        return []
    # tfd:       12 events:       1d data: ... pos:0 ino:61af sdev:7
    found = [line.split() for line in lines if line.startswith(b"tfd:")]
    return [
        _Polled(int(words[1]), int(words[-2].removeprefix(b"ino:"), 16), bool(int(words[3], 16) & select.EPOLLOUT))
        for words in found
    ]


def _inode(descriptor: int) -> int:
    """What an open descriptor is, by a number that no other has while it is open; 0 for a closed one."""
    with suppress(OSError):
        return os.fstat(descriptor).st_ino
    return 0


def _socket(descriptor: int, inode: int) -> socket.socket | None:
    """A descriptor of our own of the socket with this inode, to be closed; None for what is none.

    None also where the socket is closed by now, and its number another's. In no case does a copy stay open.
    """
    with suppress(OSError):
        copy = os.dup(descriptor)
        try:
            if _inode(copy) == inode:
                return socket.socket(fileno=copy)
        except OSError:  # no socket
            pass
        os.close(copy)
    return None


def _connection(polled: _Polled) -> socket.socket | None:
    """A descriptor of our own of a connection, to be closed; None for what listens, is no socket, or is closed."""
    one = _socket(polled.descriptor, polled.inode)
    if one is None:
        return None
    if one.type == socket.SOCK_STREAM and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return one
    one.close()
    return None


def _enlarge(one: socket.socket) -> None:
    """Let the kernel take whatever is written, as far as it allows that: so a message is not under way for long."""
    with suppress(OSError):
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < _BUFFER:
            one.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, _BUFFER)


def _comes(one: socket.socket, within: float) -> bool:
    """Whether a connection has something to read, or had within the last seconds."""
    with suppress(OSError):  # nothing to read
        if one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return True
    with suppress(OSError):  # what is not TCP
        (ago,) = struct.unpack_from("I", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), _LAST_RECEIVED)
        return bool(ago < 1000 * within)
    return False


def put_gloo_under(
    pg: dist.ProcessGroup,
    devices: GlooDevices,
    store: Any,
    *,
    ranks: Sequence[int],
    rank: int,
    name: str,
    timeout: timedelta,
    within: timedelta,
    eager_size: int | None = None,
    lazy: bool,
    device_types: Sequence[str],
) -> Any:
    """Put gloo under a process group, whose pairs connect now or when they first talk; the backend that was made.

    ``within`` is how long members that connect now, or that ask for a ``lazy`` group, wait for each other; those of a
    group of more than ``eager_size`` connect when they first talk, for which gloo waits up to ``PAIR_TIMEOUTS`` times
    ``timeout``. Raises ``NotJoined`` when a member does not join.
    """
    end = time.monotonic() + within.total_seconds()
    lazily = lazy or len(ranks) > (eager_size or EAGER_SIZE)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._devices, options._threads = devices.of(lazily=lazily), 1
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    addresses = _addresses(store)
    try:
        with _read_together(store, within):
            # On a thread, which is left behind where a member has died meanwhile: gloo waits PAIR_TIMEOUTS for it.
            making = submit(partial(c10d.ProcessGroupGloo, addresses, rank, len(ranks), options), "rankmesh-gloo")
            made = answered_within(making, within.total_seconds())
        keys = [f"0/{position}" for position in range(len(ranks))]
        left = max(end - time.monotonic(), 0.0)
        # So that one that never comes is named here, not at some later collective.
        if lazy and not _asked(partial(wait_for, addresses, keys, left), left):
            raise NotJoined(f"not all of its members asked for it within {within.total_seconds():.3g} s", ())
    except ChannelLost as error:
        reason = f"not all of its members have connected within {within.total_seconds():.3g} s"
        raise NotJoined(reason, _seen(addresses, ranks)) from error
    except RuntimeError as error:
        raise NotJoined(str(error), _seen(addresses, ranks)) from error
    made._set_default_timeout(timeout)
    for device_type in device_types:
        pg._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.GLOO, made)
    return made


def _addresses(store: Any) -> Any:
    """Where the members of a group write their addresses, in the group's part of the world's store."""
    return PrefixStore("gloo/", store)


@contextmanager
def _read_together(store: Any, within: timedelta) -> Iterator[None]:
    """Have gloo read the addresses of all members with one operation, where the store can give them so.

    A store that is asked for many keys waits as long as it waits by default, so this is the limit meanwhile.
    """
    before, asks = store.timeout, os.environ.get(_TOGETHER, "0") == "0"
    if asks:
        os.environ[_TOGETHER] = "1"
    store.set_timeout(within)
    try:
        yield
    finally:
        store.set_timeout(before)
        if asks:
            os.environ[_TOGETHER] = "0"


def _seen(addresses: Any, ranks: Sequence[int]) -> tuple[int, ...]:
    """The members whose addresses are in the store; none where the store does not answer."""
    try:
        return _asked(lambda: tuple(rank for place, rank in enumerate(ranks) if addresses.check([f"0/{place}"])))
    except RuntimeError:
        return ()


def delete_address(store: Any, position: int) -> bool:
    """Delete the address under which a member of a gloo group was found; whether the store answered."""
    try:
        _asked(lambda: _addresses(store).delete_key(f"0/{position}"))
    except RuntimeError:
        return False
    return True


def _asked(call: Callable[[], _Made], seconds: float = 0.0) -> _Made:
    """Return what a call of a store gives that takes so many seconds; ``ChannelLost`` where it takes longer."""
    return answered_within(submit(call, "rankmesh-store"), seconds + _PATIENCE)
