"""State that survives: who keeps copies, what a commit costs, and what is restored, loaded or lost."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.limits import LONG
from tests.sockets import free_port
from tests.survival.test_simulated import dying
from tests.transfer import brute
from tests.transfer.strategies import shardings

import rankmesh as rm
from rankmesh import sim
from rankmesh.core import Mesh
from rankmesh.core import sharding as cached
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError, RankmeshError
from rankmesh.survival import state
from rankmesh.survival.agreement import Report, conclude
from rankmesh.survival.members import Members
from rankmesh.survival.redundancy import Copies, ReplicaHolders, Snapshot, StateLayout, checked
from rankmesh.survival.state import EpochState, Writes, load_boxes
from rankmesh.transfer.live.exchange import Copy, Exchange, MessageSchedule
from rankmesh.transfer.live.stream import Message, Piece

STEPS = 6


def epoch_state(tensors, sharding=None, hosts="a", redundancy=0, *, rank=0, device="cpu", spare=None):
    """What a rank holds in an epoch, of which each tensor has this sharding."""
    mesh = Mesh(dp=len(hosts)) if sharding is None else sharding.mesh
    layout = StateLayout(mesh, {} if sharding is None else dict.fromkeys(tensors, sharding), (*hosts,), redundancy)
    return EpochState(0, layout, tensors, rank=rank, device=torch.device(device), spare=spare)


HALVES = Sharding(Mesh(dp=2), ("dp",), (4,))


# -- who keeps copies -----------------------------------------------------------------------------------------------


@st.composite
def jobs(draw):
    """Shardings on a mesh, the host of each rank, and how many copies are kept."""
    mesh = Mesh(**draw(st.sampled_from([{"tp": 2, "dp": 2, "pp": 2}, {"dp": 3}, {"tp": 4, "pp": 2}, {"dp": 1}])))
    stored = {f"w{number}": draw(shardings(mesh, (5, 3))) for number in range(draw(st.integers(1, 3)))}
    hosts = draw(
        st.lists(st.sampled_from(draw(st.sampled_from(["a", "ab", "abc"]))), min_size=mesh.size, max_size=mesh.size)
    )
    return stored, hosts, draw(st.integers(0, mesh.size - 1))


@given(jobs())
def test_what_has_no_replica_elsewhere_is_kept_elsewhere(job):
    """On other hosts where there are several, by as many ranks as there can be; what has a replica by nobody."""
    stored, hosts, redundancy = job
    several = len(set(hosts)) > 1

    def apart(one, other):
        return hosts[one] != hosts[other] if several else one != other

    copied = ReplicaHolders(stored, hosts, redundancy)
    ranks = range(len(hosts))
    for name, sharding in stored.items():
        kept = {rank: copied.by_name.get(name, {}).get(rank, ()) for rank in ranks}
        elements = {rank: brute.kept(sharding, rank) for rank in ranks}
        for rank in ranks:
            assert all(apart(rank, holder) for holder in kept[rank])
            assert len(set(kept[rank])) == len(kept[rank])
            for element in elements[rank]:
                holders = [other for other in ranks if element in elements[other]]
                copies = {holder for other in holders for holder in kept[other]}
                if any(apart(rank, other) for other in holders):
                    assert not copies
                else:
                    assert len(copies) == min(redundancy, sum(apart(rank, other) for other in ranks))


def test_the_ranks_of_a_host_share_what_they_keep():
    """4 hosts of 4 ranks: each rank keeps copies of one other, of two with redundancy=2."""
    stored = {"w": Sharding(Mesh(dp=16), ("dp",), (64,))}
    hosts = [f"node{rank // 4}" for rank in range(16)]
    for redundancy in (1, 2):
        of = ReplicaHolders(stored, hosts, redundancy).by_rank
        assert sorted(holder for ranks in of.values() for holder in ranks) == sorted([*range(16)] * redundancy)
        assert all(
            hosts[one] != hosts[other]
            for ranks in of.values()
            for one, other in pairwise((*ranks, ranks[0]))
            if one != other
        )


def test_more_copies_than_other_ranks_are_refused():
    """And what is no whole number."""
    assert checked(3, 4) == 3
    with pytest.raises(
        PlanError, match="redundancy is 4, but the plan has 4 ranks, and each copy is on another one; give at most 3"
    ):
        checked(4, 4)
    with pytest.raises(RankmeshError, match="redundancy"):
        checked(-1, 4)


def test_fewer_copies_than_asked_for_are_warned_of(recwarn):
    """Three ranks on one host and one on another: redundancy=2 is more than the other host has."""
    sharding, tensors = Sharding(Mesh(tp=4), ("tp",), (8,)), {"w": torch.zeros(2)}
    with pytest.warns(
        UserWarning,
        match="redundancy is 2, but only 1 ranks are on other hosts than rank 0, on 'a', and keep copies of its shards",
    ):
        assert epoch_state(tensors, sharding, "aaab", 2).warn_of_fewer_copies()
    assert not epoch_state(tensors, sharding, "aabb", 2).warn_of_fewer_copies()
    assert not epoch_state({}, None, "aa", 2).warn_of_fewer_copies()
    assert len(recwarn) == 0


def test_memory_of_an_epoch_is_freed_with_it():
    """Its snapshots are as large as what is held: they do not wait for a garbage collection."""
    gc.disable()
    try:
        for redundancy in (0, 1):
            epoch = epoch_state({"w": torch.zeros(2)}, HALVES, "ab", redundancy)
            if not redundancy:  # whose copies need the other ranks
                epoch.commit(1, lambda call: call(), lambda: None)
            freed = weakref.ref(epoch)
            del epoch
            assert freed() is None
    finally:
        gc.enable()


# -- what is said of it ---------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(jobs())
def test_a_layout_is_read_as_it_was_written(job):
    """Shardings, hosts and redundancy; on another mesh with the same axes the shardings are those of its ranks."""
    stored, hosts, redundancy = job
    mesh = next(iter(stored.values())).mesh
    layout = StateLayout(mesh, stored, tuple(hosts), redundancy)
    assert StateLayout.read(layout.text) == layout
    moved = layout.on(Mesh.from_dict({**mesh.to_dict(), "offset": 5}))
    assert {name: one.of(rank + 5) for name, one in moved.items() for rank in range(mesh.size)} == {
        name: one.of(rank) for name, one in stored.items() for rank in range(mesh.size)
    }


def test_what_is_written_does_not_depend_on_caches():
    """Equal shardings, of which the one was made long before the other: members write the same text."""
    mesh, stored = Mesh(tp=2), {}
    for name in "ab":
        cached._cuts.cache_clear()
        cached._shard_map.cache_clear()
        stored[name] = Sharding(mesh, ("tp",), (8,))
    layout = StateLayout(mesh, stored, ("a",) * 2, 0)
    assert layout.text.count('"shape"') == 1
    assert len(set(map(id, layout.on(mesh).values()))) == 1


def test_a_restore_loads_no_module():
    """What it needs is there before a loss, for which all ranks would wait; numpy loads a part of itself on demand."""
    code = (
        "import sys, rankmesh.survival; print('numpy.ma' in sys.modules, 'rankmesh.transfer.live.run' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LONG)
    assert run.stdout.split() == ["True", "True"]


# -- commit ---------------------------------------------------------------------------------------------------------


def test_commits_copy_into_memory_of_two_snapshots():
    """The third and later ones allocate nothing; the tensors are those of the steps, however they are in memory."""
    tensors = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.tensor(3, dtype=torch.int64), "c": torch.zeros(0, 4)}
    state = epoch_state(tensors)
    state.copies = mock.Mock(names=["b"])
    for step in range(5):
        with mock.patch.object(torch, "empty", wraps=torch.empty) as made:
            state.commit(step, lambda call: call(), tuple)
        assert made.call_count == (step < 2)
        assert state.snapshots[step].memory[:8].view(torch.int64).item() == 3 + step
        for tensor in tensors.values():
            tensor += 1
    assert sorted(state.snapshots) == [3, 4]
    for step in (3, 4):
        assert torch.equal(state.snapshots[step].tensors["a"], torch.arange(6.0).view(2, 3).t() + step)
    assert [one.memory.nbytes for one in state.snapshots.values()] == [128, 128]


def test_the_memory_of_snapshots_is_kept_from_epoch_to_epoch():
    """The next epoch's snapshots take the block of the step that is not needed, then the other one: none is made."""
    spare, tensors = [], {"a": torch.arange(6.0)}
    before, now = (epoch_state(tensors, spare=spare) for _ in range(2))
    for step in (6, 7):
        before.commit(step, lambda call: call(), tuple)
    blocks = {one.memory.data_ptr() for one in before.snapshots.values()}
    before.keep((7, None))
    with mock.patch.object(torch, "empty", wraps=torch.empty) as made:
        now.commit(7, lambda call: call(), tuple)
        assert torch.equal(before.snapshots[7].tensors["a"], tensors["a"])
        before.keep(())
        for step in (8, 9):
            now.commit(step, lambda call: call(), tuple)
        assert made.call_count == 0
    assert {one.memory.data_ptr() for one in now.snapshots.values()} == blocks
    assert spare == []


