"""The meeting place: keys in the store of the world, under the identity of the job.

What is read is JSON of bounded size, never unpickled. A rank comes with a *claim*: the hash of its plan, its version of
rankmesh and its world size; ranks with one claim meet, and what they tell each other is under the name of the meeting.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

from rankmesh.errors import AgreementError, ConnectError, RankmeshError, first_line
from rankmesh.layout.span import Span

__all__ = ["LARGEST", "PATIENCE", "Board", "Claim", "Store", "answering", "checked"]

# A TCPStore takes no more under one key.
LARGEST = 8 * 2**20
# How long a rank waits for what another one is about to write.
PATIENCE = timedelta(seconds=5)


class Store(Protocol):
    """What agreement needs of a torch store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; its new value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys are there; raise when they are not within the timeout."""


@dataclass(frozen=True)
class Claim:
    """What one rank brings: its fields as plain data, and the ranks that its plan covers."""

    rank: int
    world_size: int
    span: Span
    fields: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        """The hash of the fields: equal claims have equal digests."""
        return hashlib.sha256(self.document.encode()).hexdigest()[:32]

    @cached_property
    def document(self) -> str:
        """The fields as canonical JSON."""
        return json.dumps(self.fields, sort_keys=True, separators=(",", ":"))

    def meeting(self, generation: int) -> str:
        """The name under which the ranks of this claim meet for the nth time."""
        return f"{self.digest}/{generation}"


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


class Board:
    """The keys of the meeting place, under the identity of the job."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._prefix = f"rankmesh/{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}"

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def count(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return self._store.add(self._key(key), amount)

    def write(self, key: str, text: str) -> None:
        """Write a text."""
        self._store.set(self._key(key), text)

    def has(self, key: str) -> bool:
        """Whether there is something under the key."""
        return self._store.check([self._key(key)])

    def read(self, key: str) -> dict[str, Any]:
        """The JSON object under a key; anything else is refused."""
        text = self._store.get(self._key(key))
        if len(text) > LARGEST:
            raise _foreign(key, f"{len(text)} bytes; at most {LARGEST} are read from the store")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise _foreign(key, f"{text[:60]!r}, which is no JSON object")
        return data

    def wait(self, key: str, timeout: timedelta) -> bool:
        """Whether the key is there within the timeout."""
        try:
            self._store.wait([self._key(key)], timeout)
        except RuntimeError as error:
            if "timeout" in str(error).lower() or "timed out" in str(error).lower():
                return False
            raise
        return True

    def record(self, claim: Claim, meeting: str) -> None:
        """Write where this rank waits, and for whom."""
        span = [claim.span.offset, claim.span.stop]
        self.write(f"record/{claim.rank}", json.dumps({"meeting": meeting, "span": span}))

    def records(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Where ranks were last seen, by rank; without those that gave up waiting."""
        keys = {rank: f"record/{rank}" for rank in ranks}
        found = {
            rank: checked(self.read(key), key, meeting=str, span=list) for rank, key in keys.items() if self.has(key)
        }
        return {rank: record for rank, record in found.items() if record["meeting"]}

    def fields(self, meeting: str) -> dict[str, Any]:
        """The claim of a meeting; empty when the rank that was to write it is gone."""
        key = f"{meeting.split('/')[0]}/fields"
        return self.read(key) if self.wait(key, PATIENCE) else {}

    def closes(self, meeting: str) -> bool:
        """Whether it is for this rank to give the verdict: one rank is told so, once."""
        return self.count(f"{meeting}/closed", 1) == 1

    def decide(self, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the verdicts of meetings that this rank closes.

        First all of them get a next generation: a rank that hears its verdict and comes back with another plan meets
        nobody who is still to hear one.
        """
        for meeting in verdicts:
            self.count(f"{meeting.split('/')[0]}/generation", 1)
        for meeting, verdict in verdicts.items():
            self.write(f"{meeting}/verdict", json.dumps(verdict))

    def withdraw(self, claim: Claim, meeting: str) -> None:
        """Count this rank at a meeting no longer, and record that it waits nowhere."""
        self.count(f"{meeting}/arrived", -1)
        self.record(claim, "")


def checked(data: dict[str, Any], key: str, **kinds: type) -> dict[str, Any]:
    """The same data, in which each name has a value of its kind; refused where it has not."""
    for name, kind in kinds.items():
        if not isinstance(data.get(name), kind):
            raise _foreign(key, f"an object whose {name!r} is {data.get(name)!r}")
    return data


def _foreign(key: str, what: str) -> AgreementError:
    return AgreementError(
        f"received under {key!r} {what}; another program writes under rankmesh's keys; give the job a store of its own",
        key=key,
    )
