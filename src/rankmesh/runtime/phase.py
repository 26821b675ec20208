"""Phases: ranks come, one of them judges, all hear one verdict.

```
rank 0  ── on the roll ──────────── wait ─┐
rank 1  ── on the roll ──────────── wait ─┤ verdict
rank 2  ── on the roll: all ─── judge ────┘
```

The judge is the rank that completes the roll, or the first that loses patience. It may *call*: every rank that still
waits answers at once, so those that do not are the ones that were lost; then it gives the verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankmesh.core.rank_range import RankRange
from rankmesh.rendezvous.store import JobStore, checked
from rankmesh.runtime.roll import Roll
from rankmesh.runtime.verdicts import GO, Verdict, lost

__all__ = ["Phase"]

_POLL = 0.05
# Seconds that a rank which is there takes at most to answer or to write; one store serves all of them in turn.
_MOMENT, _EACH = 2.0, 0.001


def _nothing() -> None:
    """What a rank says when it is called, besides that it is there."""


@dataclass(frozen=True)
class Phase:
    """One phase of a meeting of the ranks of ``span``, as ``rank`` sees it; ``answer`` is what it does when called."""

    store: JobStore
    key: str
    span: RankRange
    rank: int
    answer: Callable[[], None] = _nothing

    @property
    def moment(self) -> float:
        """Seconds that ranks have to answer a call, and that a rank waits for what another one is about to write."""
        return _MOMENT + _EACH * self.span.size

    @property
    def roll(self) -> Roll:
        """The ranks that came."""
        return Roll(self.store, f"{self.key}/roll", self.span)

    @property
    def called(self) -> Roll:
        """The ranks that answered the call."""
        return Roll(self.store, f"{self.key}/called", self.span)

    @property
    def keys(self) -> list[str]:
        """Every key that the phase may have in the store."""
        return [*(f"{self.key}/{name}" for name in ("judge", "verdict", "after")), *self.roll.keys, *self.called.keys]

    @property
    def was_called(self) -> bool:
        """Whether the verdict came after a call."""
        return self.store.has(f"{self.key}/after")

    def clear(self, *, called: bool) -> None:
        """Delete what the phase wrote, of a call too where there was one."""
        ordinary = [f"{self.key}/judge", f"{self.key}/verdict", *self.roll.keys]
        for key in self.keys if called else ordinary:
            self.store.delete(key)

    def judge(self) -> int:
        """The rank that gives the verdict: the first that asked."""
        return self.store.first(f"{self.key}/judge", self.rank)

    def announce(self, verdict: Verdict) -> Verdict:
        """Write the verdict, which wakes every rank that waits for it."""
        self.store.write(f"{self.key}/verdict", verdict)
        return verdict

    def hear(self, seconds: float) -> Verdict | None:
        """The verdict, None where there is none in time; a call is answered."""
        key = f"{self.key}/verdict"
        if not self.store.wait(key, seconds):
            return None
        data = self.store.read(key)
        return self._answer(data, key) if "call" in data else _verdict(data, key)

    def hear_of(self, judge: int) -> Verdict:
        """The verdict that another rank is about to give; it may be lost before it has."""
        return self.hear(self.moment) or lost([judge], after="was to say whether all are through")

    def wake(self, seconds: float) -> None:
        """Call: from now on the ranks that wait answer, and wait so long for what comes of it."""
        self.store.write(f"{self.key}/verdict", {"call": self.rank, "seconds": seconds})
        self.answer()
        if self.rank in self.span:  # a judge may call ranks that wait for others than itself
            self.called.come(self.rank)

    def silent(self, end: float, besides: Sequence[int] = ()) -> list[int]:
        """The ranks that have not answered the call by a point in time (``time.monotonic``), ``besides`` left out."""
        expected = set(self.span.members).difference(besides)
        called = self.called
        while (silent := sorted(expected.intersection(called.absent()))) and time.monotonic() < end:
            time.sleep(_POLL)
        return silent

    def conclude(self, verdict: Verdict) -> Verdict:
        """Give the verdict after a call."""
        self.store.write(f"{self.key}/after", verdict)
        return verdict

    def _answer(self, data: Mapping[str, Any], key: str) -> Verdict:
        """Say that this rank is here, and hear what comes of the call."""
        judge, seconds = (checked(dict(data), key, call=int, seconds=float)[name] for name in ("call", "seconds"))
        self.answer()
        self.called.come(self.rank)
        key = f"{self.key}/after"
        if not self.store.wait(key, min(seconds, 1e6) + self.moment):
            return lost([judge], after="had called all others")
        return _verdict(self.store.read(key), key)


def _verdict(data: dict[str, Any], key: str) -> Verdict:
    if checked(data, key, go=bool)["go"]:
        return GO
    return checked(data, key, message=str, ranks=list, missing=list, fields=list)
