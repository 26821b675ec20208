"""The lines on one connection between two processes that have the key of the job, and the end that sends requests.

```
listener                                        client
   nonce  ───────────────────────────────────>
          <───────── seal(nonce of the client), seal(request)
   seal(reply)  ─────────────────────────────>
          <──────────────────────────────────── seal(request)  ...
```

A sealed line is the HMAC of the tag before it and of its own text, then the text. Without the key nobody can write a
line. No line can be repeated, left out or sent on another connection. Each end contributes a nonce, so a recorded
connection cannot be played back to either of them.

Nothing here waits: the caller polls ``socket`` for ``events`` and calls ``go_on``.
"""

from __future__ import annotations

import errno
import json
import secrets
import selectors
import socket
from typing import Any, NamedTuple

from rankmesh.errors import ConnectError
from rankmesh.launch.address import family_of
from rankmesh.launch.job_key import JobKey

__all__ = ["ENDED", "LARGEST", "Address", "Conversation", "ForeignLine", "Message", "SealedLines", "begun", "new_nonce"]

# A request or a reply, as JSON data.
Message = dict[str, Any]

# Digits of a nonce, and of a tag.
NONCE = 64
# Bytes of one line: the members of 100,000 ranks fit.
LARGEST = 1 << 20
# Errors of a connection by which nobody listens, or something on the way rejects it.
ENDED = (errno.ECONNREFUSED, errno.ECONNRESET)


class ForeignLine(ConnectError):
    """A line that no process with the key of this job wrote for this connection."""


def new_nonce() -> bytes:
    """Return 256 random bits, as hexadecimal digits."""
    return secrets.token_hex().encode()


class SealedLines:
    """The lines of one connection in both directions, after the nonce of its listener.

    >>> key = JobKey("an example of 32 characters or more")
    >>> listener, client = SealedLines(key, b"0" * 64), SealedLines(key, b"0" * 64)
    >>> line = client.seal({"what": "ping"})
    >>> listener.open(line)
    {'what': 'ping'}
    >>> listener.open(line)
    Traceback (most recent call last):
    rankmesh.survival.conversation.ForeignLine: a line was not written with the key of this job
    """

    def __init__(self, key: JobKey, nonce: bytes) -> None:
        self._key, self._before = key, nonce

    def seal(self, message: object) -> bytes:
        """Return a message, which is JSON data, as the next line of the connection."""
        text = json.dumps(message).encode()
        self._before = self._key.tag(self._before, text).encode()
        return self._before + b" " + text + b"\n"

    def open(self, line: bytes) -> object:
        """Return the message of the next line; raise ``ForeignLine`` if it was not written with the key for here."""
        tag, text = line[:NONCE], line[NONCE + 1 :].removesuffix(b"\n")
        if not self._key.is_tag(tag.decode(errors="replace"), self._before, text):
            raise ForeignLine("a line was not written with the key of this job")
        self._before = tag
        return json.loads(text)


class Address(NamedTuple):
    """The address at which a process replies, and its liveness port, 0 for none."""

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
        """The events to poll the socket for."""
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