@pytest.mark.parametrize(
    ("blocks", "taken", "left"),
    [
        ([100, 128, 300], 1, [100, 300]),  # the smallest that is large enough
        ([128, 300], 0, [300]),
        ([270], 0, [142]),  # what is left of it suits the next snapshot
        ([1024], None, []),  # all of it would stay for two snapshots
        ([140], 0, []),
        ([250, 90], None, []),  # too much would be left of one, the other is too small: nothing here is of use
    ],
)
def test_memory_of_another_size_is_used_or_freed(blocks, taken, left):
    """A snapshot of 128 bytes: where its layout has changed, a job does not keep more memory than the new one needs."""
    spare = [torch.zeros(size, dtype=torch.uint8) for size in blocks]
    given = [one.data_ptr() for one in spare]
    memory = Snapshot({"a": torch.zeros(32)}, spare=spare).memory
    assert memory.nbytes == 128
    assert (memory.data_ptr() in given) == (taken is not None)
    assert taken is None or memory.data_ptr() == given[taken]
    assert [one.nbytes for one in spare] == left


@st.composite
def epochs(draw):
    """What a rank holds in two epochs that follow each other: often the same; the mesh, and the rank in each."""
    mesh = Mesh(**draw(st.sampled_from([{"tp": 2, "dp": 2}, {"dp": 3}, {"tp": 2, "pp": 2, "dp": 2}])))
    kinds = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from([(), (5,), (7, 3)]))
        dtype = draw(st.sampled_from(["float32", "int64", "bfloat16"]))
        kinds[f"w{number}"] = draw(st.lists(shardings(mesh, shape, dtype), min_size=1, max_size=2))
    both = [{name: draw(st.sampled_from(some)) for name, some in kinds.items()} for _ in range(2)]
    rank = st.integers(0, mesh.size - 1)
    at = draw(rank)
    return mesh, both, (at, draw(st.one_of(st.just(at), rank))), draw(st.integers(0, 1))


