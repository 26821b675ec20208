"""A guarded job repeats the steps after a difference, and judges: a machine's fault, the program's, or not known."""

import logging
from contextlib import suppress
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from tests.guard.faults import FAULTS, LAYOUT, Trainer
from tests.sweeping import every
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankmesh as rm
from rankmesh import sim
from rankmesh.guard import Guard
from rankmesh.survival.redundancy import Snapshot, Snapshots

STEPS = 12


class Job:
    """A job of ranks that train, and faults: what a function does to the weights of a rank in a step, each time."""

    def __init__(self, fault, steps=STEPS):
        self.fault, self.steps, self.visits = fault, steps, []

    def __call__(self, job):
        """Train, in one epoch."""
        mesh, groups = job.plan.mesh, job.groups
        up = torch.arange(4.0 * groups["dp"].size, dtype=torch.float64).reshape(-1, 2)[: 4 // groups["tp"].size].clone()
        norm = torch.ones(3, dtype=torch.float64)
        shardings = {
            "up": rm.Sharding(mesh, ("tp", None), shape=(len(up) * groups["tp"].size, 2), dtype="float64"),
            "norm": rm.Sharding(mesh, shape=(3,), dtype="float64"),
        }
        job.hold({"up": up, "norm": norm}, shardings)
        for step in range(job.step, self.steps):
            self.visits.append((job.rank, step))
            gradient = up * (step + 1) + groups["dp"].rank
            dist.all_reduce(gradient, group=groups["dp"].pg)
            up -= 0.01 * gradient
            norm += 0.5
            self.fault(self, job, step, {"up": up, "norm": norm})
            job.commit(step + 1)
        self.visits.append((job.rank, self.steps))
        self.fault(self, job, self.steps, {"up": up, "norm": norm})  # after the last commit, before the last check
        return job.rank, up.tolist(), norm.tolist(), job.epoch

    def times(self, rank, step):
        """How often a rank has been in a step."""
        return self.visits.count((rank, step))


def once(rank, step, name):
    """A machine's fault: a number is wrong on a rank in a step, the first time."""

    def fault(train, job, now, tensors):
        if (job.rank, now) == (rank, step) and train.times(rank, step) == 1:
            tensors[name].view(-1)[-1] += 1

    return fault


def ended(train, size, layout="tp=2,dp=3", **how):
    """What each member returned, or why it was left out; they count the visits together."""

    def member():
        try:
            return rm.survive(train, layout, **how)
        except rm.ConnectError as error:
            return str(error)

    return sim.run(member, size, initialise=False)


def of_ranks(values):
    """What was trained, by rank."""
    return {value[0]: value[1:3] for value in values if isinstance(value, tuple)}


@pytest.fixture(scope="module")
def expected():
    """Without a fault."""
    return of_ranks(ended(Job(lambda *_: None), 6))


@pytest.mark.few(2)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("rank", "step", "name"), [(3, 4, "norm"), (0, 2, "up"), (5, 9, "up"), (4, 11, "norm")])
def test_a_machines_fault_costs_its_place(every, rank, step, name, expected, caplog):
    """All repeat the steps, twice; a spare takes over, and the numbers are those without the fault."""
    with caplog.at_level(logging.WARNING, "rankmesh.survival"):
        values = ended(Job(once(rank, step, name)), 7, spares=1, guard=every)
    assert of_ranks(values) == expected
    back, found = step // every * every, -(-(step + 1) // every) * every
    what = f"{name!r} differed on rank {rank} at step {found}, and not after two repeats"
    why = f"{what}: the machine of rank {rank} is at fault"
    assert values[rank] == f"member {rank} was left out of the job, since {why}"
    again, once_more = (
        f"all ranks repeat the steps from {back} on",
        "once more, to learn whether they always give the same",
    )
    lines = [record.getMessage() for record in caplog.records if record.name == "rankmesh.survival"]
    assert lines == [
        f"rankmesh: {name!r} differs on rank {rank} at step {found}; {again}",
        f"rankmesh: {name!r} is equal at step {found} now; {again} {once_more}",
        f"rankmesh: {why} (host simulated, device cpu); it is left out",
        f"rankmesh: epoch 3 goes on without member {rank} (evidence: {why})",
    ]


