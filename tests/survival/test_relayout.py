"""job.relayout: whatever the layouts and the losses, the numbers are those of a run that never changed."""

import os
import re
import statistics
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sockets import free_port, kept, served_once
from tests.survival.faults import Faults, left_behind
from tests.survival.program import INDEX, MANY, PRIME, ROWS, Numbers, text_of
from tests.survival.test_simulated import PLACES, STEPS, SWEPT, Costs, dying, survived, training
from tests.sweeping import ALL

import rankmesh as rm
from rankmesh import sim
from rankmesh.backend.registries import every_group
from rankmesh.survival import ask, simulated
from rankmesh.survival.agreement import Report, conclude
from rankmesh.survival.machine import Abort, Left, Machine
from rankmesh.survival.members import Members, Sizes, plan_of

LAYOUTS = ["dp=4", "tp=2,dp=2", "dp=2,tp=2", "tp=4", "pp=2,tp=2", "cp=2,dp=3", "ep=5", "tp=2", "dp=1,tp=3"]


def changed(size, program, lose=None, *, layout="dp=4", **how):
    """What the ranks of a job that changes its layout returned."""
    return sorted(survived(size, lose or {}, layout=layout, program=program, **how).values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_another_layout(layout):
    """4 ranks and 2 spares: other sizes, order and axes, more ranks and fewer; each step is done once."""
    ended = changed(6, training({3: layout}), spares=2)
    mesh, same = rm.Mesh.parse(layout), layout == "dp=4"
    assert [rank for rank, _, _ in ended] == list(range(mesh.size))
    assert {(axes, epoch) for _, axes, epoch in ended} == {(str(mesh), 0 if same else 1)}


def test_what_a_change_took():
    """Once hold() has returned, job.seconds has every phase of the change."""
    phases = {}

    def visit(job, at):
        if at == "after":
            phases.setdefault(job.epoch, set()).update(job.seconds)

    changed(2, training({1: "tp=2"}, visit=visit), layout="dp=2")
    assert phases == {0: {"connect"}, 1: {"free", "agree", "connect", "transfer"}}


def test_there_and_back_with_little_memory():
    """Three changes in a row, after each step, and back, with a budget of 768 bytes."""
    changes = {1: "tp=2,dp=3", 2: "tp=2", 3: "dp=4", 4: "tp=3,dp=2"}
    ended = changed(6, training(changes, budget=768), spares=2)
    assert {(axes, epoch) for _, axes, epoch in ended} == {("tp=3,dp=2", 4)}
    assert len(ended) == 6


def test_a_size_that_is_left():
    """4 ranks and a spare: a size of * keeps the number of ranks."""
    assert {axes for _, axes, _ in changed(5, training({2: "tp=2,dp=*"}), spares=1)} == {"tp=2,dp=2"}


@settings(max_examples=40 if ALL else 8)
@given(
    changes=st.dictionaries(st.integers(1, STEPS - 1), st.sampled_from(LAYOUTS), min_size=1, max_size=3),
    lose=st.dictionaries(st.integers(0, 6), st.integers(1, STEPS - 1), max_size=2).filter(
        lambda lose: len({*lose.values()}) == len(lose)
    ),
    shrink=st.sampled_from([None, "dp"]),
    order=st.one_of(st.just("deterministic"), st.integers(0, 2**32 - 1)),
)
def test_any_sequence_of_layouts_and_losses(changes, lose, shrink, order):
    """Up to three layouts, each with a loss or not, in any order of ranks: bit-equal to a run that never changed."""
    if shrink:
        changes = {step: layout for step, layout in changes.items() if "dp" in layout}
    elif len(lose) > 1:  # five are left
        changes = {step: layout for step, layout in changes.items() if rm.Mesh.parse(layout).size < 6}
    refused = {}
    ended = changed(7, training(changes, refused), lose, order=order, shrink=shrink, spares=3, redundancy=1)
    assert [rank for rank, _, _ in ended] == list(range(len(ended)))
    assert len({axes for _, axes, _ in ended}) == 1
    assert not refused or lose  # too few are left for the layout


@pytest.mark.few(6)
@pytest.mark.parametrize("who", [0, 2, 4])
@pytest.mark.parametrize("place", [one for one in PLACES if one != "as it has returned"])
def test_a_member_is_lost_in_the_change(place, who, monkeypatch):
    """4 ranks that become 5, and a spare: one is lost on the way, and the job goes on under one of both plans."""
    times = 1 + (place in ("as it enters the world", "as it holds") and who < 4)
    counts = dying(monkeypatch, *PLACES[place], who, times)
    ended = changed(6, training({3: "ep=5"}), spares=2, redundancy=1)
    assert counts[who] == times
    assert len({axes for _, axes, _ in ended}) == 1
    assert ended[0][1] in ("ep=5", "dp=4")


@pytest.mark.parametrize(
    ("ask", "how"),
    [
        (lambda _: "tp=2,dp=4", {}),
        (lambda _: "tp=4", {"shrink": "dp"}),
        (lambda _: "dp=2", {"redundancy": 2}),
        (lambda _: "tp=", {}),
        (lambda _: rm.Mesh(tp=2, offset=2), {}),
        (lambda _: "tp=4", {"budget": 639}),
        (lambda rank: "tp=4" if rank == 2 else "tp=2,dp=2", {}),
        (lambda rank: "tp=9" if rank == 2 else "tp=2,dp=2", {}),
    ],
    ids=["members", "shrink", "redundancy", "spec", "offset", "budget", "different", "one does not fit"],
)
def test_what_is_refused_changes_nothing(ask, how):
    """Every rank raises, nothing is destroyed, and the job goes on in the same epoch."""
    refused, how = {}, dict(how)
    ended = changed(5, training({4: ask}, refused=refused, budget=how.pop("budget", None)), spares=1, **how)
    assert refused.keys() == {0, 1, 2, 3}
    assert ended == [(rank, "dp=4", 0) for rank in range(4)]


class Adding(torch.nn.Module):
    """A model of one plain parameter, of this rank."""

    def __init__(self, rank):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.full((2,), float(rank)))


