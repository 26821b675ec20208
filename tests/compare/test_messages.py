"""Sends and receives in a comparison: a change that works is named; without one an error stays one."""

import pytest
import torch
import torch.distributed as dist
from tests.compare.parallel import ends, stage
from tests.compare.wrong import WRONG

from rankmesh import sim


def seen(groups, **steps):
    """What each rank of a ring gets, which sends so many places on and receives from so many places back."""
    cp = groups["cp"]
    got = torch.arange(4.0).roll(1)[cp.rank : cp.rank + 1] if cp.size == 4 else torch.arange(4.0).roll(1)
    if cp.size == 4:
        calls = [
            dist.P2POp(dist.isend, torch.tensor([float(cp.rank)]), group=cp.pg, group_peer=(cp.rank + steps["to"]) % 4),
            dist.P2POp(dist.irecv, got, group=cp.pg, group_peer=(cp.rank - steps["back"]) % 4),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
    sim.see("got", got, ("cp",))


@pytest.mark.parametrize(
    ("steps", "operation", "repair"),
    [
        ({"to": 2, "back": 1}, "send", ("peer", "next in the ring")),
        ({"to": 1, "back": 2}, "recv", ("peer", "previous in the ring")),
        ({"to": 3, "back": 3}, "send", ("peer", "next in the ring")),
    ],
)
def test_wrong_neighbour_in_a_ring(steps, operation, repair):
    """Whether all ranks wait for each other, or every message arrives: the side that is wrong, and its neighbour."""
    assert sim.compare(lambda groups: seen(groups, to=1, back=1), ["cp=4"]).same
    first = sim.compare(lambda groups: seen(groups, **steps), ["cp=4"]).first
    assert (first.operation, first.group, first.repair, first.settles) == (operation, "cp", repair, True)
    assert first.site.startswith("test_messages.py:")
    assert (first.why, bool(first.failure)) == (("failed", True) if steps["to"] != steps["back"] else ("value", False))


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

    monkeypatch.setattr(module, "find_failure", None)
    with pytest.raises(sim.RanksFailed, match="AssertionError: too many"):
        sim.compare(program, ["pp=2"])


def test_no_change_is_named_that_was_not_tried():
    """Without time for trials an error stays an error, and a value has no cause."""
    program, layouts, _, _ = WRONG["sent_to_another_stage"]
    with pytest.raises(sim.RanksFailed, match="under pp=4"):
        sim.compare(program, layouts, seconds=0.0)
    program, layouts, _, _ = WRONG["microbatches_sent_backwards"]
    first = sim.compare(program, layouts, seconds=0.0).first
    assert (first.operation, first.group, first.repair) == (None, None, None)


def test_a_wrong_formula_is_not_blamed_on_messages():
    """A stage that computes something else than one process has no cause, whatever is sent before."""

    def program(groups):
        (first, last), pp, x = ends(groups), groups["pp"], sim.random(groups, "x", (4, 4))
        run = stage(groups)
        if not first:
            dist.recv(x, group=pp.pg, group_src=pp.rank - 1)
        x = run(x).detach()
        if not last:
            dist.send(x, group=pp.pg, group_dst=pp.rank + 1)
        else:
            sim.see("y", x.exp() if pp.size > 1 else x, at={"pp": -1})

    first = sim.compare(program, ["pp=2", "pp=4"]).first
    assert (first.operation, first.group, first.repair) == (None, None, None)


WORDS = {
    "sent_to_another_stage": ("the send over pp made it fail", "send to the next rank of pp;", "rank 0  waits in send"),
    "received_from_anybody": ("the recv over pp made it differ", "receive from the previous rank of pp;", "y differs"),
    "microbatches_sent_backwards": ("the send over pp", "send every 2 messages in the opposite order;", "y differs"),
    "the_other_half_sent": ("the send over pp", "send the other part of the tensor;", "y differs"),
    "ring_backwards": ("the send over cp", "send to the next rank of cp, which is a ring;", "y differs"),
}


@pytest.mark.parametrize("name", WORDS)
def test_report_in_words(name):
    """The line, the change, and, where the program fails, the error; as data, too."""
    program, layouts, repair, group = WRONG[name]
    result = sim.compare(program, layouts)
    for words in WORDS[name]:
        assert words in result.report()
    data = result.to_dict()["first"]
    assert (data["repair"], data["group"], data["operation"]) == ([*repair], group, result.first.operation)
    _, rows = result.table()
    assert [row[0] for row in rows] == ["y"]
    assert any(cell.endswith("!") for cell in rows[0][1:])
