"""Heartbeats: whether a process lives, and short messages between processes, over connections of their own.

```
member 3 ──ping──> member 4        a reply: alive      closed or refused: gone      no reply in time: unresponsive
         <─reply──
```

Each member listens at a port. One message is one line of JSON, and so is its reply, which a thread gives: a process
replies while it computes or waits in a collective, not while it is stopped. A connection that is refused shows that the
process has ended, as long as its host lives; a silence shows nothing.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal

from rankmesh.survival.descriptors import separate

__all__ = ["PING", "Address", "Heartbeat", "Message", "Presence", "exchange"]

Address = tuple[str, int]
Message = dict[str, Any]
Presence = Literal["gone", "unresponsive"]

PING: Message = {"what": "ping"}
# Bytes of one message: the members of 100,000 ranks fit.
_LARGEST = 1 << 20
# Connections that one process opens at a time.
_AT_ONCE = 256
# Of a timeout, and seconds at most: how often a member is pinged.
_SHARE, _SELDOM = 10, 0.5
# Seconds until a process that is gone counts as lost. Others may be about to end a step that it has ended, which they
# can without it: interrupted, all would do that step again.
_SKEW = 0.05


class Heartbeat:
    """This process as others see it: a thread that replies, and one that pings another member.

    ``reply`` is called for each message, on a thread of its own, and returns the reply at once. The connections are
    closed as soon as the process is killed, where the system allows that (`descriptors`).
    """

    def __init__(self, host: str, reply: Callable[[Message], Message]) -> None:
        self._replies = _Replies(reply)
        self._watch: _Watch | None = None
        self._looked, self._longest = time.monotonic(), 0.0
        self._over = threading.Event()
        self._wake, woken = socket.socketpair()
        number, self._separated, port = woken.detach(), False, Future[int]()
        self._thread = threading.Thread(
            target=self._run, args=(host, number, port), daemon=True, name="rankmesh-heartbeat"
        )
        self._thread.start()
        try:
            self.port = port.result()
        except OSError:
            self.close()
            raise
        finally:
            if self._separated:  # the thread has it, too
                os.close(number)

    def stood_still(self) -> float:
        """The longest time, in seconds, that this process gave no reply, since ``start_over``."""
        return max(self._longest, time.monotonic() - self._looked - _SELDOM)

    def start_over(self) -> None:
        """Count anew how long this process stood still."""
        self._longest = 0.0

    def _run(self, host: str, woken: int, port: Future[int]) -> None:
        """Serve until it is woken. No other thread touches a socket of this one, whose numbers are its own."""
        self._separated = separate(woken)
        with socket.socket(fileno=woken) as wake:
            try:
                listening = socket.create_server((host, 0), backlog=1024)
            except OSError as error:
                port.set_exception(error)
                return
            with listening, _Served(wake, listening, self._replies) as served:
                port.set_result(int(listening.getsockname()[1]))
                try:
                    self._serve(served)
                except Exception:  # noqa: BLE001 - connections that close would say that the process has ended
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
        self._replies.close()
        self._wake.close()


class _Replies:
    """Makes the replies, on a thread that has the descriptors of the process: so what a reply starts has them, too."""

    def __init__(self, reply: Callable[[Message], Message]) -> None:
        self._reply = reply
        self._asked: SimpleQueue[Message | None] = SimpleQueue()
        self._given: SimpleQueue[Message | Exception] = SimpleQueue()
        self._thread = threading.Thread(target=self._make, daemon=True, name="rankmesh-heartbeat-reply")
        self._thread.start()

    def __call__(self, message: Message) -> Message:
        self._asked.put(message)
        while True:
            with suppress(Empty):
                given = self._given.get(timeout=_SELDOM)
                break
            if not self._thread.is_alive():
                raise OSError("this process replies no more")
        if isinstance(given, Exception):
            raise given
        return given

    def _make(self) -> None:
        while (message := self._asked.get()) is not None:
            self._given.put(self._made(message))

    def _made(self, message: Message) -> Message | Exception:
        try:
            return self._reply(message)
        except Exception as error:  # noqa: BLE001 - raised again where it is asked for
            return error

    def close(self) -> None:
        """End the thread, once it has made the replies so far."""
        self._asked.put(None)
        self._thread.join(1)


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
        for one in self._partial:
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
                one.sendall(_line(self._reply(message)))
            return bool(read) and len(rest) < _LARGEST
        return False


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
            with socket.create_connection(self.address, self.timeout) as one:
                replied = time.monotonic()
                while not self._stopped.is_set():
                    one.sendall(_line(PING))
                    if not self._replied(one, replied + self.timeout):
                        return "unresponsive"
                    replied = time.monotonic()
                    if _readable(one, interval):  # nothing is owed: the other end has closed
                        return "gone"
        except TimeoutError:
            return "unresponsive"
        except ConnectionError:
            return "gone"
        except OSError:
            return "unresponsive"
        return None

    def _replied(self, one: socket.socket, end: float) -> bool:
        """Whether a reply comes in time; also where the watch is stopped meanwhile."""
        soon = end - min(1.0, self.timeout / 4)
        if not _readable(one, soon - time.monotonic()):
            if self._stopped.is_set():
                return True
            self.late()
            if not _readable(one, end - time.monotonic()):
                return False
        if not one.recv(1 << 16):
            raise ConnectionResetError
        return True


def _readable(one: socket.socket, seconds: float) -> bool:
    with selectors.PollSelector() as selector:
        selector.register(one, selectors.EVENT_READ)
        return bool(selector.select(max(seconds, 0)))


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
    with selectors.PollSelector() as selector:
        for member, address in addresses.items():
            one = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
            one.setblocking(False)
            error = one.connect_ex(address)
            if error not in (0, errno.EINPROGRESS):  # such as that no route leads there, which shows nothing
                found[member] = "gone" if error == errno.ECONNREFUSED else "unresponsive"
                one.close()
                continue
            selector.register(one, selectors.EVENT_WRITE, _Call(member, one))
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                call: _Call = key.data
                presence = call.go_on(line)
                if presence is None:
                    selector.modify(call.connection, selectors.EVENT_READ, call)
                    continue
                found[call.member] = presence
                selector.unregister(call.connection)
                call.connection.close()
        for key in list(selector.get_map().values()):
            found[key.data.member] = "unresponsive"
            key.data.connection.close()
    return found.items()


@dataclass
class _Call:
    """One message on its way."""

    member: int
    connection: socket.socket
    sent: bool = False
    read: bytes = b""

    def go_on(self, line: bytes) -> Message | Presence | None:
        """Send, or read on; the reply, or why there is none; None as long as one may come."""
        one = self.connection
        try:
            if not self.sent:
                error = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, "")
                one.sendall(line)
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
