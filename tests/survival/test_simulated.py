"""rm.survive on simulated ranks that are lost: the numbers of a run without loss, in any order, at any size."""

import errno
import logging
import statistics
import time
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.survival.program import Numbers
from tests.sweeping import ALL

import rankmesh as rm
from rankmesh import sim
from rankmesh.backend.world_group import WorldGroup
from rankmesh.sim.simulation import current_context
from rankmesh.sim.store import SimulatedStore
from rankmesh.survival import Job, member_state, session
from rankmesh.survival.machine import Enter, Machine
from rankmesh.survival.rounds import Probe, Rounds
from rankmesh.survival.simulated import SimulatedMembers, SimulatedPeers
from rankmesh.survival.world import FINISHED

SWEPT = pytest.mark.skipif(not ALL, reason="make test-sweeps SWEEP=all runs it")

STEPS = 6
LAYOUT = "tp=2,pp=2,dp=*"


def training(changes=None, refused=None, visit=lambda job, at: None, *, steps=STEPS, copied=True, **how):
    """The program of every rank: after some commits it asks for other layouts, which may depend on the rank.

    ``refused`` has the error of each rank; ``visit`` is called before hold(), after it, and in each step.
    """

    def train(job):
        visit(job, "before")
        numbers = Numbers(job, copied=copied)
        job.hold(numbers.tensors, numbers.shardings)
        numbers.check(job.step)
        visit(job, "after")
        for step in range(job.step, steps):
            numbers.step(step)
            visit(job, "step")
            job.commit(step + 1)
            if layout := (changes or {}).get(step + 1):
                try:
                    job.relayout(layout(job.rank) if callable(layout) else layout, **how)
                except (rm.PlanError, rm.LayoutError) as error:
                    if refused is None:
                        raise
                    refused[job.rank] = error
        numbers.check(steps)
        return job.rank, str(job.plan.mesh), job.epoch

    return train


def survived(size, lose, *, order="deterministic", layout=LAYOUT, program=None, **how):
    """What each of ``size`` members returned, if it ended with a rank: that, the layout and the epoch."""
    train = program or training(copied=bool(how.get("redundancy")))
    values = sim.run(lambda: rm.survive(train, layout, **how), size, lose=lose, order=order, initialise=False)
    return {member: value for member, value in enumerate(values) if value is not None}


def ranks_of(ended):
    """The ranks of the members that ended with one."""
    return sorted(rank for rank, *_ in ended.values())


def test_every_member_logs_why_another_one_is_left_out(caplog):
    """As a warning on the lowest member that is left, as information on the others, a spare that waits included."""
    with caplog.at_level(logging.INFO, "rankmesh.survival"):
        survived(4, {0: 2}, layout="tp=1,pp=1,dp=2", spares=2)
    records = [record for record in caplog.records if record.name == "rankmesh.survival"]
    lines = {(record.levelname, record.getMessage()) for record in records}
    why = (
        "rankmesh: epoch 1 goes on without member 0 (evidence: its process has ended, as member 1 on its host reports)"
    )
    assert lines == {("WARNING", why), ("INFO", why)}
    assert len(records) == 3


# Where a member may die besides: what it calls then.
PLACES = {
    "before it agrees": (Rounds, "agree"),
    "before it adopts": (Machine, "concluded"),
    "as it enters the world": (WorldGroup, "install"),
    "as it holds": (Job, "hold"),
    "as state moves": (member_state, "restore"),
    "as it leaves the world": (WorldGroup, "leave"),
    "as it has returned": (session, "device_done"),
}


def dying(monkeypatch, owner, name, member, times):
    """A simulated rank ends when it calls this for the n-th time."""
    original, counts = getattr(owner, name), Counter()

    def call(*args, **named):
        context = sim.simulation.current_context()
        counts[context.rank] += 1
        if context.rank == member and counts[member] == times:
            context.simulation.members.lost([member])
        return original(*args, **named)

    monkeypatch.setattr(owner, name, call)
    return counts


@pytest.mark.parametrize("spares", [0, 1])
def test_the_last_to_return_ends_before_the_others_know(spares, monkeypatch):
    """8 ranks: the store knows that ``train`` has returned on all of them, so nobody does a step again."""
    add, ended = SimulatedStore.add, []

    def adds(store, key, number):
        now = add(store, key, number)
        if key.endswith(FINISHED) and now == 8 and not ended:
            context = current_context()
            ended.append(context.rank)
            context.simulation.members.lost([context.rank])
        return now

    monkeypatch.setattr(SimulatedStore, "add", adds)
    values = survived(8 + spares, {}, spares=spares)
    assert values == {rank: (rank, "tp=2,pp=2,dp=2", 0) for rank in range(8) if rank != ended[0]}


