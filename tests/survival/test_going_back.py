"""What a guarded job goes back to, whoever is lost on the way: the last commit that was found equal, or an error."""

import pytest
from tests.survival.test_guarding import Job, ended, of_ranks, once
from tests.survival.test_simulated import dying

import rankmesh as rm
from rankmesh.guard import guard
from rankmesh.survival.agreement import Report, Suspicion, conclude
from rankmesh.survival.guarding import are_equal
from rankmesh.survival.machine import Machine
from rankmesh.survival.members import Members
from rankmesh.survival.simulated import SimulatedWorld

# Where a member is lost, besides: what it calls then.
ON_THE_WAY = {
    "as the difference is explained": (guard, "explained", 1),
    "as it adopts what was decided": (Machine, "concluded", 1),
    "as it enters the world": (SimulatedWorld, "enter", 2),
    "as it repeats the steps": (SimulatedWorld, "first", 3),
    "before the second repeat": (SimulatedWorld, "enter", 3),
}


@pytest.mark.parametrize(("layout", "spares"), [("tp=1,dp=2", 1), ("tp=1,dp=3", 2)])
@pytest.mark.parametrize("at", ON_THE_WAY)
def test_a_loss_on_the_way_back(at, layout, spares, monkeypatch):
    """Rank 0 is wrong from step 5 on, and rank 1, which is right, is lost on the way back: the numbers are right."""
    owner, name, times = ON_THE_WAY[at]
    counts = dying(monkeypatch, owner, name, 1, times)
    values = ended(Job(once(0, 5, "norm")), rm.Mesh.parse(layout).size + spares, layout, spares=spares, guard=3)
    assert counts[1] == times
    assert values[1] is None
    right = of_ranks(ended(Job(lambda *_: None), rm.Mesh.parse(layout).size, layout))
    assert of_ranks(values) == right


HISTORY = {0: Members.first("dp=3", world_size=5, spares=2)}
FOUND = Suspicion(8, "w", (0,), 4, tied=False).data


@pytest.mark.parametrize(
    ("steps", "equal", "suspicion", "expected"),
    [
        ([(4, 9, 10)] * 3, (8, 4, 4), None, (10, 4)),  # compared first, as only 4 is known, of those that all have
        ([(8, 9, 10)] * 3, (8, 4, -1), None, (10, 8)),  # one member knows it
        ([(4, 7, 8)] * 3, (4, 4, 4), FOUND, (4, 4)),
        ([(4, 7, 8), (4, 7, 8), (4, 6, 7)], (4, 4, 4), None, (7, 4)),
        ([(4,), (4, 7, 8), (4, 7, 8)], (4, 4, 4), None, (4, 4)),  # one has dropped what all decided to go back from
        ([(7, 8, 9), (6, 7), (6, 7)], (8, 4, 4), None, (7, 7)),  # before a step that was equal
    ],
)
def test_which_step_is_a_candidate(steps, equal, suspicion, expected):
    """The last common one, which is compared first if it is later than the last equal one; after a difference that."""
    reports = {
        member: Report(steps={0: steps[member]}, equal={0: equal[member]}, committed=True, suspicion=suspicion)
        for member in range(3)
    }
    value = conclude(HISTORY, 0, reports | {3: Report(), 4: Report()}, ()).value
    assert (value["source"], value["step"], value["equal"]) == (0, *expected)


@pytest.mark.parametrize("found", [None, {**FOUND, "repeat": 2}])
def test_what_a_spare_reports_of_a_suspicion_is_old(found):
    """The spares arrive first, with what was decided before: what the ranks have found since counts."""
    ranks = [Report(steps={0: (4, 8)}, equal={0: 4}, committed=True, suspicion=one) for one in (None, found, FOUND)]
    ranks[2] = ranks[2] if found else ranks[0]
    spare = Report(suspicion=FOUND)
    value = conclude(HISTORY, 0, {3: spare, 4: spare} | dict(enumerate(ranks)), ()).value
    assert value["suspicion"] == found


def test_an_epoch_in_which_nothing_was_compared_is_no_source():
    """All hold step 8 in epoch 1, and have not compared it: they go on from epoch 0, or the job ends."""
    history = {0: HISTORY[0], 1: HISTORY[0]}
    here = Report(steps={0: (4, 8), 1: (8,)}, equal={0: 4, 1: -1}, committed=True)
    value = conclude(history, 1, dict.fromkeys(range(5), here), ()).value
    assert (value["source"], value["step"], value["equal"]) == (0, 8, 4)
    lost = Report(steps={1: (8,)}, equal={1: -1}, committed=True)
    assert conclude(history, 1, dict.fromkeys(range(5), lost), ()).reason == "failed"


def test_an_interrupted_repeat_is_repeated_once():
    """No member is lost as the steps are repeated: the suspicion stays, and the second time the job ends."""
    here = Report(steps={0: (4,)}, equal={0: 4}, committed=True, suspicion=FOUND)
    reports, raised = dict.fromkeys(range(5), here), {}
    for _ in range(2):
        value = conclude(HISTORY, 0, reports, (), raised).value
        assert (value["step"], value["suspicion"]) == (4, FOUND)
        raised = value["raised"]
    assert conclude(HISTORY, 0, reports, (), raised).reason == "failed"


@pytest.mark.parametrize(
    ("found", "expected"),
    [([{"0": 7}, {"0": 7}], True), ([{"0": 7}, {"0": 8}], False), ([{"0": 7}, {}], False), ([{}, {}], True)],
)
def test_replicas_are_equal_only_if_there_are_two(found, expected):
    """A set of replicas of which one is left has nothing to be compared to; who has no replica needs nothing."""
    assert are_equal(found) == expected
