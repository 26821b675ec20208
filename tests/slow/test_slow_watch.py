"""How summaries get to the rank that logs, and what a rank's samples become."""

import json
import time
from collections import Counter
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf
from random import Random

import pytest
import torch.distributed as dist
from tests.slow.jobs import Job, parts

from rankmesh.backend import recorder as calls
from rankmesh.debug.slow.job import JobSpeed
from rankmesh.debug.slow.report import SlowReport
from rankmesh.debug.slow.summary import merged
from rankmesh.debug.watch import slow_watch, speed, stacks
from rankmesh.debug.watch.slow_watch import SlowWatch
from rankmesh.debug.watch.speed import Sampler
from rankmesh.rendezvous import BoundedChannel, StoreChannel


class _Counted(StoreChannel):
    """A channel that counts its calls, by name."""

    def __init__(self, store, prefix):
        super().__init__(store, prefix)
        self.calls, self.left = Counter(), store.num_keys

    def _key(self, key):
        self.calls[key.partition("/")[0]] += 1
        return super()._key(key)


class _Samples:
    """A rank's samples: the number of the last window that was given, and how long it has been open."""

    pause = 0.0

    def __init__(self, summary):
        self.summary, self.number, self.given = summary, 0, []

    def sample(self):
        """Nothing: the summary of a rank is the same in each window."""

    def window(self, number):
        """The summary of this rank."""
        self.number = number
        return self.summary

    def begin(self):
        """The summary has been given in time."""
        self.given.append(self.number)


