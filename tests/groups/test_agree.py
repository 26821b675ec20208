import os
import time
from dataclasses import replace

import pytest
from tests import limits
from tests.torch_lacks import private_backend

import rankmesh as rm
from rankmesh.backend.registries import registries
from rankmesh.core.rank_range import RankRange
from rankmesh.core.saved import contents
from rankmesh.errors import AgreementError, ConnectError
from rankmesh.runtime import World
from rankmesh.runtime.agreement import PlanProposal, agree, differences

PART_OF_WORLD = private_backend("a part of the world does not connect alone")
LONG = limits.LONG
BASE = [rm.GroupSpec("tp"), rm.GroupSpec("dp", timeout=60)]
GOOD = rm.Plan(rm.Mesh(tp=2, dp=2), BASE)

# One rank holds one of these instead: the plan, and the fields that the error must name.
ODD = {
    "axis size": (rm.Plan(rm.Mesh(tp=4, dp=1), BASE), ["mesh.axes.tp", "mesh.axes.dp"]),
    "axis order": (rm.Plan(rm.Mesh(dp=2, tp=2), BASE), ["mesh.axes"]),
    "rank map": (rm.Plan(rm.Mesh(tp=2, dp=2, rank_map=[1, 0, 2, 3]), BASE), ["mesh.rank_map"]),
    "option": (
        rm.Plan(rm.Mesh(tp=2, dp=2), [BASE[0], rm.GroupSpec("dp", timeout=61)]),
        ["groups.dp.options.timeout"],
    ),
    "group list": (rm.Plan(rm.Mesh(tp=2, dp=2), [*BASE, rm.GroupSpec("mp", "tp-dp")]), ["groups.mp"]),
    "group order": (rm.Plan(rm.Mesh(tp=2, dp=2), BASE[::-1]), ["groups"]),
    "plan name": (rm.Plan(rm.Mesh(tp=2, dp=2), BASE, name="other"), ["name"]),
    "fixed world": (rm.Plan(rm.Mesh(tp=2, dp=2), BASE, world_size=4), ["world_size"]),
}


def _proposal(rank, size, **fields):
    return PlanProposal(rank, RankRange(0, size), fields)


# -- ranks that differ -----------------------------------------------------------------------------


def _connect(plan, timeout=limits.LONG):
    """The error of a connect, or its epoch; and the process groups that came to be."""
    before = registries()
    try:
        with rm.connect(plan, timeout=timeout) as groups:
            answer = {"epoch": groups.epoch}
    except AgreementError as error:
        answer = {"message": str(error), **error.values}
    return answer | {"made": registries() != before}


def _odd_then_same(me, odd):
    """Every rank connects, those of ``odd`` with another plan; then all with the same plan, twice."""
    me.meet("start")
    started = time.perf_counter()
    first = _connect(odd[me.rank][0] if me.rank in odd else GOOD)
    seconds = time.perf_counter() - started
    return first | {"seconds": seconds, "then": [_connect(GOOD).get("epoch") for _ in range(2)]}


@pytest.mark.few(3)
@pytest.mark.parametrize("what", ODD)
def test_one_rank_with_another_plan_is_named_on_every_rank(ranks, what):
    """4 ranks: each raises at once, naming the odd rank and the field; nothing was made; then all agree."""
    for rank in ranks(4, _odd_then_same, {2: ODD[what]}):
        assert rank["ranks"] == [2], rank["message"]
        assert rank["fields"] == ODD[what][1]
        assert all(field in rank["message"] for field in rank["fields"])
        assert "rank 2" in rank["message"]
        assert rank["made"] is False
        assert rank["seconds"] < limits.AT_ONCE
        assert rank["then"] in ([0, 1], [1, 2]), "those that failed meet again under the next epoch"


