"""How long a participant waits for the outcome of a step before it concludes without the others.

```
WaitPolicy       for a limit
SoonerIfOdd      for a limit, a shorter one where this proposal differs from the first
WhileProgress    the limit begins again whenever a participant has reported progress
UntilEnough      for a limit, or until nobody is left to wait for
```
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rankmesh.rendezvous.arrivals import POLL, Arrivals
from rankmesh.rendezvous.step import Outcome

__all__ = ["SoonerIfOdd", "UntilEnough", "WaitPolicy", "Waiting", "WhileProgress"]

# Seconds between two looks at who is absent, once that has been asked for long.
_SELDOM = 1.0


class Waiting(Protocol):
    """A step in which a participant has arrived, as its policy sees it."""

    @property
    def is_odd(self) -> bool:
        """Whether its proposal differs from the first one."""

    def receive(self, seconds: float) -> Outcome | None:
        """Wait for the outcome, for so many seconds and, where a coordinator probes, until it has concluded."""

    def progress(self) -> int:
        """Return how often participants have reported progress."""

    def arrivals(self) -> Arrivals:
        """Return who has arrived, as of now."""


@dataclass(frozen=True)
class WaitPolicy:
    """Wait for the outcome for at most ``seconds``."""

    reads_progress: ClassVar[bool] = False

    seconds: float

    def wait(self, waiting: Waiting) -> Outcome | None:
        """Return the outcome; None to conclude without the others."""
        return waiting.receive(self.seconds)


@dataclass(frozen=True)
class SoonerIfOdd(WaitPolicy):
    """Wait for at most ``seconds``, or ``if_odd`` where this participant's proposal differs from the first one."""

    if_odd: float

    def wait(self, waiting: Waiting) -> Outcome | None:
        """Return the outcome; None to conclude without the others."""
        return waiting.receive(min(self.seconds, self.if_odd) if waiting.is_odd else self.seconds)


@dataclass(frozen=True)
class WhileProgress(WaitPolicy):
    """Wait for at most ``seconds`` after a participant has called ``Round.advance``."""

    reads_progress: ClassVar[bool] = True

    def wait(self, waiting: Waiting) -> Outcome | None:
        """Return the outcome; None where no participant makes progress any more."""
        before = -1
        while (received := waiting.receive(self.seconds)) is None:
            now = waiting.progress()
            if now == before:
                return None
            before = now
        return received


@dataclass(frozen=True)
class UntilEnough(WaitPolicy):
    """Wait for at most ``seconds``, or until ``enough(arrivals)``; polled every 20 ms at first, later every second."""

    enough: Callable[[Arrivals], bool]

    def wait(self, waiting: Waiting) -> Outcome | None:
        """Return the outcome; None once nobody is left to wait for."""
        end, pause = time.monotonic() + self.seconds, POLL
        while (received := waiting.receive(max(min(pause, end - time.monotonic()), 0.0))) is None:
            if self.enough(waiting.arrivals()) or time.monotonic() >= end:
                return None
            pause = min(2 * pause, _SELDOM)
        return received