class Ranks:
    """Watches of ``size`` ranks over one store, each with a clock of its own, which looks every 0.1 to 0.14 s."""

    def __init__(self, monkeypatch, size, seed=0):
        self.now, self.random, self.size = 0.0, Random(seed), size  # noqa: S311 - when ranks look
        self.clocks = [(self.random.uniform(-1e6, 1e6), self.random.uniform(0.9995, 1.0005)) for _ in range(size)]
        self.rank, self.found, self.stopped = 0, [], {}
        monkeypatch.setattr(slow_watch.time, "monotonic", lambda: self.clock(self.rank))
        store = dist.HashStore()
        summaries = parts(Job(4, size // 4, per_host=8).windows(1)[0].summary)
        self.store = _Counted(store, "job")
        self.watches = [self._watch(rank, summary) for rank, summary in enumerate(summaries)]
        self.next = [(self.random.uniform(0, 0.1), rank) for rank in range(size)]
        heapify(self.next)

    def clock(self, rank):
        """The time on the clock of a rank."""
        offset, rate = self.clocks[rank]
        return offset + rate * self.now

    def _watch(self, rank, summary):
        self.rank, recorder = rank, _Recorder()
        recorder.rank, recorder.world_size = rank, self.size
        watch = SlowWatch(recorder, BoundedChannel(self.store), 60, None)
        watch._sampler = _Samples(summary)
        watch._evaluate = lambda whole: self.found.append((self.now, sorted(whole.column("rank").tolist())))
        return watch

    def run(self, seconds):
        """Have all ranks look, but those that are stopped until a time."""
        end = self.now + seconds
        while self.next[0][0] < end:
            self.now, self.rank = heappop(self.next)
            if self.now >= self.stopped.get(self.rank, 0.0):
                self.watches[self.rank].look()
            heappush(self.next, (self.now + self.random.uniform(0.1, 0.14), self.rank))
        self.now = end

    def close(self):
        """End the watches, the root's not last."""
        for rank, watch in enumerate(self.watches):
            watch.close(last=rank == self.size - 1)


@pytest.mark.parametrize("size", [16, 80])
def test_clocks_that_differ(monkeypatch, size):
    """All ranks are in all windows, 1 s after their end at most, whatever their clocks; nothing stays in the store."""
    ranks = Ranks(monkeypatch, size)
    ranks.run(90)
    times, found = zip(*ranks.found, strict=True)
    # The clocks' phases are not known before the first window has ended.
    assert all(here == [*range(size)] for here in found[2:]), [len(here) for here in found]
    assert len(found) in (21, 22)
    assert max(at % (4.0 / ranks.clocks[0][1]) for at in times[2:]) < 1.0
    calls = ranks.store.calls.total() / size / 22
    assert calls < 8, "store calls of a rank in a window"
    ranks.close()
    assert ranks.store.left() == 0


@pytest.mark.parametrize("size", [16, 80])
def test_stopped_ranks(monkeypatch, size):
    """A dead rank is left out after 2 s; one that was stopped misses windows, and its next summary is in the next."""
    ranks = Ranks(monkeypatch, size, seed=1)
    ranks.run(30)
    # The first of a part among them, and one across an end of a window.
    ranks.stopped = {size - 1: inf, 1: 47.0, 2: ranks.now + 3.9}
    before = len(ranks.found)
    ranks.run(60)
    _, found = zip(*ranks.found, strict=True)
    assert len({*map(str, found)}) > 1
    assert len(found) in (21, 22), "one result for each window"
    assert [*range(size - 1)] in found[before : before + 6]
    assert all(here == [*range(size - 1)] for here in found[-8:])
    assert 1 not in found[before + 1]
    late = ranks.watches[1]._sampler.given
    assert max(after - earlier for earlier, after in pairwise(late)) in (5, 6)
    if size == 16:
        ranks.run(640)
        assert ranks.store.left() <= 4 + 3 * 160, "counters of ten minutes"
    ranks.close()
    assert ranks.store.left() == 0


def test_without_the_rank_that_counts(monkeypatch):
    """Where rank 0 is stopped for long, the others look now and then, and go on with it."""
    ranks = Ranks(monkeypatch, 16)
    ranks.stopped = {0: 300.0}
    ranks.run(290)
    assert ranks.found == []
    assert ranks.store.calls.total() < 16 * 290 * 2.2
    ranks.run(60)
    assert ranks.found[-1][1] == [*range(16)]


class _Recorder:
    """A rank with one group."""

    rank, world_size, host, run = 0, 2, "node0", "job"

    def groups(self):
        return {"7": ("dp@tp0", (0, 1))}


ENTRY = {"pg_id": 1, "process_group": ["7", "undefined"], "profiling_name": "gloo:all_reduce", "input_sizes": [[4]]}


@pytest.fixture
def sampler(monkeypatch):
    """A sampler, the state of its calls (complete, enqueued), and its clock."""
    state = {"calls": (0, 0), "now": 100.0, "stands": ("", "/job/train.py:9 in step")}
    monkeypatch.setattr(calls, "collectives", lambda: {(0, "1"): state["calls"]})
    monkeypatch.setattr(calls, "calls_kept", lambda recorder: [] if recorder else [ENTRY] * 30)
    monkeypatch.setattr(stacks, "stands", lambda program: state["stands"])
    monkeypatch.setattr(speed.time, "monotonic", lambda: state["now"])
    made = Sampler(_Recorder())
    made._random.uniform = lambda low, high: 1.0
    made.resume()
    return made, state


def _sample(sampler, state, calls_made, seconds=0.1, **more):
    state.update({"calls": calls_made, "now": state["now"] + seconds, **more})
    sampler.sample()


def test_samples(sampler):
    """Shares of the time: in the calls of each group, computing, and reading data; the step and the longest stretch."""
    sampler, state = sampler
    for step in range(1, 11):
        _sample(sampler, state, (step - 1, step - 1), stands=("reads", "/job/train.py:5 in next_batch"))
        _sample(sampler, state, (step - 1, step - 1), stands=("", "/job/train.py:9 in step"))
        _sample(sampler, state, (step - 1, step), stands=("may wait", ""))
        _sample(sampler, state, (step - 1, step), stands=("waits", ""))
    found = sampler.window(1)
    row = {name: int(found.column(name)[0]) for name in ("computes", "reading", "step", "stretch")}
    assert row == {"computes": 5000, "reading": 2500, "step": 400_000, "stretch": 200}
    assert (found.groups[0].label, found.groups[0].ranks, found.groups[0].operation) == ("dp@tp0", (0, 1), "all_reduce")
    assert found.waits.tolist() == [[0, 0, 5000]]
    assert found.names[found.column("data")[0]] == "/job/train.py:5 in next_batch"


def test_a_call_beside(sampler):
    """A call that is under way while the program computes counts only where the program waits for it."""
    sampler, state = sampler
    for stands in [""] * 4 + ["may wait"] * 2 + ["waits"] * 5:
        _sample(sampler, state, (3, 5), stands=(stands, ""))
    _sample(sampler, state, (3, 6), stands=("may wait", ""))
    found = sampler.window(1)
    assert found.column("computes")[0] == 5000
    assert found.waits.tolist() == [[0, 0, 5000]]


@pytest.mark.parametrize(("made", "computes"), [(1, 10_000), (0, 0)])
def test_a_late_sample(sampler, made, computes):
    """A sample that a busy program held up is of the program, unless the call was under way at the sample before."""
    sampler, state = sampler
    state["stands"] = ("waits", "")
    _sample(sampler, state, (-1, 0), seconds=0.0)
    _sample(sampler, state, (made - 1, made), seconds=2.0)
    found = sampler.window(1)
    assert found.column("computes")[0] == computes


def test_a_change_is_sampled_closer(sampler):
    """A rank that computes for longer, or waits for one that does, is sampled twice as often, until that is usual."""
    sampler, state = sampler
    pauses = []
    for window, computes in enumerate([5] * 6 + [8] * 20):
        for step in range(4 * window, 4 * window + 4):
            for _ in range(computes):
                _sample(sampler, state, (step, step), stands=("", ""))
            for _ in range(5):
                _sample(sampler, state, (step, step + 1), stands=("waits", ""))
        _taken(sampler, window)
        pauses.append(sampler._between)
    assert min(pauses[:6]) > 0.15 > pauses[6]
    assert pauses[-1] > 0.15


def _taken(sampler, number):
    found = sampler.window(number)
    sampler.begin()
    return [found]


def test_durations_of_nccl(sampler, monkeypatch):
    """What NCCL's calls lasted, in the part of the time that is recorded, is the share of their group; else nothing."""
    sampler, state = sampler
    begin = time.time_ns()
    entry = ENTRY | {"pg_id": "1", "profiling_name": "nccl:all_reduce"}
    entries = [{**entry, "time_created_ns": begin + n * 100_000_000, "duration_ms": 25.0} for n in range(41)]
    monkeypatch.setattr(calls, "collectives", lambda: {(1, "1"): state["calls"]})
    monkeypatch.setattr(calls, "calls_kept", lambda recorder: entries if recorder else [])
    found = []
    for step in range(100):
        if step == 50:
            entries[:] = [entry | {"time_created_ns": 1}] * 41
        _sample(sampler, state, (step, step + 2), seconds=0.125)
        found += _taken(sampler, 1 + step // 10) if step % 10 == 9 else []
    assert [len(one.rows) for one in found] == [0] * 4 + [1] + [0] * 5, "without durations nothing is known"
    assert found[4].column("computes")[0] == pytest.approx(7500, rel=0.05)


def test_an_error_ends_it(sampler, monkeypatch, caplog):
    """An error is one line, and the watch goes on without looking for what is slow."""
    slow = SlowWatch(_Recorder(), BoundedChannel(StoreChannel(dist.HashStore(), "test")), 60, None)
    monkeypatch.setattr(calls, "collectives", lambda: 1 // 0)
    slow.look()
    assert slow.pause == float("inf")
    assert [record.message for record in caplog.records] == [
        "rankmesh: slow: nothing more is found from rank 0: integer division or modulo by zero"
    ]


def test_the_log(tmp_path):
    """A line at most every 60 s while a rank is slow, one when that is over; the file can be read again."""
    job = Job(2, 8, compute=lambda step, rank: 0.12 if rank == 5 and step < 200 else 0.0)
    speed, lines = JobSpeed(60), []
    for window in job.windows(45):
        report = speed.add(window)
        report.write(tmp_path)
        read = SlowReport.read(tmp_path)
        assert json.dumps(read.to_dict()) == json.dumps(report.to_dict())
        lines += [(window.time, line) for line in speed.lines(window.time)]
    printed = [line for _, line in lines]
    assert printed[0].startswith("rank 5 (host node1) makes ")
    assert printed[-1].startswith("over: rank 5 (host node1) (lasted ")
    assert 2 <= len(printed) <= 4
    assert all(after - before >= 60 for (before, _), (after, _) in pairwise(lines[:-1]))
    assert not report.findings
    assert len(merged([job.windows(1)[0].summary]).rows) == 16
