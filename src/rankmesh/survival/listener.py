"""The listener of a process: it replies to the requests of those that have the key of the job, and to nobody else.

```
connected ── nonce ──> hello, within 10 s ──> requests, each with one reply
                └ anything else: closed, without a word, and one line in the log for each host
```

One thread serves all connections and waits for none of them: a client that sends half a line, or does not read its
replies, delays nobody. Until it has shown that it has the key, a connection holds 256 bytes at most.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rankmesh.launch.job_key import JobKey
from rankmesh.survival.conversation import LARGEST, ForeignLine, Message, SealedLines, new_nonce

__all__ = ["Listener"]

_log = logging.getLogger("rankmesh.survival")

# Connections that have not shown yet that they have the key, the seconds that they have for it, and the bytes.
_UNKNOWN, _HELLO, _LARGEST_HELLO = 512, 10.0, 256
# Seconds in which a client reads its reply.
_READS = 30.0
# Seconds that one look for readable connections lasts.
LOOK = 0.5
# Hosts that the log names, and seconds between two attempts to accept where the process has no descriptor left.
_HOSTS, _PAUSE = 64, 0.01


@dataclass(eq=False)
class _Client:
    """One connection; ``known`` once its first line has shown that it has the key."""

    connection: socket.socket
    lines: SealedLines
    since: float
    known: bool = False
    received: bytes = b""
    to_send: bytes = b""


class Listener:
    """The connections on which others send requests; ``reply`` returns the reply to one, at once."""

    def __init__(
        self, wake: socket.socket, listening: socket.socket, key: JobKey, reply: Callable[[Message], Message]
    ) -> None:
        self._wake, self._listening, self._key, self._reply = wake, listening, key, reply
        self._clients: dict[socket.socket, _Client] = {}
        self._refused: set[str] = set()
        self._looked = time.monotonic()
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        for one in (listening, wake):
            self._selector.register(one, selectors.EVENT_READ)

    def close(self) -> None:
        """Close every connection, and listen no more."""
        self._selector.close()
        for one in (self._wake, self._listening, *self._clients):
            one.close()

    def wait(self) -> list[Any]:
        """Return the sockets that can go on, after ``LOOK`` seconds at most."""
        return [key.fileobj for key, _ in self._selector.select(LOOK)]

    def handle(self, ready: Iterable[Any]) -> bool:
        """Accept, read, reply and write; return False once something comes on ``wake``."""
        for one in ready:
            if one is self._wake:
                return False
            if one is self._listening:
                self._accept()
            elif (client := self._clients.get(one)) is not None:
                self._go_on(client)
        self._close_slow()
        return True

    def _accept(self) -> None:
        try:
            connection = self._listening.accept()[0]
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: the others are served meanwhile
            time.sleep(_PAUSE)
            return
        connection.setblocking(False)
        nonce = new_nonce()
        client = _Client(connection, SealedLines(self._key, nonce), time.monotonic(), to_send=nonce + b"\n")
        self._clients[connection] = client
        self._selector.register(connection, selectors.EVENT_READ)
        self._go_on(client)

    def _go_on(self, client: _Client) -> None:
        """Send what is left to send, then read and reply, until the connection blocks."""
        try:
            while True:
                while client.to_send:
                    client.to_send = client.to_send[client.connection.send(client.to_send) :]
                line, newline, rest = client.received.partition(b"\n")
                if len(line) > (LARGEST if client.known else _LARGEST_HELLO):
                    raise ForeignLine("a line is too long")
                if newline:
                    client.received = rest
                    self._answer(client, line)
                elif read := client.connection.recv(1 << 16):
                    client.received += read
                else:
                    break
        except BlockingIOError:
            events = selectors.EVENT_WRITE if client.to_send else selectors.EVENT_READ
            self._selector.modify(client.connection, events)
            return
        except ForeignLine:
            self._report(client)
        except (OSError, ValueError, RecursionError):
            pass
        self._close(client)

    def _answer(self, client: _Client, line: bytes) -> None:
        message = client.lines.open(line)
        if client.known:
            client.to_send = client.lines.seal(self._reply_to(message if isinstance(message, dict) else {}))
            client.since = time.monotonic()
        client.known = True

    def _reply_to(self, message: Message) -> Message:
        """Return the reply, an empty one if making it fails: this process lives all the same."""
        try:
            return self._reply(message)
        except Exception:  # noqa: BLE001  - a closed connection would show that the process has ended
            traceback.print_exc()
            return {}

    def _close_slow(self) -> None:
        """Close connections that do not show the key, the oldest ones first, and those that do not read."""
        now = time.monotonic()
        if now - self._looked < LOOK and len(self._clients) <= _UNKNOWN:
            return
        self._looked, clients = now, list(self._clients.values())
        unknown = [one for one in clients if not one.known]
        for client in unknown[: len(unknown) - _UNKNOWN] if len(unknown) > _UNKNOWN else ():
            self._close(client)
        for client in clients:
            limit = _READS if client.known else _HELLO
            if now - client.since > limit and (client.to_send or not client.known):
                self._close(client)

    def _report(self, client: _Client) -> None:
        """Say in the log that a host was refused, once for each host."""
        with suppress(OSError):
            host = str(client.connection.getpeername()[0])
            if host not in self._refused and len(self._refused) < _HOSTS:
                self._refused.add(host)
                _log.warning(
                    "rankmesh: closed a connection from %s that did not show the key of this job; others from there "
                    "are closed without a line",
                    host,
                )

    def _close(self, client: _Client) -> None:
        if self._clients.pop(client.connection, None) is not None:
            self._selector.unregister(client.connection)
            client.connection.close()