@pytest.mark.few(4)
@pytest.mark.parametrize("second", [0, 1, 8, 5])
@pytest.mark.parametrize("place", PLACES)
def test_a_second_loss_in_the_regroup(place, second, monkeypatch):
    """Member 3 is lost at step 3, and another one, or the spare that takes over, at each point of the regroup."""
    times = {"as it enters the world": 2, "as it holds": 2}.get(place, 1)
    if second == 8 and place in ("as it holds", "as it has returned"):
        times = 1
    counts = dying(monkeypatch, *PLACES[place], second, times)
    assert ranks_of(survived(11, {3: 3}, spares=3)) == [*range(8)]
    assert counts[second] == times


@pytest.mark.parametrize(
    ("lose", "epochs"),
    [
        ({6: 3}, 1),
        ({0: 3, 11: 3}, 1),  # two replicas fill each other
        ({6: 2, 0: 4}, 2),  # of the first one's replica a member that waits takes over
    ],
    ids=str,
)
def test_a_replica_is_lost(lose, epochs):
    """dp=4 becomes dp=3."""
    values = survived(16, lose, shrink="dp")
    assert sorted(values.values()) == [(rank, "tp=2,pp=2,dp=3", epochs) for rank in range(12)]


def test_a_rank_that_has_returned_becomes_a_spare(monkeypatch):
    """dp=2 loses a rank as the others return: three of its replica have a result of the old plan, and return None."""
    dying(monkeypatch, *PLACES["as it has returned"], 7, 1)
    assert ranks_of(survived(8, {}, shrink="dp")) == [0, 1, 2, 3]


def test_a_rank_that_returns_without_hold_is_an_error():
    """After a loss, on all ranks: the job does not end as if they had trained; the spares learn why it ends."""

    def train(job):
        if not job.epoch:
            training(copied=False)(job)

    with pytest.raises(sim.RanksFailed, match=r"train\(\) returned without a call of hold\(\)") as raised:
        sim.run(lambda: rm.survive(train, LAYOUT, shrink="dp"), 8, lose={1: 3}, initialise=False)
    assert Counter(map(type, raised.value.failures.values())) == {rm.PlanError: 4, rm.ConnectError: 3}


def raising(error, handled=(), *, late=False):
    """A program of which ranks raise ``error(job, step)``, if it is one, in a step, before its collective or ``late``.

    It regroups where it can handle an error.
    """

    def train(job):
        weights = torch.zeros(2)
        while True:
            try:
                job.hold({"w": weights}, {"w": rm.Sharding(job.plan.mesh, None, (2,), "float32")})
                for step in range(job.step, STEPS):
                    if late:
                        dist.all_reduce(weights, group=job.groups["dp"].pg)
                    if (raised := error(job, step)) is not None:
                        raise raised
                    if not late:
                        dist.all_reduce(weights, group=job.groups["dp"].pg)
                    job.commit(step + 1)
                return job.epoch
            except handled:  # noqa: PERF203  - a loop of attempts
                job.regroup()

    return train


def ended(train, size, layout="dp=*", *, order="deterministic", **how):
    """What each member returned, or the error that it ended with."""
    run = {"order": order, "return_exceptions": True, "initialise": False}
    return sim.run(lambda: rm.survive(train, layout, **how), size, **run)


def test_an_error_of_the_program():
    """A rank whose train raises is left out, and its error is the one that run raises; the others go on."""
    bug = ValueError("a bug")
    train = raising(lambda job, step: bug if (job.rank, job.epoch) == (1, 0) else None)
    assert sim.run(lambda: rm.survive(train, "dp=*", spares=1), 3, return_exceptions=True) == [1, bug, 1]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_that_another_member_repeats(kind):
    """Whoever is at rank 1 raises in step 2: the second time the job ends on every rank, with that error."""
    values = ended(raising(lambda job, step: kind("a bug") if (job.rank, step) == (1, 2) else None), 8, spares=4)
    raised = [value for value in values if type(value) is kind]
    assert [str(error) for error in raised] == ["a bug"] * 2
    message = (
        f"the rank at dp=1 raised the same error again in step 2: {kind.__name__}: a bug; no other member can avoid it"
    )
    rest = [value for value in values if type(value) is not kind]
    assert len(rest) == 6
    assert all(isinstance(value, rm.ConnectError) and message in str(value) for value in rest), rest


