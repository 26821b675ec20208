"""Findings of a slow job: generated jobs, whose cause is known, against what is found of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow.jobs import COMPUTE, WINDOW, Job, parts

from rankmesh.debug.slow.findings import MEMORY, Window, find
from rankmesh.debug.slow.job import JobSpeed
from rankmesh.debug.slow.summary import Summary, cycle_of, merged
from rankmesh.debug.watch.speed import spread

SIZES = st.sampled_from([(1, 16, 1), (2, 4, 2), (4, 4, 1), (2, 8, 1), (4, 8, 2), (1, 4, 1)])
SEEDS = st.integers(0, 2**32)


def found_in(job, windows=3):
    """Cause and ranks of each finding."""
    return [(one.cause, one.ranks) for one in find(job.windows(windows))]


@settings(max_examples=8)
@given(sizes=SIZES, seed=SEEDS, noise=st.sampled_from([0, 0.01, 0.05]))
def test_a_healthy_job(sizes, seed, noise):
    """Nothing is found, however noisy its ranks are."""
    windows = Job(*sizes, noise=noise, seed=seed).windows(20)
    assert not [find(windows[:n]) for n in range(1, 21) if find(windows[:n])]


@settings(max_examples=25)
@given(sizes=SIZES, seed=SEEDS, place=st.floats(0, 1, exclude_max=True), reads=st.booleans())
def test_a_late_rank(sizes, seed, place, reads):
    """One rank is named, not those that it holds up, with what the job loses by it."""
    job = Job(*sizes, seed=seed)
    late = int(place * job.world)
    job.compute = lambda step, rank: 0.1 if rank == late else 0.0
    job.reads = frozenset({late}) if reads else frozenset()
    (found,) = find(job.windows(3))
    assert (found.cause, found.ranks) == ("input" if reads else "computes", (late,))
    assert found.seconds == pytest.approx(0.1, abs=0.03)
    assert found.share == pytest.approx(found.seconds / found.step)
    assert found.hosts == (f"node{late // 4}",)
    assert not reads or found.evidence.startswith("in next_batch at train.py:88")
    assert found.group in {group.label for group in job.groups if late in group.ranks}


@settings(max_examples=15)
@given(seed=SEEDS, first=st.integers(0, 15), second=st.integers(0, 15))
def test_two_late_ranks(seed, first, second):
    """Each of two late ranks is named."""
    job = Job(2, 8, seed=seed, per_host=8, compute=lambda step, rank: 0.12 if rank in (first, second) else 0.0)
    assert sorted(found_in(job)) == sorted({("computes", (first,)), ("computes", (second,))})


@settings(max_examples=15)
@given(seed=SEEDS, host=st.integers(0, 3))
def test_a_late_host(seed, host):
    """A host is named as one where all its ranks are late."""
    job = Job(2, 8, seed=seed, compute=lambda step, rank: 0.12 if rank // 4 == host else 0.0)
    (found,) = find(job.windows(3))
    assert (found.cause, found.hosts, found.ranks) == ("host", (f"node{host}",), tuple(range(4 * host, 4 * host + 4)))


@settings(max_examples=15)
@given(seed=SEEDS, slow=st.integers(0, 3))
def test_a_slow_link(seed, slow):
    """A group is named whose calls take longer than in others, not a member."""
    job = Job(4, 4, seed=seed, per_host=2)
    chosen = [group for group in job.groups if group.kind == "dp"][slow]
    job.call = lambda step, group: 0.1 if group == chosen else 0.0
    (found,) = find(job.windows(3))
    assert (found.cause, found.ranks, found.group) == ("link", chosen.ranks, chosen.label)
    assert found.seconds == pytest.approx(0.1, abs=0.03)


def test_a_slow_link_of_a_host():
    """The host is named that is in all the slow groups and in no other."""
    job = Job(2, 8, per_host=4)
    job.call = lambda step, group: 0.1 if group.kind == "tp" and group.ranks[0] // 4 == 2 else 0.0
    (found,) = find(job.windows(3))
    assert (found.cause, found.hosts) == ("link", ("node2",))
    assert "(so in 1 more)" in found.evidence


@settings(max_examples=15)
@given(seed=SEEDS, late=st.integers(0, 15), every=st.integers(9, 20))
def test_a_pause(seed, late, every):
    """A rank that is rarely late, for long, is told from one that is always late."""
    job = Job(2, 8, seed=seed, compute=lambda step, rank: 1.9 if rank == late and step % every == every - 1 else 0.0)
    (found,) = find(job.windows(MEMORY))
    assert (found.cause, found.ranks) == ("pause", (late,))
    assert found.every == pytest.approx(every, rel=0.35)
    assert found.seconds * found.every == pytest.approx(1.9, rel=0.4)


@settings(max_examples=15)
@given(seed=SEEDS, stage=st.integers(0, 1), single=st.booleans())
def test_an_uneven_place(seed, stage, single):
    """The ranks of a stage that all compute for longer are an imbalance; so is a rank that works by itself."""
    heavy = {8 * stage + 3} if single else set(range(8 * stage, 8 * stage + 8))
    job = Job(2, 4, 2, seed=seed, compute=lambda step, rank: 0.2 if rank in heavy else 0.0)
    job.places = lambda rank: "extra" if single and rank in heavy else ""
    assert found_in(job) == [("imbalance", tuple(sorted(heavy)))]


def test_everyone():
    """A job that becomes slower without a rank that differs."""
    job = Job(2, 8, compute=lambda step, rank: 0.2 if step > 200 else 0.0)
    (found,) = find(job.windows(MEMORY))
    assert (found.cause, found.hosts) == ("everyone", ())
    assert found.seconds == pytest.approx(0.2, abs=0.03)


@settings(max_examples=15)
@given(seed=SEEDS, when=st.integers(0, 5))
def test_a_single_hiccup(seed, when):
    """A rank that is late once for long is not a finding."""
    job = Job(2, 8, seed=seed, compute=lambda step, rank: 2.0 if (step, rank) == (10 + when, 3) else 0.0)
    windows = job.windows(12)
    assert not [find(windows[:n]) for n in range(1, 13) if find(windows[:n])]


@settings(max_examples=10)
@given(seed=SEEDS, late=st.integers(0, 15), lasts=st.integers(4, 6), pause=st.integers(6, 8))
def test_what_is_over_is_over(seed, late, lasts, pause):
    """A rank that was late twice within a minute, and is a little late otherwise, is not found a third time."""
    job, speed, known = Job(2, 8, seed=seed), JobSpeed(60), []
    steps = int(WINDOW / COMPUTE)
    when = [range(at * steps, (at + lasts) * steps) for at in (4, 4 + lasts + pause)]
    job.compute = lambda step, rank: (0.1 if any(step in one for one in when) else 0.02) if rank == late else 0.0
    for window in job.windows(4 + 2 * lasts + pause + 20):
        found = speed.add(window).findings
        assert all(one.ranks == (late,) for one in found)
        known += [bool(found)] if [bool(found)] != known[-1:] else []
    assert known == [False, True, False, True, False]


def test_missing_ranks():
    """What some ranks did not report changes nothing for the others."""
    job = Job(2, 8, compute=lambda step, rank: 0.12 if rank == 5 else 0.0)
    windows = job.windows(3)
    there = [part for part in parts(windows[1].summary) if part.column("rank")[0] != 9]
    windows[1] = dataclasses.replace(windows[1], summary=merged(there))
    assert [one.ranks for one in find(windows)] == [(5,)]


@given(sizes=SIZES, seed=SEEDS, cut=st.integers(1, 7))
@settings(max_examples=15)
def test_summaries_merge(sizes, seed, cut):
    """A summary is the same after its text, and however its ranks were merged before."""
    whole = Job(*sizes, seed=seed).windows(1)[0].summary
    read = [Summary.from_text(part.to_text()) for part in parts(whole, cut)]
    again = merged([merged(read[::2]), merged(read[1::2])])
    assert sorted(map(str, again.groups)) == sorted(map(str, whole.groups))
    for name in ("computes", "rank"):
        assert sorted(again.column(name)) == sorted(whole.column(name))
    window, other = (Window(0.0, 1.0, len(whole.rows), each) for each in (whole, again))
    assert np.array_equal(window.gaps[0], other.gaps[0])
    assert window.call_times == other.call_times


CALLS = st.lists(st.tuples(st.sampled_from("56"), st.sampled_from(["a", "b", "c"])), min_size=1, max_size=12)


@given(cycle=CALLS, start=st.integers(0, 11), times=st.integers(5, 30))
def test_a_place_is_its_cycle(cycle, start, times):
    """Ranks that repeat the same calls are in one place, wherever their records begin."""
    calls = cycle * times
    first, second = cycle_of(calls), cycle_of(calls[start % len(cycle) : len(calls) - len(cycle)])
    assert first.place == second.place
    assert sum(first.calls.values()) <= len(cycle)


@given(st.lists(st.integers(0, 39), max_size=2, unique=True))
def test_calls_between(logged):
    """A log now and then changes neither the cycle nor the place; one more call in each cycle changes the place.

    Logs in regular distances make a longer cycle.
    """
    step = [("0", "reduce")] * 7 + [("1", "gather")]
    calls = [call for n in range(40) for call in step + ([("0", "log")] if n in logged else [])]
    assert cycle_of(calls).place == cycle_of(step * 40).place
    assert cycle_of(calls).calls["1"] == pytest.approx(1, rel=0.05)
    assert cycle_of([*step, ("1", "gather")] * 40).place != cycle_of(step * 40).place


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, late=st.integers(0, 127), more=st.sampled_from([0.1, 0.3]))
def test_a_late_rank_of_many(seed, late, more):
    """One of 128 ranks is named single, in a job that is healthy otherwise."""
    job = Job(4, 16, 2, seed=seed, per_host=8, noise=0.03)
    assert not find(job.windows(3))
    job.compute = lambda step, rank: more * COMPUTE if rank == late else 0.0
    assert found_in(job) == [("computes", (late,))]


@given(st.floats(0.01, 1.0), st.sampled_from([0.1, 0.22]))
def test_samples_lie_evenly_on_a_step(step, each):
    """Of 32 samples, which are about four seconds, or six, each eighth of a step gets one."""
    moments = np.sort(np.arange(32) * spread(step, each) / step % 1)
    assert np.diff(moments, append=moments[0] + 1).max() < 1 / 8
    assert 0.5 < spread(step, each) / each < 2
