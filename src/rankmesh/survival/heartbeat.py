"""Heartbeats: whether a process lives, and short messages between processes, over connections of their own.

```
member 3 ──ping──> member 4        a reply: alive      closed or refused: gone      no reply in time: unresponsive
         <─reply──
```

Each member listens at a port. One message is one line of JSON, and so is its reply, which a thread gives: a process
replies while it computes or waits in a collective, not while it is stopped. A connection that is refused, there or at
the process's liveness port, shows that the process has ended, as long as its host lives; a silence shows nothing.
"""

from __future__ import annotations

import errno
import json
import math
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from rankmesh.survival.liveness import LivenessPort

__all__ = ["PING", "Address", "Heartbeat", "Message", "Presence", "exchange"]

Message = dict[str, Any]
Presence = Literal["gone", "unresponsive"]


class Address(NamedTuple):
    """Where a process replies, and its liveness port, 0 for none."""

    host: str
    port: int
    liveness: int = 0


PING: Message = {"what": "ping"}
# Bytes of one message: the members of 100,000 ranks fit.
_LARGEST = 1 << 20
# Errors of a connection that say that nobody listens any more.
_ENDED = (errno.ECONNREFUSED, errno.ECONNRESET)
# Seconds without a reply after which the liveness port is looked at: seldom, since nobody accepts what connects there.
_SLOW = 0.05
# Connections that one process opens at a time.
_AT_ONCE = 256
# Of a timeout, and seconds at most: how often a member is pinged.
_SHARE, _SELDOM = 10, 0.5
# Seconds until a process that is gone counts as lost. Others may be about to end a step that it has ended, which they
# can without it: interrupted, all would do that step again.
_SKEW = 0.05