def test_an_error_that_comes_later_again():
    """An error of another text is another one: a spare takes over each time, also where several are in one step."""
    errors = {(0, 2): "fault 0", (1, 3): "fault 1", (2, 3): "another fault"}

    def error(job, step):
        return ValueError(errors[job.epoch, step]) if job.rank == 1 and (job.epoch, step) in errors else None

    values = ended(raising(error), 7, spares=3)
    assert values.count(3) == 4
    assert sum(isinstance(value, ValueError) for value in values) == 3


@pytest.mark.parametrize("fails", [(2, 5), (4,), (STEPS - 1,)])
@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_full_disk_costs_one_spare(kind, fails):
    """Whoever is at rank 0 saves in some steps, and fails: its successor does that step again, and the job ends."""

    def error(job, step):
        full = kind(errno.ENOSPC, "no space is left", f"/checkpoints/{step}")
        return full if job.rank == 0 and step in fails else None

    values = ended(raising(error, late=True), 5, "dp=2", spares=3)
    assert sum(type(value) is kind for value in values) <= 2
    assert all(isinstance(value, Exception) and "no space is left" in str(value) for value in values)


def test_an_error_of_a_successor_in_another_step():
    """Rank 0 fails to save in step 2, and its successor, which saves there, in step 4: other ranks cannot avoid it."""

    def error(job, step):
        full = OSError(errno.ENOSPC, "no space is left", f"/checkpoints/{step}")
        return full if job.rank == 0 and (job.epoch, step) in ((0, 2), (1, 4)) else None

    values = ended(raising(error), 5, "dp=2", spares=3)
    assert sum(isinstance(value, OSError) for value in values) == 2


@settings(max_examples=50 if ALL else 12)
@given(
    seed=st.integers(0, 2**32 - 1),
    lose=st.dictionaries(st.integers(0, 9), st.integers(1, STEPS), max_size=2),
    redundancy=st.integers(0, 1),
)
@example(seed=0, lose={0: 2, 1: 4}, redundancy=0)  # who serves the store after rank 0
@example(seed=0, lose={3: 2, 8: 4}, redundancy=1)  # the spare that took over
@example(seed=0, lose={2: STEPS, 9: 3}, redundancy=1)
def test_spares_take_over(seed, lose, redundancy):
    """8 ranks and 2 spares, of which any two are lost, in any order, and no shard is gone: all numbers are right."""
    at_once = len({*lose.values()}) < len(lose)
    assume(not (at_once and redundancy))  # one may keep the other's copies
    assume(redundancy or not (len(lose) == 2 and max(lose) < 8 and max(lose) - min(lose) == 4))  # replicas of a shard
    assert ranks_of(survived(10, lose, order=seed, spares=2, redundancy=redundancy)) == [*range(8)]


# -- what ranks hold and commit -------------------------------------------------------------------------------------


def errors_of(train, size, **how):
    """The errors that ranks ended with, in words, by rank."""
    values = ended(train, size, **how)
    return {rank: f"{type(one).__name__}: {one}" for rank, one in enumerate(values) if isinstance(one, Exception)}


@pytest.mark.parametrize("redundancy", [0, 1])
@pytest.mark.parametrize(
    ("shape", "dtype", "given"),
    [((4,), "float32", torch.zeros(3)), ((4,), "float32", torch.zeros(2).double()), ((6,), "float32", torch.zeros(3))],
    ids=["shape", "dtype", "sharding"],
)
def test_hold_refuses_a_wrong_shard(shape, dtype, given, redundancy):
    """Rank 1 of 2 gives another shape or dtype than its sharding's, or another sharding: it ends, with the reason."""

    def train(job):
        wrong = job.rank == 1
        sharding = rm.Sharding(job.plan.mesh, ("dp",), shape if wrong else (4,), dtype)
        job.hold({"w": given if wrong else torch.zeros(2)}, {"w": sharding})
        dist.barrier(group=job.groups["dp"].pg)

    errors = errors_of(train, 2, redundancy=redundancy)
    if shape == (4,):
        start = (
            f"PlanError: rank 1: hold() was given a wrong shard: tensor 'w' is {given.dtype} {list(given.shape)}, but"
        )
        assert errors[1].startswith(start)
    else:  # whichever came later
        assert any(
            "PlanError" in error and "hold() was given other shardings than on an" in error for error in errors.values()
        )
    assert errors.keys() == {0, 1}


