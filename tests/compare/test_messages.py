"""Sends and receives in a comparison, which have no counterpart on one process: none is blamed, an error stays one."""

import pytest
import torch
import torch.distributed as dist
from tests.compare.parallel import ends, stage

from rankmesh import sim


def test_an_error_that_no_change_repairs_is_raised():
    """A receive too many: every rank's line and peer are in the error of its layout."""

    def program(groups):
        (first, last), pp, x = ends(groups), groups["pp"], torch.ones(2)
        for _ in range(2 if last else 1):
            if not first:
                dist.recv(x, group=pp.pg, group_src=pp.rank - 1)
        if not last:
            dist.send(x, group=pp.pg, group_dst=pp.rank + 1)
        sim.see("x", x, at={"pp": -1})

    with pytest.raises(sim.RanksFailed, match=r"(?s)under pp=2.*recv from rank 0.*test_messages\.py") as caught:
        sim.compare(program, ["pp=2"])
    assert sorted(caught.value.failures) == [1]


def test_an_error_of_the_program_is_raised_without_trials(monkeypatch):
    """A program that exchanges messages and raises an error of its own is not run again."""

    def program(groups):
        pp, x = groups["pp"], torch.ones(2)
        if pp.size > 1 and pp.rank:
            dist.recv(x, group=pp.pg, group_src=0)
        elif pp.size > 1:
            dist.send(x, group=pp.pg, group_dst=1)
        sim.see("x", 1.0)
        assert pp.size == 1, "too many"

    from rankmesh.sim.comparison import compare as module

    monkeypatch.setattr(module, "find", None)
    with pytest.raises(sim.RanksFailed, match="AssertionError: too many"):
        sim.compare(program, ["pp=2"])


def test_messages_in_another_order_have_no_cause():
    """Stages that send the second microbatch first: the value that differs is named, and no call."""

    def program(groups):
        (first, last), pp, run = ends(groups), groups["pp"], stage(groups)
        parts = [x.clone() for x in sim.random(groups, "x", (8, 4)).chunk(2)]
        for x in () if first else parts:
            dist.recv(x, group=pp.pg, group_src=pp.rank - 1)
        done = [run(x).detach() for x in parts]
        for x in () if last else reversed(done):
            dist.send(x, group=pp.pg, group_dst=pp.rank + 1)
        if last:
            sim.see("y", torch.cat(done), at={"pp": -1})

    first = sim.compare(program, ["pp=2", "pp=4"]).first
    assert (first.name, first.operation, first.group, first.repair) == ("y", None, None, None)