# Two plans, and how what differs is shown: as a user writes it, never as the JSON in which plans are compared.
VIEW = rm.Plan(rm.Mesh(tp=2, dp=2).with_view("expert", ep=2, edp=2), BASE)
VIEWS = rm.Plan(rm.Mesh(tp=2, dp=2).with_view("expert", edp=2, ep=2).with_view("data", all=4), BASE)
WRITTEN = {
    "axis order": (GOOD, ODD["axis order"][0], [("mesh.axes", "tp=2,dp=2", "dp=2,tp=2")]),
    "group order": (GOOD, ODD["group order"][0], [("groups", "tp, dp", "dp, tp")]),
    "rank map": (GOOD, ODD["rank map"][0], [("mesh.rank_map", "absent", "[1, 0, 2, 3]")]),
    "views": (
        VIEW,
        VIEWS,
        [("mesh.views.expert.axes", "ep=2,edp=2", "edp=2,ep=2"), ("mesh.views.data", "absent", "all=4")],
    ),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_what_differs_is_shown_as_it_is_written(what):
    """Axes and views as a SPEC, groups by their names."""
    ours, theirs, shown = WRITTEN[what]
    assert differences(contents(ours), contents(theirs)) == shown


def _other_ranks(me):
    return _connect(rm.Plan(rm.Mesh(tp=1, dp=3), BASE) if me.rank == 2 else GOOD, timeout=5)


@PART_OF_WORLD
def test_a_plan_of_other_ranks_is_named_at_the_timeout(ranks):
    """4 ranks, one with a plan of three ranks: it waits for those, and the others for it; nothing was made."""
    found = ranks(4, _other_ranks)
    assert [rank["missing"] for rank in found] == [[2], [2], [0, 1], [2]]
    assert not any(rank["made"] for rank in found)
    assert all("the ranks of their plans" in rank["message"] for rank in found)


def _along_tp(timeout=None):
    return rm.Plan(rm.Mesh(tp=5), [rm.GroupSpec("tp", timeout=timeout)])


@pytest.mark.parametrize(
    ("plans", "odd", "field"),
    [
        ([_along_tp(), _along_tp(1), _along_tp(), _along_tp(), _along_tp(4)], [1, 4], "groups.tp.options"),
        ([GOOD, ODD["option"][0]] * 2, [1, 3], "groups.dp.options.timeout is 61.0, not 60.0"),
    ],
    ids=["two that differ from each other, too", "two and two: the camp of rank 0 counts"],
)
def test_two_ranks_with_other_plans_are_both_named(ranks, plans, odd, field):
    """4 or 5 ranks, of which two differ from rank 0."""
    for rank in ranks(len(plans), _each_another, plans):
        assert (rank["ranks"], rank["missing"], rank["made"]) == (odd, [], False)
        assert field in rank["message"]


def _each_another(me, plans):
    answer = _connect(plans[me.rank])
    me.meet("end")
    return answer


@PART_OF_WORLD
def test_a_mismatch_inside_one_of_two_meshes_stays_there(ranks):
    """8 ranks, two disjoint meshes: the ranks of the odd one raise at once, the other mesh connects."""
    left = rm.Plan(rm.Mesh(tp=2, dp=2), BASE, name="left")
    odd = rm.Plan(rm.Mesh(tp=4, dp=1), BASE, name="left")
    right = rm.Plan(rm.Mesh(tp=2, dp=2, offset=4), BASE, name="right")
    answers = ranks(8, _each_another, [left, odd, left, left, right, right, right, right])
    assert [answer.get("ranks") for answer in answers[:4]] == [[1]] * 4
    assert [answer.get("epoch") for answer in answers[4:]] == [0] * 4


@PART_OF_WORLD
def test_the_version_and_the_live_world_are_part_of_the_proposal(ranks):
    """4 ranks, one of another version of rankmesh in what it takes for a larger world: named, with both fields."""
    for rank in ranks(4, _of_another_release):
        assert (rank["ranks"], rank["fields"]) == ([0], ["live_world_size", "version"])


def _of_another_release(me):
    if me.rank == 0:
        rm.__version__ = "0.0.1"
        World.current().default = replace(World.current().default, size=5)
    return me.error(AgreementError, rm.connect, GOOD, timeout=limits.LONG)


# -- ranks that do not come ------------------------------------------------------------------------


def _one_late(me, late):
    """The late rank comes when the others have given up; then all meet."""
    first = {}
    if me.rank != late:
        started = time.perf_counter()
        first = _connect(GOOD, timeout=5)
        first["seconds"] = time.perf_counter() - started
    me.meet("late")
    return first | {"then": [_connect(GOOD).get("epoch") for _ in range(3)]}


@pytest.mark.parametrize("late", [0, 3])
def test_a_rank_that_never_arrives_is_named_at_the_timeout(ranks, late):
    """4 ranks, one does not come: the others name it after the timeout of 5 s; when it comes, all agree."""
    for number, rank in enumerate(ranks(4, _one_late, late)):
        assert rank["then"] == [1, 2, 3]
        if number != late:
            assert (rank["missing"], rank["ranks"], rank["made"]) == ([late], [late], False)
            assert rank["message"].startswith(f"waited 5 s for rank {late}, ")  # not the rank that raises
            assert 4.9 < rank["seconds"] < limits.AT_ONCE


def _different_and_missing(me):
    if me.rank == 0:
        me.meet("end")
        return {}
    answer = _connect(ODD["option"][0] if me.rank == 1 else GOOD, timeout=5)
    me.meet("end")
    return answer


def test_a_missing_rank_does_not_hide_one_that_differs(ranks):
    """4 ranks, one missing and one odd: the error names both."""
    for answer in ranks(4, _different_and_missing)[1:]:
        assert answer["ranks"] == [1]
        assert answer["fields"] == ["groups.dp.options.timeout"]
        assert 0 in answer["missing"]
        assert "did not arrive" in answer["message"]


# -- several meetings on one store -----------------------------------------------------------------


def _two_jobs(me):
    """Two jobs on one store, told apart by the launcher's run id; each of two ranks, numbered from zero."""
    job = me.rank % 2
    os.environ["TORCHELASTIC_RUN_ID"] = f"job{job}"
    proposal = _proposal(me.rank // 2, 2, job=0)
    first = agree(me.store, proposal, LONG).epoch
    if job == 0:
        agree(me.store, proposal, LONG)
    me.meet("end")
    return [first, agree(me.store, proposal, LONG).epoch]


def test_two_jobs_on_one_store_do_not_meet(ranks):
    """4 ranks, two jobs of two: each has epochs of its own."""
    assert ranks(4, _two_jobs, world=None) == [[0, 2], [0, 1], [0, 2], [0, 1]]


# -- what does not fit into the store --------------------------------------------------------------


def _huge(me):
    proposal = _proposal(me.rank, 2, plan="a" * 2**23, local=me.rank)
    return me.error(AgreementError, agree, me.store, proposal, LONG)


def test_a_proposal_too_large_for_the_store_is_compared_by_its_hash(ranks):
    """2 ranks with claims of more than 8 MiB that differ: both hear that they do."""
    for error in ranks(2, _huge, world=None):
        assert error["ranks"] == [1]
        assert "too large to be shown" in error["message"]


# -- a store that goes away ------------------------------------------------------------------------


def _store_dies(me):
    me.meet("here")
    if me.rank == 0:
        time.sleep(0.5)
        os._exit(0)
    return [me.error(ConnectError, agree, me.store, _proposal(me.rank, 3), LONG) for _ in range(2)]


def test_a_store_that_goes_away_is_a_named_error(outcomes):
    """3 ranks, the one that serves the store dies: the others say so, at once and when they try again."""
    for ended in outcomes(3, _store_dies, world=None)[1:]:
        assert ended.ok, ended
        for error in ended.value:
            assert "the store of the world does not answer" in error["message"]
            assert error["seconds"] < limits.AT_ONCE
