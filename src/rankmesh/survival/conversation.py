"""A conversation with another process: one connection on which this process sends requests and receives replies.

```
begin ── nonce comes ──> hello and request ── reply comes ──> the next request
```

Nothing here waits: the caller polls ``socket`` for ``events`` and calls ``go_on``.
"""

from __future__ import annotations

import errno
import selectors
import socket
from typing import NamedTuple

from rankmesh.launch.address import family_of
from rankmesh.launch.job_key import JobKey
from rankmesh.survival.sealed import LARGEST, NONCE, ForeignLine, Message, SealedLines, new_nonce

__all__ = ["ENDED", "Address", "Conversation", "begun"]

# Errors of a connection that show that nobody listens any more.
ENDED = (errno.ECONNREFUSED, errno.ECONNRESET)


class Address(NamedTuple):
    """Where a process replies, and its liveness port, 0 for none."""

    host: str
    port: int
    liveness: int = 0


def begun(host: str, port: int) -> tuple[socket.socket, int]:
    """Return a connection that does not block, and its error number so far, 0 if it may succeed."""
    one = socket.socket(family_of(host), socket.SOCK_STREAM)
    one.setblocking(False)
    error = one.connect_ex((host, port))
    return one, 0 if error == errno.EINPROGRESS else error


class Conversation:
    """This end of a connection to a process; ``error`` is the number of the error that connecting ended with at once.

    ``replied`` is True once a reply has come, which only a process with the key can give.
    """

    def __init__(self, address: Address, key: JobKey) -> None:
        self.socket, self.error = begun(address.host, address.port)
        self.replied = False
        self._key, self._received, self._to_send = key, b"", b""
        self._lines: SealedLines | None = None
        self._requests: list[object] = []

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    @property
    def events(self) -> int:
        """What to poll the socket for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._to_send else 0)

    def request(self, message: Message) -> None:
        """Send a message, as soon as the other end has sent its nonce; the reply to the one before has come."""
        self._requests.append(message)
        self._seal()

    def go_on(self) -> Message | None:
        """Send and receive what is possible now; return the reply once it has come, None before.

        Raises ``ConnectionError`` if the connection has ended, ``ForeignLine`` if the process at the other end does not
        have the key, another ``OSError`` if the network fails.
        """
        try:
            self._send()
            while True:
                line, newline, rest = self._received.partition(b"\n")
                if newline:
                    self._received = rest
                    if (reply := self._understood(line)) is not None:
                        return reply
                    self._send()
                elif len(line) > (LARGEST if self._lines else NONCE):
                    raise ForeignLine("a line is too long")
                elif read := self.socket.recv(1 << 16):
                    self._received += read
                else:
                    raise ConnectionResetError
        except BlockingIOError:
            return None

    def _send(self) -> None:
        while self._to_send:
            self._to_send = self._to_send[self.socket.send(self._to_send) :]

    def _understood(self, line: bytes) -> Message | None:
        if self._lines is None:
            if len(line) != NONCE:
                raise ForeignLine("a line is not a nonce")
            self._lines = SealedLines(self._key, line)
            self._requests.insert(0, new_nonce().decode())
            self._seal()
            return None
        reply = self._lines.open(line)
        if not isinstance(reply, dict):
            raise ForeignLine("a reply is not an object")
        self.replied = True
        return reply

    def _seal(self) -> None:
        while self._lines is not None and self._requests:
            self._to_send += self._lines.seal(self._requests.pop(0))