@pytest.mark.parametrize(
    ("redundancy", "other", "lose", "after"),
    [(0, {0: 2}, False, 0), (1, {2: 4}, False, 3), (0, {4: 6}, True, 5), (0, {1: 1, 2: 1}, True, 5)],
    ids=["the first", "with copies", "at a loss", "commits left out"],
)
def test_ranks_that_commit_different_steps_are_refused(redundancy, other, lose, after):
    """Rank 1 of 2 commits another step: the job ends, at once, at the next commit, or when a member is lost."""
    committed = Counter()

    def train(job):
        job.hold({"w": torch.zeros(2)}, {"w": rm.Sharding(job.plan.mesh, ("dp",), (4,))})
        for step in range(job.step, STEPS):
            dist.barrier(group=job.groups["dp"].pg)
            job.commit(other.get(step, step + 1) if job.rank == 1 else step + 1)
            committed[job.rank] = step + 1
            if lose and job.rank == 0 and step == 4:
                raise ValueError("a fault")

    errors = errors_of(train, 3, spares=1, redundancy=redundancy)
    assert errors.keys() == {0, 1, 2}
    assert any("have every rank commit the same steps, in the same order" in error for error in errors.values()), errors
    assert committed[1] == after or committed[0] == after


# -- every epoch makes progress -------------------------------------------------------------------------------------

# Where a rank raises, each time that it comes there: what it calls then.
FAILING = {"connect": (WorldGroup, "install"), "hold": (Job, "hold"), "step": (dist, "all_reduce")}


@contextmanager
def failing(place, who, kind, times=1000):
    """Members raise when they come to a place, so many ``times``; the epochs: whether members changed, and the step."""
    owner, name = FAILING[place]
    call, concluded, counts, epochs = getattr(owner, name), Machine.concluded, Counter(), {}

    def called(*args, **named):
        rank = current_context().rank
        if rank in who and counts[rank] < times:
            counts[rank] += 1
            raise kind("broken")
        return call(*args, **named)

    def adopts(machine, *given, **how):
        before = machine.members
        assert machine.epoch.number < 50, "epochs follow each other without end"
        if isinstance(action := concluded(machine, *given, **how), Enter):
            epochs[machine.epoch.number] = machine.members != before, machine.step
        return action

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, called)
        patched.setattr(Machine, "concluded", adopts)
        yield epochs


@settings(max_examples=100 if ALL else 15)
@given(
    place=st.sampled_from(sorted(FAILING)),
    who=st.sets(st.integers(0, 4), min_size=1),
    kind=st.sampled_from([RuntimeError, ValueError]),
    times=st.sampled_from([1, 2, 1000]),
    handled=st.sampled_from([(), RuntimeError, Exception]),
    spares=st.integers(0, 2),
    shrink=st.sampled_from([None, "dp"]),
    order=st.one_of(st.just("deterministic"), st.integers(0, 2**32 - 1)),
)
def test_an_epoch_makes_progress_or_the_job_ends(place, who, kind, times, handled, spares, shrink, order):
    """In one of two epochs a step is committed or a member lost; else the job ends, on every rank with the error."""
    train = raising(lambda *_: None, handled)
    with failing(place, who, kind, times) as epochs:
        values = ended(train, 5, order=order, spares=spares, shrink=shrink)
    changes = [(True, 0), *(epochs[number] for number in sorted(epochs))]
    assert all(a[0] or b[0] or b[1] > a[1] for a, b in pairwise(changes)), changes
    errors = [value for value in values if isinstance(value, BaseException)]
    # Calls that were cut are raised where a rank noticed that before it was told of the change.
    assert all("broken" in str(error) or isinstance(error, sim.DivergenceError) for error in errors), errors
    assert not errors or any("broken" in str(error) for error in errors)


def test_a_step_that_nobody_commits():
    """A loss that did not happen is an error, and so is a rank that is not there."""
    with pytest.raises(rm.PlanError, match=r"lose=\{1: 100\}.*nobody committed step 100"):
        survived(9, {1: 100}, spares=1)
    with pytest.raises(rm.PlanError, match="lose names rank 9, and 9 ranks are simulated, 0 to 8"):
        survived(9, {9: 1}, spares=1)


def test_a_program_that_does_not_survive():
    """Without rm.survive nobody commits."""
    with pytest.raises(rm.PlanError, match="nobody committed"):
        sim.run(dist.get_rank, 2, lose={0: 1})


