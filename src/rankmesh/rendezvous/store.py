"""The store of the world: keys under the identity of the job, JSON of bounded size, never unpickled.

```
rankmesh/JOB/...      JOB is the launcher's run id, so that two jobs on one store do not meet
```

What a rank writes for a meeting is deleted when the meeting is over (``meeting``). torch's own stores differ in what
wakes a rank that waits: only ``set`` and ``add`` do so in each of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from rankmesh.errors import AgreementError, ConnectError, RankmeshError, first_line
from rankmesh.rendezvous.waiting import come

__all__ = ["LARGEST", "JobStore", "Store", "answering", "checked"]

# A TCPStore takes no more under one key.
LARGEST = 8 * 2**20

# Nobody writes this: to ask a store to change it into itself reads, in one message; ``get`` waits first, in another.
_NOTHING = "?"


class Store(Protocol):
    """What meetings need of a torch store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter of 64 bits; its new value."""

    def append(self, key: str, value: str, /) -> None:
        """Write at the end of a value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write where the value is the expected one, nothing standing for absent; the value then."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Read values that are there."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; whether it was there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys are there; raise when they are not within the timeout."""


@contextmanager
def answering(rank: int) -> Iterator[None]:
    """A store that does not answer is a ``ConnectError`` that says so."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, RankmeshError):
            raise
        raise ConnectError(
            f"rank {rank}: the store of the world does not answer ({first_line(error)}); the process that "
            "serves it is gone or unreachable; look at the log of the rank that serves it (usually rank 0) and restart",
            rank=rank,
        ) from error


class JobStore:
    """The keys of one job in the store of its world."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._prefix = f"rankmesh/{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}"

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def count(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return self._store.add(self._key(key), amount)

    def advance(self, key: str, number: int) -> None:
        """Move a counter on from ``number``, once, whoever asks for it."""
        self._store.compare_set(self._key(key), str(number), str(number + 1))

    def write(self, key: str, data: Mapping[str, Any]) -> None:
        """Write a JSON object; it wakes the ranks that wait for the key."""
        self._store.set(self._key(key), json.dumps(data))

    def append(self, key: str, line: str) -> None:
        """Write a line at the end of a text."""
        self._store.append(self._key(key), f"{line}\n")

    def lines(self, key: str) -> list[str]:
        """The lines of a text, none where there is no text."""
        text = self._store.get(self._key(key)) if self.has(key) else b""
        return text.decode(errors="replace").splitlines() if len(text) <= LARGEST else []

    def _read(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._store.compare_set(self._key(key), _NOTHING, _NOTHING)

    def texts(self, keys: Sequence[str]) -> list[str]:
        """The texts under keys that are there, read together."""
        found = [self._read(key) for key in keys] if len(keys) < 3 else self._store.multi_get([*map(self._key, keys)])
        return [text.decode(errors="replace") for text in found if len(text) <= LARGEST]

    def first(self, key: str, rank: int) -> int:
        """The rank that came first to a key: this one, or the one that is written there."""
        text = self._store.compare_set(self._key(key), "", str(rank))
        if not text.isdigit() or len(text) > 9:
            raise _foreign(key, f"{text[:60]!r}, which is no rank")
        return int(text)

    def has(self, key: str) -> bool:
        """Whether there is something under the key."""
        return self._store.check([self._key(key)])

    def read(self, key: str) -> dict[str, Any]:
        """The JSON object under a key that is there; anything else is refused."""
        return _json(key, self._read(key))

    def read_all(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The JSON objects under those of the keys that are there, read together."""
        there = self._present(list(keys))
        texts = self._store.multi_get([self._key(key) for key in there]) if there else []
        return {key: _json(key, text) for key, text in zip(there, texts, strict=True)}

    def _present(self, keys: list[str]) -> list[str]:
        """The keys that are there: a store says only whether all of them are, so halves are asked for in turn."""
        if not keys or self._store.check([self._key(key) for key in keys]):
            return keys
        half = len(keys) // 2
        return [] if not half else self._present(keys[:half]) + self._present(keys[half:])

    def delete(self, key: str) -> None:
        """Remove a key, whether it is there or not."""
        self._store.delete_key(self._key(key))

    def wait(self, key: str, seconds: float) -> bool:
        """Whether the key is there within so many seconds."""
        return come(self._store, [self._key(key)], seconds)


def checked(data: dict[str, Any], key: str, **kinds: type) -> dict[str, Any]:
    """The same data, in which each name has a value of its kind; refused where it has not."""
    for name, kind in kinds.items():
        if not isinstance(data.get(name), kind):
            raise _foreign(key, f"an object whose {name!r} is {data.get(name)!r}")
    return data


def _json(key: str, text: bytes) -> dict[str, Any]:
    if len(text) > LARGEST:
        raise _foreign(key, f"{len(text)} bytes; at most {LARGEST} are read from the store")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise _foreign(key, f"{text[:60]!r}, which is no JSON object")
    return data


def _foreign(key: str, what: str) -> AgreementError:
    return AgreementError(
        f"received under {key!r} {what}; another program writes under rankmesh's keys; give the job a store of its own",
        key=key,
    )
