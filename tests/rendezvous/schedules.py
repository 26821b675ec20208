"""Rounds of participants that run one at a time, in any order, on a simulated clock; one may die or stand still.

```
rank 0   arrive ─────────────── wait . . . . . . . . . . . . outcome
rank 1          arrive ── dies
rank 2                  arrive ──── wait ── conclude ───────
         └──────┴───────┴───────┴──── before each operation of the channel, chance says who runs
```

Real processes try the interleavings that a machine happens to make; this tries any, thousands of them, and again.
"""

# Methods of `Channel` have their docstrings there; chance keeps no secrets.
# ruff: noqa: D102, S311

import random
import threading
from dataclasses import dataclass

from rankmesh.rendezvous import arrivals
from rankmesh.rendezvous import round as rounds

NEVER = float("inf")


class Died(BaseException):
    """A participant that is killed: it does nothing any more."""


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
        self.chance, self.faults = random.Random(seed), faults
        self.clock, self.data, self.operations = 0.0, {}, {}
        self._turns, self._ready, self._waiting = {}, [], {}
        self._dead = set()
        self._over = threading.Event()

    def run(self, program, ranks):
        """What ``program(rank, channel)`` returns or raises on each rank."""
        answers = {}

        def one(rank):
            self._turns[rank].acquire()
            try:
                answers[rank] = program(rank, Memory(self, rank))
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


class Memory:
    """The channel of one rank: every operation is a point of the schedule."""

    remote = False

    def __init__(self, schedule, rank):
        self._schedule, self._rank, self._data = schedule, rank, schedule.data

    def again(self):
        return self

    def _do(self, work):
        self._schedule.point(self._rank)
        found = work(self._data)
        self._schedule.done(self._rank)
        return found

    def arrive(self, key, participants, rank):
        def work(data):
            there = data.setdefault(key, set())
            there.add(rank)
            return there >= set(participants)

        return self._do(work)

    def absent(self, key, participants):
        return self._do(lambda data: [rank for rank in participants if rank not in data.get(key, ())])

    def post(self, key, rank, text):
        self._do(lambda data: data.setdefault(key, []).append((rank, text)))

    def posted(self, key, writers=1):
        def work(data):
            found = {}
            for rank, text in data.get(key, ()):
                found.setdefault(rank, []).append(text)
            return found

        return self._do(work)

    def advance(self, key, number):
        def work(data):
            if data.get(key, 0) == number:
                data[key] = number + 1

        self._do(work)

    def tick(self, key, amount):
        def work(data):
            data[key] = data.get(key, 0) + amount
            return data[key]

        return self._do(work)

    def first(self, key, text):
        return self._do(lambda data: data.setdefault(key, text))

    announce = first

    def write(self, key, text):
        self._do(lambda data: data.__setitem__(key, text))

    def read(self, key):
        return self._do(lambda data: data.get(key))

    def wait(self, key, seconds):
        self._schedule.point(self._rank)
        if key not in self._data and seconds > 0:
            self._schedule.wait(self._rank, lambda: key in self._data, seconds)
        found = key in self._data
        self._schedule.done(self._rank)
        return found

    def delete(self, keys, *, sets=(), participants=()):
        for key in (*keys, *sets):
            self._do(lambda data, key=key: data.pop(key, None))


class Clock:
    """The ``time`` module of rounds, by the clock of a schedule."""

    def __init__(self, schedule):
        self.monotonic = lambda: schedule.clock


def on_its_clock(monkeypatch, schedule):
    """Have rounds measure time by the clock of the schedule."""
    for module in (rounds, arrivals):
        monkeypatch.setattr(module, "time", Clock(schedule))