def test_a_model_of_tensors_that_further_ranks_do_not_have():
    """Along tp each rank has a tensor of its own: another size of tp is refused on every rank; dp may change."""
    refused = []

    def train(job):
        tp = job.groups["tp"].rank if "tp" in job.plan.mesh.axes else 0
        model = Adding(tp)
        job.hold(model=model, replicated="dp")
        for step in range(job.step, 4):
            job.commit(step + 1)
            if step == 1:
                for layout in ("tp=4,dp=1", "dp=4"):
                    with pytest.raises(rm.PlanError) as raised:
                        job.relayout(layout)
                    refused.append((layout, raised.value.axes))
                job.relayout("tp=2,dp=1")
        return str(job.plan.mesh), job.epoch, model.bias.tolist() == [tp, tp]

    values = sim.run(lambda: rm.survive(train, "tp=2,dp=2"), 4, initialise=False)
    assert Counter(refused) == {("tp=4,dp=1", ("tp",)): 4, ("dp=4", ("tp",)): 4}
    assert values == [("tp=2,dp=1", 1, True)] * 2 + [None] * 2


def test_before_hold():
    """relayout() before hold(): there is no state to move."""

    def train(job):
        job.relayout("tp=2")

    with pytest.raises(sim.RanksFailed, match=r"relayout\(\) was called before hold\(\)"):
        sim.run(lambda: rm.survive(train, "dp=2"), 2, initialise=False)


