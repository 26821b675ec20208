"""Sealed lines: what travels on one connection between two processes that have the key of the job.

```
listener                                        client
   nonce  ───────────────────────────────────>
          <───────── seal(nonce of the client), seal(request)
   seal(reply)  ─────────────────────────────>
          <──────────────────────────────────── seal(request)  ...
```

A line is the HMAC of the tag before it and of its own text, then the text. Without the key nobody can write a line. No
line can be repeated, left out or sent on another connection. Each end contributes a nonce, so a recorded connection
cannot be played back to either of them.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from rankmesh.errors import ConnectError
from rankmesh.launch.job_key import JobKey

__all__ = ["LARGEST", "LARGEST_HELLO", "NONCE", "ForeignLine", "Message", "SealedLines", "new_nonce"]

# A request or a reply, as JSON data.
Message = dict[str, Any]

# Digits of a nonce, and of a tag.
NONCE = 64
# Bytes of one line: the members of 100,000 ranks fit. And of the first line, which a stranger may have sent.
LARGEST, LARGEST_HELLO = 1 << 20, 256


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
    rankmesh.survival.sealed.ForeignLine: a line was not written with the key of this job
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