def of_corpus(fault, steps=6):
    """A program that trains the corpus's model with a fault: of the machine, in step 3 the first time; or each time."""

    def train(job):
        trainer = Trainer(job.groups, fault)
        job.hold(trainer.weights, trainer.shardings())
        for step in range(job.step, steps):
            trainer.step(step)
            job.commit(step + 1)
        return job.rank, {name: one.tolist() for name, one in trainer.weights.items()}

    return train


def first_time(fault):
    """A fault that happens once on a rank."""
    done = set()

    def once_only(trainer, where):
        place = trainer.groups.rank, where, trainer.now
        if place not in done:
            done.add(place)
            fault(trainer, where)

    return once_only


REPORTED = {name: fault for name, fault in FAULTS.items() if fault.tensor is not None}
# Of one rank, whose numbers reach no other one before the check.
OF_ONE_RANK = {
    name: fault
    for name, fault in REPORTED.items()
    if fault.ranks is not None and len(fault.ranks) == 1 and fault.where in ("reduced", "norm", "updated")
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", every(6, OF_ONE_RANK))
def test_a_fault_that_does_not_come_again_is_the_machines(name, caplog):
    """The rank is left out, also of a tie; the numbers are those of a job without it."""
    fault = OF_ONE_RANK[name]
    with caplog.at_level(logging.WARNING, "rankmesh.survival"):
        values = ended(of_corpus(first_time(fault)), 9, LAYOUT, spares=1, guard=2)
    right = ended(of_corpus(lambda *_: None), 8, LAYOUT)
    assert f"the machine of rank {fault.ranks[0]} is at fault" in values[fault.ranks[0]]
    assert sorted(value for value in values if isinstance(value, tuple)) == sorted(right)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", every(6, REPORTED))
def test_a_fault_that_comes_again_is_the_programs(name):
    """The job ends with the error of its tensor, on every rank; no spare is spent."""
    fault = REPORTED[name]
    with pytest.raises(sim.RanksFailed) as raised:
        ended(of_corpus(fault), 9, LAYOUT, spares=1, guard=2)
    errors = [error for error in raised.value.failures.values() if isinstance(error, rm.Diverged)]
    assert [error.tensor for error in errors] == [fault.tensor] * 8
    assert all("the program does it; all numbers were the same both times" in str(error) for error in errors)


def test_the_first_of_two_differences_counts():
    """Rank 0 is wrong at the last commit, rank 3 after it: both are found together, and rank 0 is left out."""

    def fault(train, job, now, tensors):
        once(0, STEPS - 1, "up")(train, job, now, tensors)
        once(3, STEPS, "norm")(train, job, now, tensors)

    values = ended(Job(fault), 7, spares=1, guard=1)
    left = [value for value in values if isinstance(value, str)]
    assert ["'up' differed on rank 0" in one for one in left] == [True]


def test_numbers_that_change_from_run_to_run_blame_nobody(caplog):
    """A step that gives other numbers each time: the difference may be of the program."""

    def fault(train, job, now, tensors):
        once(3, 5, "norm")(train, job, now, tensors)
        if now == 4:
            tensors["up"] += train.times(job.rank, 4) * 2.0**-20

    with caplog.at_level(logging.WARNING, "rankmesh.survival"):
        values = ended(Job(fault), 7, spares=1, guard=2)
    assert sorted(of_ranks(values)) == [*range(6)]
    assert "the program is not deterministic" in caplog.records[-1].getMessage()
    assert "nobody is left out" in caplog.records[-1].getMessage()


def test_of_two_replicas_the_one_that_had_other_numbers(caplog):
    """A number of no effect on others: the repeats tell which of both sides was wrong."""
    with caplog.at_level(logging.WARNING, "rankmesh.survival"):
        values = ended(Job(once(1, 5, "norm")), 3, "tp=1,dp=2", spares=1, guard=2)
    assert "the machine of rank 1 is at fault" in values[1]
    assert [value[2] for value in (values[0], values[2])] == [[1 + 0.5 * STEPS] * 3] * 2


def test_without_a_spare_the_rank_stays(caplog):
    """Its numbers are right now: the job goes on, and the log names it."""
    with caplog.at_level(logging.WARNING, "rankmesh.survival"):
        values = ended(Job(once(2, 5, "norm")), 4, "tp=1,dp=4", guard=2)
    assert [value[2] for value in values] == [[1 + 0.5 * STEPS] * 3] * 4
    assert "nobody can take its place: it stays" in caplog.text


def test_ranks_that_begin_with_other_numbers():
    """There is nothing to go back to: the job ends."""

    def train(job):
        norm = torch.full((2,), float(job.rank))
        job.hold({"norm": norm}, {"norm": rm.Sharding(job.plan.mesh, shape=(2,))})

    with pytest.raises(sim.RanksFailed, match="never found equal"):
        sim.run(lambda: rm.survive(train, "dp=3", guard=1), 3, initialise=False)


@pytest.mark.parametrize(("guard", "error"), [(None, rm.PlanError), (1, rm.Diverged)])
def test_a_model_is_compared_once(guard, error, monkeypatch):
    """At its first `hold`, guarded or not; where ranks have seeded differently, the error tells what to do."""
    checked = []
    check = Guard.check
    monkeypatch.setattr(Guard, "check", lambda self, *step: (checked.append(self), check(self, *step)))

    def train(job):
        torch.manual_seed(0 if seeded else job.rank)
        job.hold(model=nn.Linear(2, 2))
        return len({id(one) for one in checked})

    seeded = True
    assert sim.run(lambda: rm.survive(train, "dp=2", guard=guard), 2, initialise=False) == [2, 2]
    seeded = False
    with pytest.raises(sim.RanksFailed, match="seed every rank equally") as raised:
        sim.run(lambda: rm.survive(train, "dp=2", guard=guard), 2, initialise=False)
    assert {type(one) for one in raised.value.failures.values()} == {error}


def test_a_guard_of_no_steps_is_refused():
    """``guard`` is how many steps lie between two checks."""
    with pytest.raises(sim.RanksFailed, match="guard"):
        sim.run(lambda: rm.survive(lambda job: None, "dp=2", guard=0), 2, initialise=False)


def test_a_step_that_is_kept_is_not_overwritten():
    """Two steps and the one that is kept: a third snapshot only where it is neither of them."""
    made, steps = [], Snapshots()
    for step in range(10):
        steps[step] = steps.overwritten(step, kept=3 if step > 3 else None)
        if steps[step] is None:
            steps[step] = Snapshot({"w": torch.zeros(1)})
            made.append(steps[step])
        assert {step, step - 1} & {*range(10)} <= steps.keys()
        assert step < 4 or 3 in steps
    assert (len(made), sorted(steps)) == (3, [3, 8, 9])


# -- in processes ---------------------------------------------------------------------------------------------------


def _process(me, fault):
    me.launched()
    found = []

    def train(job):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        job.hold(model=model, optimizer=optimizer)
        for step in range(job.step, 8):
            found.append(step)
            batch = torch.full((2, 4), 1.0 + step + job.rank, dtype=torch.float64)
            (model(batch) ** 2).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=job.groups["dp"].pg)
            optimizer.step()
            optimizer.zero_grad()
            times = {"": 0, "machine": 1, "program": 99}[fault]
            if (job.rank, step) == (2, 5) and found.count(step) <= times:
                model[1].bias.data[0] += 1
            job.commit(step + 1)
        return [one.tolist() for one in model.parameters()]

    try:
        result = rm.survive(train, "dp=4", spares=1, guard=2 if fault else None)
    except rm.RankmeshError as error:
        return f"{type(error).__name__}: {error}", found
    return result, found


