"""Rounds of participants that run one at a time, in any order, on a simulated clock; one may die or stand still.

```
rank 0   arrive ─────────────── wait . . . . . . . . . . . . outcome
rank 1          arrive ── dies
rank 2                  arrive ──── wait ── conclude ───────
         └──────┴───────┴───────┴──── before each operation of the store, chance says who runs
```

Real processes try the interleavings that a machine happens to make; this tries any, thousands of them, and again.
"""

# ruff: noqa: S311 - chance keeps no secrets

import random
import threading
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

from tests.rendezvous.transports import Died
from torch.distributed import HashStore

from rankmesh.rendezvous import StoreChannel, arrivals, waiting
from rankmesh.rendezvous import round as rounds

NEVER = float("inf")


@dataclass(frozen=True)
class Fault:
    """What happens to ``rank`` at its ``at``-th operation: it dies ``before`` or after it, or stands still first."""

    rank: int
    at: int
    before: bool = True
    seconds: float = NEVER  # so long it stands still; for ever: it dies


class Schedule:
    """Runs one program on each rank, one at a time; ``seed`` decides who is next."""

    def __init__(self, seed, faults=()):
        self.chance, self.faults, self.store = random.Random(seed), faults, HashStore()
        self.clock, self.operations = 0.0, {}
        self._turns, self._ready, self._waiting = {}, [], {}
        self._dead = set()
        self._over = threading.Event()

    def run(self, program, ranks):
        """What ``program(rank, channel)`` returns or raises on each rank."""
        answers = {}

        def one(rank):
            self._turns[rank].acquire()
            try:
                answers[rank] = program(rank, StoreChannel(Points(self, rank)))
            except (Exception, Died) as error:  # noqa: BLE001 - what this participant met
                answers[rank] = error
            self._next(None)

        self._turns = {rank: threading.Semaphore(0) for rank in ranks}
        self._ready, self._waiting = list(ranks), {}
        self.operations, self._dead = dict.fromkeys(ranks, 0), set()
        self._over.clear()
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        self._next(None)
        assert self._over.wait(60), "the participants do not come to an end"
        for thread in threads:
            thread.join(10)
        return [answers[rank] for rank in ranks]

    def point(self, rank):
        """An operation is about to happen: anybody may run before it."""
        if rank in self._dead:
            raise Died
        self.operations[rank] += 1
        for fault in self.faults:
            if (fault.rank, fault.at) == (rank, self.operations[rank]):
                if fault.seconds < NEVER:
                    self.wait(rank, lambda: False, fault.seconds)
                elif fault.before:
                    self._die(rank)
        self._ready.append(rank)
        self._next(rank)

    def done(self, rank):
        """The operation has happened."""
        for fault in self.faults:
            if (fault.rank, fault.at) == (rank, self.operations[rank]) and fault.seconds == NEVER:
                self._die(rank)

    def left(self):
        """The number of the next epoch, which is all that is left in the store."""
        assert self.store.num_keys() == 1
        return int(self.store.get("rankmesh/job/meet/epoch"))

    def _die(self, rank):
        self._dead.add(rank)
        raise Died

    def wait(self, rank, come, seconds):
        """Let the others run until ``come()``, at most for so long."""
        self._waiting[rank] = (come, self.clock + seconds)
        self._next(rank)

    def _next(self, rank):
        for other, (come, _) in list(self._waiting.items()):
            if come():
                del self._waiting[other]
                self._ready.append(other)
        if not self._ready and self._waiting:
            first = min(self._waiting, key=lambda other: self._waiting[other][1])
            self.clock = max(self.clock, self._waiting.pop(first)[1])
            self._ready.append(first)
        if not self._ready:
            self._over.set()
            return
        chosen = self._ready.pop(self.chance.randrange(len(self._ready)))
        if chosen != rank:
            self._turns[chosen].release()
            if rank is not None:
                self._turns[rank].acquire()


class Points:
    """The store of one rank: every operation is a point of the schedule, and a wait is one by its clock."""

    def __init__(self, schedule, rank):
        self._schedule, self._rank, self._store = schedule, rank, schedule.store

    def _do(self, work, *given):
        self._schedule.point(self._rank)
        found = work(*given)
        self._schedule.done(self._rank)
        return found

    def __getattr__(self, name):
        return partial(self._do, getattr(self._store, name))

    def wait(self, keys, timeout):
        """Let the others run until the keys are there, or the time is over."""
        self._do(self._wait, partial(self._store.check, keys), timeout.total_seconds())

    def _wait(self, come, seconds):
        if not come() and seconds > waiting._LEAST:
            self._schedule.wait(self._rank, come, seconds)
        if not come():
            raise RuntimeError("the time is over")


def on_its_clock(monkeypatch, schedule):
    """Have rounds measure time by the clock of the schedule."""
    for module in (rounds, arrivals):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: schedule.clock))