def _local(stored, rank, padding):
    found = {name: brute.local(one, rank) for name, one in stored.items()}
    dtypes = {name: getattr(torch, one.dtype) for name, one in stored.items()}
    return {
        name: torch.where(torch.tensor(one) < 0, padding, torch.tensor(one)).to(dtypes[name])
        for name, one in found.items()
        if one is not None
    }


_PADDED = {"w": Sharding(Mesh(dp=2), ("dp",), (5,), padded={0: 6})}
_WHOLE, _HALF = ({"w": Sharding(Mesh(dp=2), (None, cut), (4, 6))} for cut in (None, "dp"))


@given(epochs())
@example((Mesh(dp=2), [_PADDED, _PADDED], (1, 1), 0))
@example((Mesh(dp=2), [_WHOLE, _HALF], (1, 1), 0))
@example((Mesh(dp=2), [_WHOLE, _HALF], (1, 1), 1))
def test_the_first_snapshot_of_an_epoch_is_what_a_copy_would_be(found):
    """Also where it is the last epoch's, or a part of it, which a rank goes on with if it held all; both keep it."""
    mesh, (before, now), (was, rank), redundancy = found

    def epoch(stored, rank, padding=-2):
        layout = StateLayout(mesh, stored, ("a",) * mesh.size, redundancy)
        return EpochState(0, layout, _local(stored, rank, padding), rank=rank, device=torch.device("cpu"), spare=[])

    old, new, copied = epoch(before, was, padding=-1), epoch(now, rank), epoch(now, rank)
    with mock.patch.object(Copies, "send"), mock.patch.object(Copies, "wait"):
        old.commit(6, lambda call: call(), tuple)
        new.commit(6, lambda call: call(), tuple, old)
        copied.commit(6, lambda call: call(), tuple)
    first, expected = new.snapshots[6], copied.snapshots[6]
    assert [*first.tensors] == [*expected.tensors]
    assert all(torch.equal(one, expected.tensors[name]) for name, one in first.tensors.items())
    assert all(one.dtype == expected.tensors[name].dtype for name, one in first.tensors.items())
    elements = {name: (brute.kept(before[name], was), brute.kept(one, rank)) for name, one in now.items()}
    is_part = first.part_of is not None
    assert is_part or first.memory.nbytes == expected.memory.nbytes
    assert not (is_part and redundancy)  # copies are sent from one block
    assert not is_part or (
        first.memory is old.snapshots[6].memory and all(had >= has for had, has in elements.values())
    )
    assert is_part or (before, now, was, redundancy) != (_WHOLE, _HALF, 1, 0)
    if (before, was) == (now, rank) and not any(one.padded for one in now.values()):
        assert first is old.snapshots[6]
    old.keep(())
    assert all(one is not first.memory for one in old._spare)
    with mock.patch.object(Copies, "send"), mock.patch.object(Copies, "wait"):
        for step in (7, 8) if is_part else ():  # the second one takes the place of the part
            for tensor in new.tensors.values():
                tensor += 1
            new.commit(step, lambda call: call(), tuple)
            found = new.snapshots[step]
            assert found.part_of is None
            assert found.memory.nbytes == expected.memory.nbytes
            assert all(torch.equal(one, new.tensors[name]) for name, one in found.tensors.items())
            assert all(torch.equal(one, expected.tensors[name]) for name, one in first.tensors.items())
    if not is_part:
        new.keep(())
        assert new._spare == [first.memory]


