"""How summaries get to the rank that logs, and what a rank's samples become."""

import dataclasses
import json
import time
from itertools import pairwise

import pytest
import torch.distributed as dist
from tests.slow.jobs import Job

from rankmesh.backend import recorder as calls
from rankmesh.debug.slow.job import JobSpeed
from rankmesh.debug.slow.report import SlowReport
from rankmesh.debug.slow.summary import merged
from rankmesh.debug.watch import speed, stacks
from rankmesh.debug.watch.host_tree import HostTree, key
from rankmesh.debug.watch.slow_watch import SlowWatch
from rankmesh.debug.watch.speed import Sampler
from rankmesh.rendezvous import BoundedChannel, ChannelLost, StoreChannel


class _Host:
    """A host with one rank that reports."""

    def __init__(self):
        self.text = ""

    def report(self, text):
        self.text = text

    def reports(self):
        return [self.text]


class _Counted(StoreChannel):
    """A channel that counts the keys that it reads."""

    reads = 0

    def read(self, key):
        self.reads += 1
        return super().read(key)


def parts(summary):
    """The summary of each rank."""
    for row in range(len(summary.rows)):
        waits = summary.waits[summary.waits[:, 0] == row] * [0, 1, 1]
        yield dataclasses.replace(summary, rows=summary.rows[row : row + 1], waits=waits)


def test_a_tree_of_hosts():
    """The first rank gets the summaries of 100 hosts, of which none reads more than 8 others in a window."""
    whole = Job(4, 25, per_host=1).windows(1)[0].summary
    channel = _Counted(dist.HashStore(), "test")
    hosts = [HostTree(rank, _Host(), BoundedChannel(channel)) for rank in range(100)]
    for window in range(4):
        # Numbers are given in the order in which hosts look first; those far below are to look before.
        for tree, summary in zip(hosts, parts(whole), strict=True):
            tree.put(window, summary)
        for tree in sorted(hosts, key=lambda one: one.due):
            channel.reads = 0
            got = tree.take(window)
            assert (got is not None) == (tree is hosts[0])
            assert channel.reads <= 8
            if tree is hosts[0]:
                found = got
    assert sorted(found.column("rank")) == list(range(100))
    assert found.column("computes").sum() == whole.column("computes").sum()
    for tree in hosts:
        tree.close()
    assert not any(channel.read(key(number)) for number in range(100))


def test_a_store_that_does_not_answer():
    """A window is left out where the store does not answer; the next one is as before."""

    class Deaf(StoreChannel):
        deaf = True

        def tick(self, key, amount):
            if self.deaf:
                raise ChannelLost("cut")
            return super().tick(key, amount)

    channel = Deaf(dist.HashStore(), "test")
    tree = HostTree(0, _Host(), BoundedChannel(channel))
    summary = Job(1, 2).windows(1)[0].summary
    tree.put(1, summary)
    assert tree.take(1) is None
    channel.deaf = False
    tree.put(2, summary)
    assert tree.take(2) is not None


class _Recorder:
    """A rank with one group."""

    rank, world_size, host, run = 0, 2, "node0", "job"

    def groups(self):
        return {"7": ("dp@tp0", (0, 1))}


@pytest.fixture
def sampler(monkeypatch):
    """A sampler, the state of its calls (complete, enqueued), and its clock."""
    state = {"calls": (0, 0), "now": 100.0, "stands": ("", "/job/train.py:9 in step")}
    entry = {"pg_id": 1, "process_group": ["7", "undefined"], "profiling_name": "gloo:all_reduce", "input_sizes": [[4]]}
    monkeypatch.setattr(calls, "collectives", lambda: {(0, "1"): state["calls"]})
    monkeypatch.setattr(calls, "calls_kept", lambda recorder: [] if recorder else [entry] * 30)
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
    found = sampler.window()
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
    found = sampler.window()
    assert found.column("computes")[0] == 5000
    assert found.waits.tolist() == [[0, 0, 5000]]


@pytest.mark.parametrize(("made", "computes"), [(1, 10_000), (0, 0)])
def test_a_late_sample(sampler, made, computes):
    """A sample that a busy program held up is of the program, unless the call was under way at the sample before."""
    sampler, state = sampler
    state["stands"] = ("waits", "")
    _sample(sampler, state, (-1, 0), seconds=0.0)
    _sample(sampler, state, (made - 1, made), seconds=2.0)
    found = sampler.window()
    assert found.column("computes")[0] == computes


def test_durations_of_nccl(sampler, monkeypatch):
    """What NCCL's calls lasted, in the part of the time that is recorded, is the share of their group; else nothing."""
    sampler, state = sampler
    begin = time.time_ns()
    entry = {
        "pg_id": "1",
        "process_group": ["7", "undefined"],
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
    }
    entries = [{**entry, "time_created_ns": begin + n * 100_000_000, "duration_ms": 25.0} for n in range(41)]
    monkeypatch.setattr(calls, "collectives", lambda: {(1, "1"): state["calls"]})
    monkeypatch.setattr(calls, "calls_kept", lambda recorder: entries if recorder else [])
    found = []
    for step in range(50):
        _sample(sampler, state, (step, step + 2))
        found += [sampler.window()] if step % 10 == 9 else []
    assert found[:4] == [None] * 4
    assert found[4].column("computes")[0] == pytest.approx(7500, rel=0.05)
    entries[:] = [entry | {"time_created_ns": 1}] * 41
    for step in range(50):
        _sample(sampler, state, (50 + step, 52 + step))
        found += [sampler.window()] if step % 10 == 9 else []
    assert found[5:] == [None] * 5, "without durations nothing is known"


def test_an_error_ends_it(sampler, monkeypatch, caplog):
    """An error is one line, and the watch goes on without looking for what is slow."""
    slow = SlowWatch(_Recorder(), _Host(), BoundedChannel(StoreChannel(dist.HashStore(), "test")), 60, None)
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