def naming_more(layout, epochs):
    """A program that gives hold() a further tensor under its second layout; what it is told then, and its epoch."""

    def train(job):
        epochs.add(job.epoch)
        names = ["w", "more"] if job.epoch == 1 else ["w"]
        sharding = rm.Sharding(job.plan.mesh, (next(iter(job.plan.mesh.axes)),), (4,), "float64")
        zeros = torch.zeros(4 // job.plan.mesh.size, dtype=torch.float64)
        job.hold({name: zeros.clone() for name in names}, dict.fromkeys(names, sharding))
        job.commit(1)
        try:
            job.relayout(layout)
        except rm.PlanError as error:
            return job.epoch, str(error)

    return train


@pytest.mark.parametrize("order", ["deterministic", 1, 2])
@pytest.mark.parametrize("layout", ["tp=2", "tp=4", "tp=1"])
def test_a_tensor_of_no_snapshot(layout, order):
    """Under the new plan hold() names one more tensor: all go back, and the next request for it is told why."""
    epochs = set()
    train = naming_more(layout, epochs)
    values = sim.run(lambda: rm.survive(train, "dp=2", spares=3), 5, initialise=False, order=order)
    assert values[2:] == [None] * 3
    for epoch, error in values[:2]:
        assert epoch == 2
        assert f"the job went back from {layout}, since rank 0 raised PlanError: hold() was given 'more'" in error
    assert epochs == {0, 1, 2}


def test_a_tensor_of_no_snapshot_where_one_is_slow(monkeypatch):
    """A spare learns what hold() was given when the others have found out: it waits for them, and all go back."""
    met = []

    class Slow(simulated.SimulatedWorld):
        def taken(self, key):
            if self.rank == 3 and "refused" not in met:  # until the others wait for this rank, or the epoch ends
                super().taken("go on")
            return super().taken(key)

        def meet(self, key):
            met.append(key)
            if met.count("refused") == self.size - 1:
                self.give("go on", "")
            super().meet(key)

    monkeypatch.setattr(simulated, "SimulatedWorld", Slow)
    train = naming_more("tp=2", set())
    values = sim.run(lambda: rm.survive(train, "dp=2", spares=2), 4, initialise=False)
    assert [value and value[0] for value in values] == [2, 2, None, None]


@pytest.mark.parametrize(
    ("commits", "error", "old", "refused"),
    [
        ({0: 3}, "", True, False),  # a member is lost, and too few are left
        ({0: 3}, "ValueError: no", True, True),
        ({0: 3, 1: 4}, "", False, False),  # each rank has committed a step: the layout stays, and the job ends
    ],
)
def test_how_long_a_layout_is_tried(commits, error, old, refused):
    """6 members have changed from 5 ranks to tp=2,dp=3, and one is lost: back, as long as a rank has not committed."""
    first = Members.first("dp=5", world_size=6, spares=1)
    history = {0: first, 1: first.relaid(Sizes.of("tp=2,dp=3", plan_of("tp=2,dp=3", 6), None))}
    here = Report(steps={1: tuple(commits.values())}, commits=commits, committed=True)
    reports = {member: replace(here, error=error if member == 2 else "") for member in range(5)}
    outcome = conclude(history, 1, reports, before=0)
    assert outcome.agreed == old
    if old:
        following = history[1].following(outcome.value)
        assert (following.plan, following.ranks) == (first.plan, (0, 1, 2, 3, 4))
        assert (outcome.value["before"], bool(outcome.value["refused"])) == (None, refused)


@pytest.mark.parametrize("when", ["before", "after", "step"])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a bug"), RuntimeError("shapes differ"), rm.PlanError("no")], ids=repr
)
def test_a_layout_that_the_program_cannot_build(when, error, caplog):
    """5 ranks and a spare: all go back to the old layout, at the step before the change; numbers are right."""

    def visit(job, at):
        if (str(job.plan.mesh), at) == ("tp=2,dp=3", when) and job.rank:
            raise error

    ended = changed(6, training({3: "tp=2,dp=3"}, {}, visit), layout="dp=5", spares=1)
    assert ended == [(rank, "dp=5", 2) for rank in range(5)]
    (logged,) = [record.getMessage() for record in caplog.records if record.name == "rankmesh.survival"]
    assert logged.startswith("rankmesh: the job went back from tp=2,dp=3, since rank ")
    assert f"raised {type(error).__name__}: {error}" in logged