def test_a_step_that_is_committed_again_replaces_its_snapshot():
    """Not the other one."""
    tensor = torch.zeros(())
    state = epoch_state({"a": tensor})
    for step, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
        tensor.fill_(value)
        state.commit(step, lambda call: call(), tuple)
    found = {step: one.tensors["a"].item() for step, one in state.snapshots.items()}
    assert found == {1: 1.0, 2: 3.0}


class _Working:
    """A GPU that has done its work after a few looks, in place of ``torch.cuda.Event``."""

    def __init__(self, looks):
        self.looks = looks

    def __call__(self):
        return self

    def record(self, stream):
        assert stream == "the current one"

    def query(self):
        self.looks -= 1
        return self.looks < 0


class _Left(BaseException):
    """What the check of a commit raises."""


@pytest.mark.parametrize("redundancy", [0, 1])
@pytest.mark.parametrize("ends", [1, 4, None])
def test_a_commit_waits_for_a_gpu(monkeypatch, redundancy, ends):
    """A GPU simulated: the step counts once its copies are made, not where the epoch ended before, or meanwhile."""
    gpu, checks = _Working(looks=3), []
    monkeypatch.setattr(torch.cuda, "Event", gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    state = epoch_state({"w": torch.zeros(2)}, HALVES, "ab", redundancy, device="cuda:0")
    state.copies = mock.Mock(names=[]) if redundancy else None

    def check():
        checks.append(gpu.looks)
        if len(checks) == ends:
            raise _Left

    if ends is None:
        state.commit(1, lambda call: call(), check)
        assert [*state.snapshots] == [1]
        assert checks == [2, 1, 0, -1]
    else:
        with pytest.raises(_Left):
            state.commit(1, lambda call: call(), check)
        assert not state.snapshots
    assert not redundancy or state.copies.send.called == (ends is None)


def test_copies_under_way_between_gpus_do_not_count():
    """An abort ends them as if they had arrived."""
    copies = Copies(ReplicaHolders({"w": HALVES}, ["", ""], 1), 0, torch.device("cpu"))
    with mock.patch.object(dist, "P2POp"), mock.patch.object(dist, "batch_isend_irecv", return_value=[mock.Mock()]):
        copies.send(1, Snapshot({"w": torch.zeros(2)}))
    copies.device = torch.device("cuda", 0)
    assert copies.steps() == set()


def test_a_step_counts_when_the_copies_of_it_have_arrived():
    """One that is under way does not, also where an earlier commit of it did; nor one that was overwritten."""
    copies = Copies(ReplicaHolders({"w": HALVES}, ["", ""], 1), 0, torch.device("cpu"))
    snapshot, came = Snapshot({"w": torch.zeros(2)}), mock.Mock()
    with mock.patch.object(dist, "P2POp"), mock.patch.object(dist, "batch_isend_irecv", return_value=[came]):
        for step in (1, 2):
            copies.send(step, snapshot)
            assert copies.steps() >= {step}
        came.wait.side_effect = RuntimeError("the connection is closed")
        copies.send(2, snapshot)
        assert copies.steps() == {1}
        assert copies.at(1).keys() == {1}
        came.wait.side_effect = None
        for step in (3, 4):
            copies.send(step, snapshot)
            assert step in copies.steps()
        assert copies.steps() == {3, 4}
        assert [one.memory.nbytes for one in copies.kept[1].values()] == [8, 8]


def test_what_restore_gives_has_to_be_the_box():
    """Another shape or dtype is refused; what fits is written where the box is, and nowhere else."""
    sharding = Sharding(Mesh(tp=2), ("tp", None), (4, 3))
    tensors = {"w": torch.zeros(2, 3)}
    stored = epoch_state(tensors, sharding, "aa", rank=1)
    asked = []
    load_boxes(stored, [("w", ((3, 4), (1, 3)))], 7, lambda *given: asked.append(given) or torch.ones(1, 2))
    assert asked == [("w", ((3, 4), (1, 3)), 7)]
    assert tensors["w"].tolist() == [[0, 0, 0], [0, 1, 1]]
    for wrong in (torch.ones(2, 1), torch.ones(1, 2, dtype=torch.float64), [1, 1]):
        with pytest.raises(
            PlanError, match=r"restore\('w', \(\(3, 4\), \(1, 3\)\), 7\) gave .*, but the box is torch.float32"
        ):
            load_boxes(stored, [("w", ((3, 4), (1, 3)))], 7, lambda *_, wrong=wrong: wrong)


# -- agreement ------------------------------------------------------------------------------------------------------


def test_a_job_of_which_no_holder_is_left():
    """With restore= it goes on at the step at which the epoch began, and loads everything; else it ends."""
    members = Members.first("dp=1", world_size=2, spares=1)
    left = Report(committed=True, loads=True, began=7, ended=(0,))
    outcome = conclude({3: members}, 3, {1: left})
    value = {"ranks": (1,), "spares": (), "plan": None, "step": 7, "source": None, "load": True}
    assert outcome.value.items() >= value.items()
    assert "keep copies with redundancy=1" in conclude({3: members}, 3, {1: replace(left, loads=False)}).message


def test_members_without_a_common_step_do_not_load():
    """Some of what they hold is of another step than the rest would be."""
    members = Members.first("dp=2", world_size=3, spares=1)
    reports = {
        rank: Report(committed=True, loads=True, steps={0: steps}) for rank, steps in enumerate([(2, 3), (4, 5)])
    }
    outcome = conclude({0: members}, 0, reports)
    assert outcome.reason == "failed"
    assert "rank 0 is at step 3 and rank 1 at step 5" in outcome.message


# -- no write after an epoch ---------------------------------------------------------------------------------------


class _Slow:
    """A wire whose messages of ones arrive when the test lets them."""

    def __init__(self):
        self.waits, self.arrive, self.received = threading.Event(), threading.Event(), []

    def staging(self, _):
        return torch.device("cpu")

    def together(self, _):
        return False

    def start(self, row):
        for one in row:
            self.received.append(one.tensor)
            one.work = self

    def wait(self, _):
        self.waits.set()
        assert self.arrive.wait(100)
        for tensor in self.received:
            tensor.view(torch.float32).fill_(1)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_cancelled_exchange_writes_nothing(cancelled):
    """Messages and copies are written, in one piece of memory or several; not once the writes are closed."""
    wire, writes, tensors = _Slow(), Writes(), {"from": torch.ones(2)}
    into = {"w": torch.zeros(4), "v": torch.zeros(4), "to": torch.zeros(2)}
    everything = (slice(None),)
    pieces = [Piece(name, everything, 16 * number, 16) for number, name in enumerate("wv")]
    received = [[Message(1, tuple(pieces[:1]), 16, 16)], [Message(1, tuple(pieces), 32, 32)]]
    exchange = Exchange(wire, tensors, into, timedelta(seconds=100), write=writes)
    moving = threading.Thread(target=exchange.all, args=[MessageSchedule([[], []], received, [])])
    with mock.patch.object(threading, "excepthook"):  # a thread that is left behind ends with the error
        moving.start()
        assert wire.waits.wait(100)
        if cancelled:
            writes.close()
        wire.arrive.set()
        moving.join(100)
    exchange.attempt(lambda: exchange.all(MessageSchedule((), (), [Copy("from", everything, "to", everything)])))
    assert {name: tensor.tolist() for name, tensor in into.items()} == {
        name: [0.0 if cancelled else 1.0] * len(tensor) for name, tensor in into.items()
    }


# -- a job that loses ranks -----------------------------------------------------------------------------------------


def whole(mesh):
    """Shardings: cut over all ranks, of one stage, and whole on each."""
    cut = "-".join(mesh.axes)
    last = mesh.axes.get("pp", 1) - 1
    return {
        "cut": Sharding(mesh, (cut, None), (8, 3), "float64"),
        "stage": Sharding(mesh, (None,), (5,), "float32", {"pp": last} if "pp" in mesh.axes else None),
        "whole": Sharding(mesh, (), (), "int64"),
    }


def elements(sharding, rank, step):
    """What a rank holds of a tensor at the beginning of a step."""
    return torch.tensor(brute.local(sharding, rank) * 100 + step).to(getattr(torch, sharding.dtype))


def shards_of(job_shardings, rank, step):
    """The tensors of a rank at the beginning of a step."""
    return {name: elements(one, rank, step) for name, one in job_shardings.items() if one.holds(rank)}


def assert_right(tensors, job_shardings, rank, step):
    """They are what a rank holds at the beginning of a step."""
    right = shards_of(job_shardings, rank, step)
    assert all(torch.equal(tensors[name], right[name]) for name in right)


@pytest.fixture
def job(monkeypatch):
    """Run a simulated job; the step at which its last epoch began, the bytes that were received, what was loaded."""
    run, received, loaded = state.run, [], []

    def runs(moves, *given, **how):
        done = run(moves, *given, **how)
        assert done.bytes_in == moves.bytes_in(dist.get_rank())
        received.append(done.bytes_in)
        return done

    monkeypatch.setattr(state, "run", runs)

    def simulated(size, lose, layout, *, loads=False, coupled=True, **how):
        def load(name, box, step):
            loaded.append((name, box, step))
            sharding = whole(rm.Mesh.parse(layout))[name]
            everything = Sharding(Mesh(dp=1), None, sharding.shape, sharding.dtype)
            return elements(everything, 0, step)[tuple(slice(*ends) for ends in box)]

        def train(job):
            stored, began = whole(job.plan.mesh), job.step
            tensors = shards_of(stored, job.rank, -1 if job.epoch else 0)
            job.hold(tensors, stored)
            assert_right(tensors, stored, job.rank, began)
            for step in range(began, STEPS):
                for group in job.groups.values() if coupled else ():
                    dist.all_reduce(torch.ones(()), group=group.pg)
                for tensor in tensors.values():
                    tensor += 1
                job.commit(step + 1)
            assert_right(tensors, stored, job.rank, STEPS)
            return began

        how |= {"restore": load if loads else None}
        values = sim.run(lambda: rm.survive(train, layout, **how), size, lose=lose, initialise=False)
        (began,) = {value for value in values if value is not None}
        return began, sum(received), sorted(loaded)

    return simulated


# Rank 3's shards: 2 x 3 of float64, 5 of float32, one int64.
SHARDS = 48 + 20 + 8


@pytest.mark.parametrize(
    ("size", "lose", "layout", "how", "received"),
    [
        (5, {3: 3}, "tp=2,pp=2", {"spares": 1}, SHARDS),
        # Ranks 1 and 3 are kept by 2 and 0.
        (6, {1: 3, 3: 3}, "tp=2,pp=2", {"spares": 2}, 48 + 8 + SHARDS),
        # Rows 0..1, 2..3, 6..7 are held, and by the next rank kept; needed are 0..2, 3..5, 6..7 by members 0, 1 and 3.
        # Member 0 lacks row 2; member 1 holds 3, and lacks 4..5, which member 3 keeps.
        (4, {2: 3}, "dp=*", {"shrink": "dp"}, 3 * 24),
        # All wait for rank 3's copies, so that a step is left which all of them have.
        (5, {3: 3}, "dp=4", {"spares": 1, "coupled": False}, SHARDS),
    ],
    ids=["one", "two that do not keep for each other", "the plan has shrunk", "without collectives"],
)
def test_redundancy_keeps_shards_without_a_replica(job, size, lose, layout, how, received):
    """What lost ranks alone held is sent to those that need it, and no byte more."""
    began, *moved = job(size, lose, layout, redundancy=1, **how)
    assert began in (2, 3)
    assert moved == [received, []]


# Where a rank dies in a commit.
PLACES = {"take": (EpochState, "_take"), "send": (Copies, "send"), "arrived": (Copies, "_meet")}


@pytest.mark.few(8)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("place", "times"), [("take", 2), ("send", 2), ("arrived", 2), ("arrived", 6), ("take", 7), ("send", 7)]
)
def test_redundancy_at_the_first_and_the_last_commits(job, monkeypatch, rank, place, times):
    """Any rank, before and between what a commit does: the others have a step in common, and it is whole."""
    counts = dying(monkeypatch, *PLACES[place], rank, times)
    _, *moved = job(5, {}, "tp=2,pp=2", spares=1, redundancy=1)
    assert moved == [SHARDS - 20 * (rank < 2), []]
    assert counts[rank] == times