class Heartbeat:
    """This process as others see it: a thread that replies, and one that pings another member.

    ``reply`` is called for each message, on that thread, and returns the reply at once.
    """

    def __init__(self, host: str, reply: Callable[[Message], Message]) -> None:
        self._watch: _Watch | None = None
        self._looked, self._longest = time.monotonic(), 0.0
        self._over = threading.Event()
        with ExitStack() as made:
            listening = made.enter_context(socket.create_server((host, 0), backlog=1024))
            self._liveness = LivenessPort(host)
            made.pop_all()
        self.port = int(listening.getsockname()[1])
        self._wake, woken = socket.socketpair()
        served = _Served(woken, listening, reply)
        self._thread = threading.Thread(target=self._run, args=(served,), daemon=True, name="rankmesh-heartbeat")
        self._thread.start()

    @property
    def liveness(self) -> int:
        """The liveness port of this process, 0 for none."""
        return self._liveness.port

    def stood_still(self) -> float:
        """The longest time, in seconds, that this process gave no reply, since ``start_over``."""
        return max(self._longest, time.monotonic() - self._looked - _SELDOM)

    def start_over(self) -> None:
        """Count anew how long this process stood still."""
        self._longest = 0.0

    def _run(self, served: _Served) -> None:
        with served:
            try:
                self._serve(served)
            except Exception:  # noqa: BLE001 - connections that close would say that the process has ended
                traceback.print_exc()
                self._over.wait()

    def _serve(self, served: _Served) -> None:
        going_on = True
        while going_on:
            events = served.wait()
            self._longest = self.stood_still()
            self._looked = time.monotonic()
            going_on = served.handle(events)

    def watch(
        self, address: Address, timeout: float, late: Callable[[], object], lost: Callable[[Presence], None]
    ) -> None:
        """Ping the process at an address from now on, instead of the one before; ``lost`` is called at most once.

        ``late`` is called shortly before the end of ``timeout`` seconds without a reply.
        """
        self.unwatch()
        self._watch = _Watch(address, timeout, late, lost)
        threading.Thread(target=self._watch.run, daemon=True, name="rankmesh-heartbeat-watch").start()

    def unwatch(self) -> None:
        """Ping nobody."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = None

    def close(self) -> None:
        """Reply no more, and ping nobody; calling it again is nothing."""
        self.unwatch()
        if self._over.is_set():
            return
        self._over.set()
        with suppress(OSError):  # it may have ended
            self._wake.send(b".")
        self._thread.join(1)
        self._wake.close()
        self._liveness.close()


class _Served:
    """The connections on which others send messages, until something comes on ``wake``."""

    def __init__(self, wake: socket.socket, listening: socket.socket, reply: Callable[[Message], Message]) -> None:
        self._wake, self._listening, self._reply = wake, listening, reply
        self._partial: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for one in (self._wake, self._listening, *self._partial):
            one.close()

    def wait(self) -> list[Any]:
        """Wait for what comes, or a while: where something can be read."""
        return [key.fileobj for key, _ in self._selector.select(_SELDOM)]

    def handle(self, readable: Iterable[Any]) -> bool:
        """Read from these, and reply; whether it goes on."""
        for one in readable:
            if one is self._wake:
                return False
            if one is self._listening:
                self._accept()
            elif not self._answered(one):
                self._selector.unregister(one)
                self._partial.pop(one, None)
                one.close()
        return True

    def _accept(self) -> None:
        with suppress(OSError):
            accepted = self._listening.accept()[0]
            accepted.settimeout(1.0)
            self._partial[accepted] = b""
            self._selector.register(accepted, selectors.EVENT_READ)

    def _answered(self, one: socket.socket) -> bool:
        """Read what there is, and reply to it; whether the connection goes on."""
        with suppress(OSError, ValueError, RecursionError):
            read = one.recv(1 << 16)
            *lines, rest = (self._partial[one] + read).split(b"\n")
            self._partial[one] = rest
            for line in lines:
                message = json.loads(line)
                if not isinstance(message, dict):
                    return False
                one.sendall(_line(self._reply_to(message)))
            return bool(read) and len(rest) < _LARGEST
        return False

    def _reply_to(self, message: Message) -> Message:
        """The reply, an empty one where making it fails: silence, or a connection that closes, would show an end."""
        try:
            return self._reply(message)
        except Exception:  # noqa: BLE001  - whatever it is, this process lives
            traceback.print_exc()
            return {}


@dataclass
class _Watch:
    """One member that is pinged."""

    address: Address
    timeout: float
    late: Callable[[], object]
    lost: Callable[[Presence], None]
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        presence = self._presence()
        if presence == "gone":
            self._stopped.wait(_SKEW)
        if presence is not None and not self._stopped.is_set():
            self.lost(presence)

    def stop(self) -> None:
        self._stopped.set()

    def _presence(self) -> Presence | None:
        """What ends the watch; None where it was stopped."""
        interval = min(self.timeout / _SHARE, _SELDOM)
        try:
            with _Watched(self.address, self.timeout) as one:
                replied = time.monotonic()
                while not self._stopped.is_set():
                    one.connection.sendall(_line(PING))
                    if not self._replied(one, replied + self.timeout):
                        return "unresponsive"
                    replied = time.monotonic()
                    if one.is_readable(interval):  # nothing is owed: the other end has closed
                        return "gone"
        except TimeoutError:
            return "unresponsive"
        except ConnectionError:
            return "gone"
        except OSError:
            return "unresponsive"
        return None

    def _replied(self, one: _Watched, end: float) -> bool:
        """Whether a reply comes in time; also where the watch is stopped meanwhile."""
        soon = end - min(1.0, self.timeout / 4)
        if not one.is_readable(soon - time.monotonic()):
            if self._stopped.is_set():
                return True
            self.late()
            if not one.is_readable(end - time.monotonic()):
                return False
        if not one.connection.recv(1 << 16):
            raise ConnectionResetError
        return True


class _Watched:
    """A connection to a process, and one to its liveness port, as far as it has one that can be reached."""

    def __init__(self, address: Address, timeout: float) -> None:
        with ExitStack() as opened:
            self.connection = opened.enter_context(socket.create_connection(address[:2], timeout))
            self._liveness: socket.socket | None = None
            if address.liveness:
                self._liveness, error = _begun(address.host, address.liveness)
                opened.enter_context(self._liveness)
                if error in _ENDED:
                    raise ConnectionResetError
            self._opened = opened.pop_all()

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def is_readable(self, seconds: float) -> bool:
        """Whether something comes from the process; ``ConnectionResetError`` where its liveness port shows its end."""
        end = time.monotonic() + seconds
        with selectors.PollSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            if self._liveness is not None:
                selector.register(self._liveness, selectors.EVENT_READ)
            while found := [key.fileobj for key, _ in selector.select(max(end - time.monotonic(), 0))]:
                if self._liveness in found:
                    if _has_ended(self._liveness):
                        raise ConnectionResetError
                    selector.unregister(self._liveness)
                    self._liveness = None  # it cannot be reached
                if self.connection in found:
                    return True
        return False


def _begun(host: str, port: int) -> tuple[socket.socket, int]:
    """A connection that does not wait, and the error so far."""
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    one.setblocking(False)
    error = one.connect_ex((host, port))
    return one, 0 if error == errno.EINPROGRESS else error


def _has_ended(liveness: socket.socket) -> bool:
    """Whether what came of a connection to a liveness port shows that its process has ended."""
    if error := liveness.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return error in _ENDED
    try:
        return not liveness.recv(1)
    except OSError as failed:
        return failed.errno in _ENDED


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def exchange(addresses: Mapping[int, Address], message: Message, seconds: float) -> dict[int, Message | Presence]:
    """Send a message to several members at once: the reply of each within so many seconds, or why there is none."""
    members, found = list(addresses), dict[int, Message | Presence]()
    for start in range(0, len(members), _AT_ONCE):
        some = {member: addresses[member] for member in members[start : start + _AT_ONCE]}
        found.update(_exchange(some, _line(message), time.monotonic() + seconds))
    return found


def _exchange(addresses: Mapping[int, Address], line: bytes, end: float) -> Iterable[tuple[int, Message | Presence]]:
    found: dict[int, Message | Presence] = {}
    look_at = time.monotonic() + _SLOW
    with ExitStack() as opened, selectors.PollSelector() as selector:

        def begin(member: int, port: int, call: Callable[[int, socket.socket], _Call | _Look]) -> int:
            one, error = _begun(addresses[member].host, port)
            opened.enter_context(one)
            if not error:
                selector.register(one, selectors.EVENT_WRITE, call(member, one))
            return error

        for member, address in addresses.items():
            if error := begin(member, address.port, partial(_Call, line)):
                # Another error, such as that no route leads there, shows nothing.
                found[member] = "gone" if error in _ENDED else "unresponsive"
        while len(found) < len(addresses) and (now := time.monotonic()) < end:
            for key, _ in selector.select(max(min(end, look_at) - now, 0)):
                call: _Call | _Look = key.data
                if (presence := call.go_on()) is None:
                    selector.modify(call.connection, selectors.EVENT_READ, call)
                    continue
                selector.unregister(call.connection)
                if presence != "open":
                    found.setdefault(call.member, presence)
            if time.monotonic() >= look_at:
                look_at = math.inf
                for member in [one for one in addresses if addresses[one].liveness and one not in found]:
                    if begin(member, addresses[member].liveness, _Look) in _ENDED:
                        found[member] = "gone"
    return {member: found.get(member, "unresponsive") for member in addresses}.items()


@dataclass
class _Call:
    """One message on its way."""

    line: bytes
    member: int
    connection: socket.socket
    sent: bool = False
    read: bytes = b""

    def go_on(self) -> Message | Presence | None:
        """Send, or read on; the reply, or why there is none; None as long as one may come."""
        one = self.connection
        try:
            if not self.sent:
                error = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, "")
                one.sendall(self.line)
                self.sent = True
                return None
            read = one.recv(1 << 16)
            self.read += read
            if not read or len(self.read) > _LARGEST:
                return "gone"
            reply = json.loads(self.read) if self.read.endswith(b"\n") else None
            return reply if reply is None or isinstance(reply, dict) else "unresponsive"
        except ConnectionError:
            return "gone"
        except (OSError, ValueError, RecursionError):
            return "unresponsive"


@dataclass
class _Look:
    """A look whether a liveness port is still open."""

    member: int
    connection: socket.socket

    def go_on(self) -> Literal["gone", "open"]:
        """What the end of the attempt to connect shows."""
        return "gone" if self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ENDED else "open"
