"""The scheduler: of all ranks of a simulation exactly one runs, the one that has the token.

```
            ┌── pause ──┐
            v           │
 start ── ready ── running ── block ── waiting ── wake, fail ── ready
            ^           │                             ^
            └─ hand over┴── ended                     └── its deadline, or nobody can run
```

So a run is deterministic, what ranks share needs no lock, and that *every* rank waits is known at once, without a
timeout. Time is simulated: when nobody can run, the earliest deadline of a waiting rank passes. Where there is no
deadline either, the ranks are stuck, and the owner of the scheduler gets their waits.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Abandoned", "Order", "Scheduler", "Waiting"]

Order = str | int


class Abandoned(BaseException):
    """Ends the thread of a rank that its simulation has given up, or lost; no error of the user's program."""


@dataclass
class Waiting:
    """A wait of one rank: the object it waits for, the simulated time at which it gives up, how the wait ended."""

    what: object
    deadline: float | None = None
    error: BaseException | None = None
    late: bool = False


class Scheduler:
    """Hands the token from rank to rank; calls ``stuck`` when nobody can take it.

    ``order``  "deterministic": the rank that has been ready longest is next; a seed: any that is ready
    ``stuck``  gets the waits by rank, and must ``wake`` at least one of them
    """

    def __init__(
        self,
        size: int,
        order: Order,
        stuck: Callable[[dict[int, Waiting]], None],
        changed: Callable[[int | None, int | None], None] = lambda before, after: None,
    ) -> None:
        self.holder: int | None = None
        self.progress = time.monotonic()
        self.finished = threading.Event()
        self.ended: set[int] = set()
        self.lost: set[int] = set()
        self.waiting: dict[int, Waiting] = {}
        self._woken: dict[int, Waiting] = {}
        self.abandoned: set[int] = set()
        self._ready: list[int] = list(range(size))
        self._tokens = [threading.Lock() for _ in range(size)]
        self.random = None if order == "deterministic" else random.Random(order)  # noqa: S311  - not for secrets
        self._stuck, self._changed = stuck, changed
        self.clock = 0.0  # simulated seconds since the start
        self._state = threading.Lock()  # between the rank that runs and the one that watches
        for token in self._tokens:
            token.acquire()

    # -- for the ranks ------------------------------------------------------------------------------------------

    def await_start(self, rank: int) -> None:
        """Wait to get the token for the first time."""
        self._tokens[rank].acquire()
        self._resumed(rank)

    def block(self, rank: int, what: object, *, limit: float | None = None) -> bool:
        """Wait until woken; whether that was before ``limit`` simulated seconds had passed."""
        self.check(rank)
        deadline = None if limit is None else self.clock + limit
        self.waiting[rank] = Waiting(what, deadline)
        self._hand_over(rank)
        return not self._resumed(rank).late

    def pause(self, rank: int, *, idle: bool = False) -> None:
        """Let the others go first; ``idle`` when this rank only looked whether something has happened."""
        self.check(rank)
        self._ready.append(rank)
        self._hand_over(rank, idle=idle)
        self._resumed(rank)

    def end(self, rank: int) -> None:
        """End this rank."""
        self.ended.add(rank)
        if rank not in self.abandoned:
            self._hand_over(rank)

    def check(self, rank: int) -> None:
        """Refuse a rank that was given up, or lost."""
        if rank in self.abandoned or rank in self.lost:
            raise Abandoned

    # -- for the rank that has the token -----------------------------------------------------------------------------

    def wake(self, rank: int, error: BaseException | None = None) -> None:
        """Let a rank that waits go on, with an error or without; do nothing for a rank that does not wait."""
        waiting = self.waiting.pop(rank, None)
        if waiting is not None:
            waiting.error = error
            self._woken[rank] = waiting
            self._ready.append(rank)

    def notify(self, rank: int, what: object) -> None:
        """Let a rank go on if it waits for this object."""
        if rank in self.waiting and self.waiting[rank].what is what:
            self.wake(rank)

    def lose(self, rank: int) -> None:
        """End a rank where it is: it gets ``Abandoned`` as soon as it goes on, and makes no call any more."""
        self.lost.add(rank)
        self.wake(rank)

    def _resumed(self, rank: int) -> Waiting:
        self.check(rank)
        waiting = self._woken.pop(rank, None) or Waiting(None)
        if waiting.error is not None:
            raise waiting.error
        return waiting

    def _hand_over(self, rank: int | None, *, idle: bool = False) -> None:
        with self._state:
            if rank in self.abandoned:
                raise Abandoned
            after = self._next()
            if not idle:
                self.progress = time.monotonic()
            if after == rank and rank is not None:
                return
            self._changed(None if rank in self.ended else rank, after)
            self.holder = after
            if after is None:
                self.finished.set()
            else:
                self._tokens[after].release()
        if rank is not None and rank not in self.ended:
            self._tokens[rank].acquire()

    def _next(self) -> int | None:
        while not self._ready and self.waiting:
            self._let_time_pass()
        return self._ready.pop(self.choose(self._ready)) if self._ready else None

    def choose(self, choices: Sequence[object]) -> int:
        """Return the index of the choice: the first, or in a random order any."""
        return 0 if self.random is None else self.random.randrange(len(choices))

    def _let_time_pass(self) -> None:
        deadlines = {rank: wait.deadline for rank, wait in self.waiting.items() if wait.deadline is not None}
        if not deadlines:
            self._stuck(dict(self.waiting))
            return
        first = min(deadlines, key=lambda rank: (deadlines[rank], rank))
        self.clock = deadlines[first]
        self.waiting[first].late = True
        self.wake(first)

    # -- for the one that watches -------------------------------------------------------------------------------

    def start(self) -> None:
        """Give the token to the first rank; called by a thread that is not a rank."""
        self._hand_over(None)

    def abandon(self, error: Callable[[int], BaseException]) -> int | None:
        """Give up the rank that runs, and return it; the others go on with an error."""
        with self._state:
            hung, self.holder = self.holder, None
            if hung is not None:
                self.abandoned.add(hung)
            for rank in list(self.waiting):
                self.wake(rank, error(rank))
            for rank in self._ready:
                woken = self._woken.setdefault(rank, Waiting(None))
                woken.error = woken.error or error(rank)
        self._hand_over(None)
        return hung