@pytest.mark.parametrize(
    ("size", "lose", "how", "had"),
    [
        (5, {3: 3}, {"spares": 1}, (3,)),
        (6, {0: 3, 3: 3}, {"spares": 2, "redundancy": 1}, (0, 3)),  # which keeps its copies
    ],
)
def test_state_is_lost_without_copies(job, size, lose, how, had):
    """On every rank, and on the spares: LostState with tensor, box, and who had it."""
    with pytest.raises(sim.RanksFailed) as raised:
        job(size, lose, "tp=2,pp=2", **how)
    errors = raised.value.failures.values()
    ranks = "ranks" if len(had) > 1 else "rank"
    assert {(type(error), error.missing) for error in errors} == {(rm.LostState, (("cut", ((6, 8), (0, 3)), had),))}
    assert len(errors) == 4
    assert all(f"no rank is left that holds 'cut'[6:8, 0:3], which {ranks} " in str(error) for error in errors)
    assert all("keep copies" in str(error) for error in errors)


CUTS = [("cut", ((2, 4), (0, 3)), 2), ("cut", ((6, 8), (0, 3)), 2)]


@pytest.mark.parametrize(
    ("size", "lose", "received", "loaded"),
    [
        (5, {3: 3}, SHARDS - 48, CUTS[1:]),
        (6, {2: 3, 3: 3}, 2 * 8, [*CUTS, ("stage", ((0, 5),), 2), ("stage", ((0, 5),), 2)]),
    ],
    ids=["what one held", "what two held, each of whose successors loads it"],
)
def test_restore_loads_exactly_what_nobody_holds(job, size, lose, received, loaded):
    """On the ranks that need it, at the step that all others have; the rest comes from the other ranks."""
    assert job(size, lose, "tp=2,pp=2", spares=size - 4, loads=True) == (2, received, loaded)


