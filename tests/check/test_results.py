"""What the reports of all ranks tell."""

import pytest

import rankmesh as rm
from rankmesh.debug.verification.results import collect
from rankmesh.debug.verification.work import Report
from rankmesh.errors import PlanError
from rankmesh.launch.table import torchrun_variables


def test_a_plan_for_another_world_size(monkeypatch):
    """A plan for 4 ranks in a job of 8 is refused, before a rank meets another."""
    plan = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp")])
    for name, value in torchrun_variables(5, 8, local_rank=1, local_world_size=4).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError) as error:
        rm.check(plan)
    assert (error.value.plan_world_size, error.value.world_size) == (4, 8)


def test_the_rank_that_failed_first_is_the_cause():
    """4 ranks: one raises an error of its own, two see a closed connection, one ends well: the first is the cause."""
    plan = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp")])
    closed = Report(kind="RuntimeError", message="Connection closed by peer")
    wrong = Report(kind="TypeError", message="wrong")
    result = collect(plan, {0: closed, 1: closed, 2: Report(), 3: wrong}, 1.0, {})
    assert [failure.rank for failure in result.failures] == [3]
    assert [failure.rank for failure in result.followed] == [0, 1]