def _replicated(me, way, lost):
    me.launched()

    def train(job):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        group, unused = job.groups["dp"].pg, way == "unused"
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02, find_unused_parameters=unused)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if way == "one pass before":
            ddp(torch.zeros(4, 64)).sum().backward()
            optimizer.zero_grad()
        job.hold(model=model, optimizer=optimizer)
        for step in range(job.step, 6):
            if (me.rank, step) == (1, 3) and lost:
                raise ValueError("a fault")
            torch.manual_seed(100 * step + job.rank)
            ddp(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.commit(step + 1)
        return [one.tolist() for one in model.parameters()]

    with suppress(ValueError):
        return rm.survive(train, "dp=3", spares=1)


@pytest.mark.long
@pytest.mark.parametrize("way", ["unused", "one pass before"])
def test_buckets_of_a_replicated_model(outcomes, way):
    """3 ranks and a spare with DDP: bit-equal after a loss if its buckets do not change between two training steps."""
    right, values = ([one.value for one in outcomes(4, _replicated, way, lost, world=None)] for lost in (False, True))
    assert [values[0], values[2], values[3]] == right[:3]
    assert values[1] is None


@pytest.mark.long
def test_a_machines_fault_in_processes(outcomes):
    """4 ranks and a spare over gloo, a model and AdamW: the numbers are those of a job without the fault."""
    right = [one.value for one in outcomes(5, _process, "", world=None)]
    values = [one.value for one in outcomes(5, _process, "machine", world=None)]
    assert values[2][0].startswith("ConnectError: member 2 was left out of the job, since '1.bias' differed on rank 2")
    assert [value[0] for value in (*values[:2], *values[3:])] == [right[0][0]] * 4
    assert values[2][1] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]