def test_everything_is_loaded_where_no_holder_is_left(job):
    """A spare of a job of one rank: it goes on at the step at which the epoch began."""
    began, _, loaded = job(2, {0: 3}, "dp=1", spares=1, loads=True)
    assert (began, [name for name, *_, step in loaded if step == 0]) == (0, ["cut", "stage", "whole"])
    with pytest.raises(sim.RanksFailed, match="no member is left that held anything"):
        job(2, {0: 3}, "dp=1", spares=1)


# -- processes ------------------------------------------------------------------------------------------------------


def _copied(me, port, elements):
    """A rank is killed while it receives the copy of another, of which gloo has sent a part by then."""
    me.launched(port)
    send = Copies.send

    def sends(self, step, snapshot, kept):
        send(self, step, snapshot, kept)
        if self.rank == 1 and me.rank == 1:
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    Copies.send = sends

    def train(job):
        tensors = {"w": torch.zeros(elements)}
        job.hold(tensors, {"w": Sharding(job.plan.mesh, ("dp",), (2 * elements,), "float32")})
        tensors["w"] += 1
        job.commit(1)
        return job.epoch

    return rm.survive(train, "dp=2", spares=1, redundancy=1, timeout=6)


def test_a_rank_is_killed_in_the_middle_of_a_message(outcomes):
    """2 ranks and a spare: gloo never ends the call of the one that sent to it, which goes on without that call."""
    ended = outcomes(3, _copied, free_port(), 1 << 24, world=None, limit=60.0)
    assert [one.value for one in ended] == [1, None, 1], "\n".join(map(str, ended))