def test_what_epochs_leave_in_the_store():
    """Changes there and back: after each there are keys of this epoch and of the last two at most."""
    epochs, changes = {}, {step: "tp=2,dp=2" if step % 2 else "dp=4" for step in range(1, STEPS + 1)}

    def visit(job, at):
        if (job.rank, at) == (0, "after"):
            keys = sim.simulation.current_context().simulation.stores[0]
            epochs[job.epoch] = {int(number) for key in keys for number in re.findall(r"epoch/(\d+)", key)}

    ended = changed(5, training(changes, visit=visit), spares=1)
    assert {epoch for *_, epoch in ended} == {STEPS} == {max(epochs)}
    assert all(number - 2 <= min(found) for number, found in epochs.items())


def costs_of(size, monkeypatch):
    """What a job of so many ranks, which changes its layout once, asks of the stores."""
    with monkeypatch.context() as patched:
        costs = Costs(patched, whole=True)

        def train(job):
            weights = torch.zeros(2)
            job.hold({"w": weights}, {"w": rm.Sharding(job.plan.mesh, ("tp",), (2 * job.groups["tp"].size,))})
            for step in range(job.step, 3):
                job.commit(step + 1)
                if step == 1:
                    job.relayout(rm.Mesh(tp=4, dp=size // 8, pp=2))
            return job.epoch

        layout = rm.Mesh(tp=4, dp=size // 4)
        values = sim.run(lambda: rm.survive(train, layout), size, initialise=False, timeout=60)
    assert set(values) == {1}
    return costs


@pytest.mark.long
@pytest.mark.parametrize("size", [64, pytest.param(1024, marks=SWEPT)])
def test_what_a_change_asks_of_the_store(size, monkeypatch):
    """16 ranks and more: each asks as much of the stores, but for a few that conclude a round, and sends no more."""
    few, many = costs_of(16, monkeypatch), costs_of(size, monkeypatch)
    assert statistics.mode(few.calls.values()) == statistics.mode(many.calls.values())
    assert max(many.calls.values()) <= max(few.calls.values()) + size // 2
    assert statistics.median(many.messages.values()) <= 4


# -- processes ------------------------------------------------------------------------------------------------------


def changing(me, port, folder):
    """A member of a job that somebody asks for a layout, that then asks for two itself, and loses a rank."""
    me.launched(port)
    served_once()
    before, dying, plans, found = kept(), Faults(me.rank, [{"member": 2, "at": "step", "n": 25}], folder), [], {}

    def train(job):
        numbers = Numbers(job)
        job.hold(numbers.tensors, numbers.shardings)
        numbers.check(job.step)
        plans.append([job.epoch, job.step, str(job.plan.mesh)])
        for step in range(job.step, MANY):
            numbers.step(step)
            if (job.rank, step, job.epoch) == (1, 3, 0):
                first = f"{(at := job._session.driver.peers.contacts[0]).address}:{at.heartbeat}"
                os.environ["RANKMESH_JOB_KEY"] = job.key
                for layout in ("dp=7", "tp=2,dp=*"):
                    with suppress(rm.PlanError):
                        ask.request_layout(first, layout)
                        found["accepted"] = layout
                found["status"] = ask.status(first)
            dying.step(step)
            job.commit(step + 1)
            if step + 1 in (10, 20):
                job.relayout("ep=5" if step + 1 == 10 else "pp=3")
        numbers.check(MANY)
        return job.rank

    result = rm.survive(train, "dp=4", spares=1, redundancy=1, timeout=60)
    return {**left_behind(folder, before), "result": result, "plans": plans, **found}


@pytest.fixture
def others(outcomes, tmp_path):
    """Run a program in 5 processes, of which number 2 is killed; what each of the others returned."""

    def run(program):
        ended = outcomes(5, program, free_port(), str(tmp_path), world=None, limit=100.0)
        assert [one.ok for one in ended] == [True, True, False, True, True], text_of(ended)
        values = [one.value for one in ended if one.ok]
        assert all(max(one["left"]) <= 0 for one in values), text_of(ended)
        return values

    return run


def test_processes_change_their_layout(others):
    """5 processes: 4 ranks and a spare, then tp=2,dp=2 from outside, 5 ranks, 3 ranks; one of those is killed."""
    ended = others(changing)
    assert sorted(str(one["result"]) for one in ended) == ["0", "1", "2", "None"]
    (epoch, step, plan), *later = ended[0]["plans"]
    assert (epoch, step, plan) == (0, 0, "dp=4")
    assert [plan for _, _, plan in later] == ["tp=2,dp=2", "ep=5", "pp=3", "pp=3"]
    assert 4 <= later[0][1] <= 10
    assert [step for _, step, _ in later[1:3]] == [10, 20]
    assert later[3][1] in (24, 25)
    assert ended[1]["accepted"] == "tp=2,dp=*"
    status = ended[1]["status"]
    assert (status["epoch"], status["members"], status["spares"]) == (0, [0, 1, 2, 3, 4], [4])
    assert (status["plan"], status["last_change"]["what"]) == ("dp=4", "start")


def alternating(me, port, folder):
    """A member of a job with the groups of a second layout beside those of its plan, which loses a rank."""
    me.launched(port)
    served_once()
    before, dying, made = kept(), Faults(me.rank, [{"member": 2, "at": "step", "n": 3}], folder), []

    def train(job):
        with rm.connect(rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp")])) as other:
            rows = rm.Sharding(job.plan.mesh, ("dp",), (ROWS,), "float64")
            block = rm.Sharding(other.plan.mesh, ("tp",), (ROWS,), "float64")
            w, half = INDEX.chunk(4)[job.rank].clone(), torch.zeros(ROWS // 2, dtype=torch.float64)
            there = rm.Transfer({"w": rows}, {"w": block})
            job.hold({"w": w}, {"w": rows})
            for step in range(job.step, STEPS):
                there.run({"w": w}, {"w": half}, group=job.groups["dp"].pg)
                made.append([job.epoch, len(every_group())])
                total = half.sum()
                dist.all_reduce(total, group=other["tp"].pg)
                dying.step(step)
                w.add_(total).remainder_(PRIME)
                job.commit(step + 1)
        return [job.rank, w.tolist()]

    result = rm.survive(train, "dp=4", spares=1, redundancy=1, timeout=60)
    return {**left_behind(folder, before), "result": result, "made": made}


def test_two_layouts_at_once(others):
    """4 ranks and a spare: state goes to a second layout each step, no group is made for it; one rank is killed."""
    ended = others(alternating)
    right = INDEX
    for _ in range(STEPS):
        right = (right + right.sum()) % PRIME
    assert [x for _, w in sorted(one["result"] for one in ended) for x in w] == right.tolist()
    made = [number for one in ended for number in one["made"]]
    assert len({tuple(one) for one in made}) == 2, made


# -- from outside ---------------------------------------------------------------------------------------------------


def asked_for(layout, size):
    """The message of somebody outside."""
    sizes = Sizes.of(layout, plan_of(layout, size), None)
    return {"what": "relayout", "sizes": {"spec": sizes.data["spec"], "plan": sizes.data["plan"]}}


def member(number, **how):
    """A member of a job of 4 ranks and a spare."""
    one = Machine()
    one.begin(number, Members.first("dp=4", world_size=5, spares=1, **how))
    one.entered()
    return one


def test_a_request_from_outside_waits_for_a_commit():
    """A rank ends the epoch after its next commit, and all go on in that layout, by its report alone."""
    one = member(2)
    follows = "accepted: the job changes to tp=2,dp=2 after its next commit"
    assert one.received(asked_for("tp=2,dp=2", 4), None) == ({"epoch": "0", "refused": "", "follows": follows}, [])
    assert not one.has_ended
    assert Abort(one.epoch) in one.committed(7)
    reports = {number: Report(steps={0: (6, 7)}, committed=True) for number in range(5)}
    reports[2] = one.report(Left(), {0: (6, 7)}, {}, 7)
    outcome = conclude(one.history, 0, {number: Report.read(of.text) for number, of in reports.items()}, ())
    one.concluded(outcome, Left(), took_part=True)
    assert (str(one.members.plan.mesh), one.members.ranks, one.members.spares) == ("tp=2,dp=2", (0, 1, 2, 3), (4,))
    assert (one.step, one.source, one.last_change) == (7, 0, "relayout")
    assert one.committed(8) == []
    assert one.received({"what": "status"}, None)[0] == {
        "epoch": str(one.epoch),
        "plan": "tp=2,dp=2",
        "step": 8,
        "members": [0, 1, 2, 3, 4],
        "spares": [4],
        "last_change": {"what": "relayout", "why": {}},
    }


def ended_together(machines):
    """The members end the epoch, and agree."""
    reports = {
        number: one.report(Left(), dict.fromkeys(one.history, (6, 7)), {}, 7) for number, one in machines.items()
    }
    machines[0].end()
    outcome = conclude(machines[0].history, machines[0].epoch.number, reports, ())
    for one in machines.values():
        one.concluded(outcome, Left(), took_part=True)


def test_a_process_joins_a_job_that_has_another_layout():
    """It was started with the first layout, and learns of the present one: epoch, members and their layouts agree."""
    machines = {number: member(number) for number in range(5)}
    machines[2].received(asked_for("tp=2,dp=2", 4), None)
    ended_together(machines)
    contact = {"host": "a", "address": "10.0.0.1", "heartbeat": 1, "store": 2, "liveness": 3}
    assert machines[1].received({"what": "join", "contact": contact}, None)[0]["welcome"] is None
    ended_together(machines)
    welcome = machines[1].received({"what": "join", "contact": contact}, None)[0]["welcome"]
    new = Machine()
    new.begin(welcome["member"], Members.first("dp=4", world_size=5, spares=1))
    new.welcomed(welcome, {})
    assert (new.member, new.epoch, new.members) == (5, machines[0].epoch, machines[0].members)
    assert (str(new.members.plan.mesh), new.members.spares) == ("tp=2,dp=2", (4, 5))
    assert new.history == machines[0].history


def test_a_spare_that_is_asked_ends_the_epoch_at_once():
    """It commits nothing."""
    one = member(4)
    reply, actions = one.received(asked_for("tp=4", 4), None)
    assert (reply["refused"], Abort(one.epoch) in actions) == ("", True)


@pytest.mark.parametrize(
    ("layout", "how", "why"),
    [("dp=6", {}, "6 ranks"), ("tp=2,dp=2", {}, "keep dp=4"), ("tp=4", {"shrink": "dp"}, "shrink='dp'")],
)
def test_a_request_that_does_not_fit(layout, how, why):
    """The reply states why, and nothing changes."""
    one = member(2, **how)
    one.unreplicated = {"dp": 4} if not how else {}
    reply, actions = one.received(asked_for(layout, 6), None)
    assert why in reply["refused"]
    assert (actions, one.committed(7)) == ([], [])


def test_a_request_for_the_plan_that_the_job_has():
    """Nothing happens, and the reply says so."""
    one = member(2)
    reply = {"epoch": "0", "refused": "", "follows": "the job has dp=4 already"}
    assert one.received(asked_for("dp=4", 4), None) == (reply, [])
    assert one.committed(7) == []


def asked(one, layout):
    """What a member replies to a request."""
    return one.received(asked_for(layout, 4), None)[0]["follows"]


def layouts_of(machines, changes):
    """The layouts of a job after each of its next changes."""
    found = []
    for _ in range(changes):
        if not any(one.committed(7) for one in machines.values()):
            break
        ended_together(machines)
        for one in machines.values():
            one.entered()
        found.append(str(machines[0].members.plan.mesh))
    return found


def test_requests_of_two_ranks_before_one_commit_both_happen():
    """One after the other, whichever rank was asked; a third one, of a rank that has one, follows it."""
    machines = {number: member(number) for number in range(5)}
    assert asked(machines[3], "tp=2,dp=2") == "accepted: the job changes to tp=2,dp=2 after its next commit"
    assert asked(machines[1], "tp=4") == "accepted: the job changes to tp=4 after its next commit"
    assert asked(machines[1], "tp=4") == "the job changes to tp=4 already"
    assert asked(machines[1], "dp=4") == "accepted: the job changes to dp=4 once it has changed to tp=4"
    assert layouts_of(machines, 5) == ["tp=4", "dp=4", "tp=2,dp=2"]


def test_a_request_that_is_met_by_the_time_of_its_turn():
    """The job was to change to another layout before, and went back from that: no epoch follows."""
    one = member(1)
    asked(one, "tp=4"), asked(one, "dp=4")
    one._queue.pop(0)
    assert (one.committed(7), one.committed(8)) == ([], [])


def test_a_request_that_no_longer_fits_is_dropped(caplog):
    """The members are fewer by the time of the commit, or of the round: the log says so, and the job goes on."""
    machines = {number: member(number, shrink="dp") for number in range(5)}
    asked(machines[1], "dp=4,tp=1"), asked(machines[1], "dp=5")
    for one in machines.values():
        one.history[0] = one.members.without([4])
    assert layouts_of({number: machines[number] for number in range(4)}, 5) == ["dp=4,tp=1"]
    assert "does not fit any more: the plan dp=5 has 5 ranks, and the job has 4 members" in caplog.text
    asked(machines[1], "tp=4,dp=1"), machines[1].committed(7)
    reports = {number: machines[number].report(Left(), {}, {}, 7) for number in range(3)}
    outcome = conclude(machines[1].history, machines[1].epoch.number, reports)
    machines[1].concluded(outcome, Left(), took_part=True)
    assert "too few members are left for a layout that was asked for" in caplog.text
    assert machines[1].committed(8) == []


@given(
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=4),
    lost=st.lists(st.sets(st.integers(0, 7), max_size=2), min_size=4, max_size=4),
)
def test_members_of_layouts(layouts, lost):
    """Whoever lives is a member once; a layout that too few are left for leaves the one before."""
    members = Members.first("dp=4", world_size=8, spares=4)
    for layout, gone in zip(layouts, lost, strict=False):
        here = gone & {*members.all}
        report = Report(steps={0: (1,)}, committed=True, ended=tuple(here))
        arrived = dict.fromkeys({*members.all} - here, report)
        sizes = Sizes.of(layout, plan_of(layout, 8), None)
        arrived[min(arrived)] = replace(report, relayout={"sizes": sizes.data, "budget": 5})
        outcome = conclude({0: members}, 0, arrived)
        if not outcome.agreed:
            assert len(arrived) < members.plan.mesh.size or not arrived.keys() & {*members.ranks}
            return
        following = members.following(outcome.value)
        assert sorted(following.all) == sorted(arrived)
        fits = sizes.first.mesh.size <= len(arrived)
        assert following.plan == (sizes.first if fits else members.plan)
        assert members.following(following.data) == following
        members = following


def test_layouts_as_data():
    """Members that are read are those that were written, also with views that follow the axis that shrinks."""
    first = Members.first("tp=1,dp=*/expert:ep=4,edp=*", world_size=8, shrink="dp")
    steps = [first, first.without({2}), first.without({2}).relaid(Sizes.of("dp=4,tp=1", plan_of("dp=4,tp=1", 4), "dp"))]
    for before, after in pairwise(steps):
        assert before.following(after.data) == after