# -- what a change costs ----------------------------------------------------------------------------------------


class Costs:
    """Calls of stores and messages of each member from the first loss on; the seconds until all have the outcome.

    ``whole``: from the start of the job on.
    """

    def __init__(self, monkeypatch, *, whole=False):
        self.calls, self.messages, self.seconds = Counter(), Counter(), 0.0
        self._counts, self._started, self._inside = whole, 0.0, set()
        for name in ("set", "get", "add", "append", "compare_set", "deleteKey", "check", "wait"):
            monkeypatch.setattr(SimulatedStore, name, self._counted(getattr(SimulatedStore, name)))
        send, lost, concluded = SimulatedPeers._send, SimulatedMembers.lost, Machine.concluded

        def sent(peers, member, message):
            self.messages[peers.member] += self._counts
            return send(peers, member, message)

        def begins(members, ranks):
            self._started, self._counts = self._started or time.perf_counter(), True
            return lost(members, ranks)

        def adopted(machine, *given, **how):
            self.seconds = time.perf_counter() - self._started
            return concluded(machine, *given, **how)

        monkeypatch.setattr(SimulatedPeers, "_send", sent)
        monkeypatch.setattr(SimulatedMembers, "lost", begins)
        monkeypatch.setattr(Machine, "concluded", adopted)

    def _counted(self, call):
        def counted(store, *args):
            context = current_context()
            if not self._counts or context is None or context.rank in self._inside:
                return call(store, *args)
            self.calls[context.rank] += 1
            self._inside.add(context.rank)
            try:
                return call(store, *args)
            finally:
                self._inside.discard(context.rank)

        return counted


def regrouped(size, monkeypatch, lose):
    """The costs of a change among so many members, of which four are spares."""
    with monkeypatch.context() as patched:
        costs = Costs(patched)
        plan = rm.Mesh(tp=4, dp=(size - 4) // 4)

        def train(job):
            weights = torch.full((2,), float(job.rank))
            job.hold({"w": weights}, {"w": rm.Sharding(job.plan.mesh, ("tp",), shape=(8,))})
            for step in range(job.step, 3):
                dist.all_reduce(weights, group=job.groups["dp"].pg)
                job.commit(step + 1)
            return float(weights[0])

        values = sim.run(lambda: rm.survive(train, plan, spares=4), size, lose=lose, initialise=False, timeout=60)
    assert len([value for value in values if value is not None]) == size - 4
    return costs


def test_steps_without_losses_ask_nothing(monkeypatch):
    """9 members, one a spare: 12 steps with their commits take no more calls of a store or messages than two."""
    found = []
    for steps in (2, 12):
        with monkeypatch.context() as patched:
            found.append(Costs(patched, whole=True))
            survived(9, {}, program=training(steps=steps, copied=False), spares=1)
    assert found[0].calls == found[1].calls
    assert found[0].messages == found[1].messages


@pytest.mark.parametrize("sizes", [(16, 64), pytest.param((16, 1024), marks=SWEPT)])
def test_what_a_change_asks_of_the_store(sizes, monkeypatch):
    """Few and many members lose three: each of the others asks as much of the stores, and sends as many messages."""
    found = [regrouped(size, monkeypatch, {1: 2, size // 2: 2, size - 6: 2}) for size in sizes]
    assert len({statistics.median(costs.calls.values()) for costs in found}) == 1
    # All but a few: who serves the round reads the arrivals, by 31 ranks, and asks for those that are absent.
    for size, costs in zip(sizes, found, strict=True):
        *others, _, _, busiest = sorted(costs.calls.values())
        assert others[-1] <= 80
        assert busiest <= 80 + size // 4
        assert statistics.median(costs.messages.values()) <= 4
        assert sum(costs.messages.values()) <= 12 * size
        assert costs.seconds < 60


@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.long), pytest.param(256, marks=SWEPT)])
def test_the_server_is_lost_in_the_round(size, monkeypatch):
    """Member 0 dies when it has asked for those that are absent: messages grow with the members, not their square."""
    ask, asked = Probe.ask, []

    def dies(probe, members):
        replies = ask(probe, members)
        if len(members) > 1 and not asked:
            asked.append(probe.peers.member)
            current_context().simulation.members.lost([probe.peers.member])
        return replies

    monkeypatch.setattr(Probe, "ask", dies)
    costs = regrouped(size, monkeypatch, {1: 2, size - 6: 2})
    assert asked == [0]
    assert sum(costs.messages.values()) <= 20 * size