def _behind(me, port, folder):
    """A spare waits for state when another member dies; the state arrives only once the next epoch has its own."""
    me.launched(port)
    (Path(folder) / str(me.rank)).write_text(str(os.getpid()), encoding="utf-8")
    waited, restored, late = Exchange._waited, threading.Event(), []

    def waits(exchange, *given):
        arrived = waited(exchange, *given)
        if me.rank == 2 and not late:
            late.append(threading.current_thread())
            os.kill(int((Path(folder) / "3").read_text(encoding="utf-8")), signal.SIGKILL)
            assert restored.wait(100)
        return arrived

    Exchange._waited = waits
    tensors = {"w": torch.full((6, 4), 1.0).t()}

    def train(job):
        while True:
            try:
                job.hold(tensors, {"w": Sharding(job.plan.mesh, None, (4, 6), "float32")})
                if job.epoch == 0:
                    dist.barrier(group=job.groups["dp"].pg)
                    if job.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                tensors["w"].fill_(job.epoch)
                restored.set()
                for thread in late:
                    thread.join(100)
                job.commit(1)
                dist.barrier(group=job.groups["dp"].pg)
                return [job.epoch, len(late), tensors["w"].unique().tolist()]
            except RuntimeError:  # noqa: PERF203  - a loop of attempts
                job.regroup()

    return rm.survive(train, "dp=2", spares=2, timeout=5)


def test_a_thread_that_is_left_behind_writes_nothing(outcomes, tmp_path):
    """2 ranks and 2 spares: what arrives after the epoch is not written into the tensors that are trained on."""
    ended = outcomes(4, _behind, free_port(), str(tmp_path), world=None, limit=150.0)
    assert [one.value for one in ended] == [[2, 0, [2.0]], None, [2, 1, [2.0]], None], "\n".join(map(str, ended))