@pytest.mark.long
def test_a_programs_fault_in_processes(outcomes):
    """Every rank ends with the error; the spare learns why the job has ended."""
    values = [one.value[0] for one in outcomes(5, _process, "program", world=None)]
    assert all(value.startswith("Diverged: '1.bias' differs within dp at step 6") for value in values[:4])
    call = "the last collective of as many elements before it was all_reduce float64[4] over dp"
    assert all(call in value and "all numbers were the same both times" in value for value in values[:4])
    assert values[4].startswith("ConnectError: the job ends, since every rank raised an error: Diverged: '1.bias'")


# -- a model is held ------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("lose", [{}, {1: 3}, {0: 5}])
def test_a_model_and_its_optimizer_survive(lose):
    """With Adam's moments and steps, which loading replaces, also if a rank is lost before another has made a step.

    What BatchNorm has seen is no replica: the guard, which compares it with nothing, finds no difference.
    """

    def train(job):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        job.hold(model=model, optimizer=optimizer)
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        for step in range(job.step, 7):
            batch = torch.arange(6, dtype=torch.float64).view(2, 3) * (1.0 + step + job.rank)
            (model(batch) * batch).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=job.groups["dp"].pg)
            optimizer.step()
            optimizer.zero_grad()
            job.commit(step + 1)
        return job.rank, [one.tolist() for one in model.parameters()]

    values = sim.run(lambda: rm.survive(train, "dp=3", spares=1, guard=2), 4, lose=lose, initialise=False)
    expected = sim.run(lambda: rm.survive(train, "dp=3", spares=1, guard=2), 4, initialise=False)
    assert {one[0]: one[1] for one in values if one} == {one[0]: one[1] for one in expected if one}


def test_state_of_a_parameter_that_is_trained_later_is_an_error():
    """Its optimizer state is not among what hold() has found: the first commit that has it is an error."""

    def train(job):
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters())
        job.hold(model=model, optimizer=optimizer)
        for step in range(4):
            model.bias.requires_grad_(step > 1)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            job.commit(step + 1)

    def member():
        with pytest.raises(rm.PlanError) as raised:
            rm.survive(train, "dp=2")
        return raised.value.name

    assert sim.run(member, 2, initialise=False) == ["bias"] * 2
