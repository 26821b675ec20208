import time

import pytest
import torch
import torch.distributed as dist
from tests import limits
from tests.torch_lacks import private_backend

import rankmesh as rm
from rankmesh.backend import gloo
from rankmesh.backend.members import MemberBackend
from rankmesh.backend.registries import registries
from rankmesh.errors import ConnectError
from rankmesh.runtime import World

PLAN = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp"), rm.GroupSpec("all", "tp-dp")])
LATE = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec(spec.name, spec.axes, lazy=True) for spec in PLAN.specs])


def _one_fails(me, timeout):
    """Rank 2 cannot make its first group; what every rank is told, how soon, and what is left."""
    before = {**registries(), "threads": me.resources()["threads"]}
    if me.rank == 2:

        def broken(*_, **__):
            raise RuntimeError("no more sockets")

        MemberBackend.create = broken
    started = time.monotonic()
    try:
        rm.connect(PLAN, timeout=timeout)
    except ConnectError as error:
        message = str(error)
    seconds = time.monotonic() - started
    left = limits.until(lambda: before == {**registries(), "threads": me.resources()["threads"]}, limits.AT_ONCE)
    return {"error": message, "seconds": seconds, "left": left}


@private_backend("one rank fails in a call that all ranks make")
def test_a_rank_that_cannot_make_its_groups_stops_all(ranks):
    """4 ranks, one of which fails: each is told within the timeout, its groups are gone, and a rank is named."""
    result = ranks(4, _one_fails, 3)
    assert all(rank["left"] and rank["seconds"] < limits.AT_ONCE for rank in result), result
    assert "could not be made (no more sockets)" in result[2]["error"]
    for rank in (0, 1, 3):  # some waited for a member in vain; the cause is what rank 2 said
        assert "rank 2 could not make its own groups" in result[rank]["error"]
        assert "no more sockets" in result[rank]["error"]


def _one_is_late(me):
    """Rank 1 agrees and is not heard of again."""
    if me.rank == 1:
        World._create = lambda *_: time.sleep(11)
    return me.error(ConnectError, rm.connect, LATE, timeout=5)["message"]


@private_backend("lazy groups are made with the others")
def test_a_rank_that_is_not_through_in_time_is_named(ranks):
    """4 ranks: one hangs while it makes its groups; the others name it at the timeout, and so does it afterwards."""
    assert all("rank 1 did not finish creating its groups within 5 s" in error for error in ranks(4, _one_is_late))


def _leave_at_once(me):
    for _ in range(10):
        rm.connect(PLAN, timeout=20).close()
    groups = rm.connect(PLAN, timeout=20)
    return len(groups)


def test_ranks_may_leave_as_soon_as_they_are_connected(ranks):
    """4 ranks: closing and ending right after connect breaks nobody who still connects."""
    assert ranks(4, _leave_at_once) == [3] * 4


def _mixed_sizes(me):
    """Groups that connect at once, that connect late, and that have one rank, several of each."""
    gloo.EAGER_SIZE = 4
    kinds = [rm.GroupSpec("tp"), rm.GroupSpec("dp"), rm.GroupSpec("all", "tp-dp"), rm.GroupSpec("pp")]
    kinds += [rm.GroupSpec(f"{spec.name}_own", spec.axes, share=False) for spec in kinds]
    sums = []
    with rm.connect(rm.Plan(rm.Mesh(tp=2, dp=6, pp=1), kinds), timeout=20) as groups:
        for _ in range(3):
            for group in groups.values():
                mine = torch.tensor([float(me.rank)])
                dist.all_reduce(mine, group=group.pg)
                sums.append(mine.item() == sum(group.ranks))
    return all(sums) and len(sums)


def test_groups_that_connect_at_once_and_late_live_side_by_side(ranks):
    """12 ranks, groups of 1, 2, 6 and 12, two of each: every answer is its own group's."""
    assert ranks(12, _mixed_sizes) == [24] * 12


@private_backend("torch makes a device for each group")
@pytest.mark.parametrize("size", [2, 5])
def test_what_connects_late_makes_no_shared_device(ranks, size):
    """2 ranks share one device for all small groups; 5 ranks have one a group."""
    assert set(ranks(size, _threads)) == {5 if size == 2 else 8}


def _threads(me):
    """Threads that four groups of all ranks add: one a group, and one a device."""
    gloo.EAGER_SIZE = 4
    kinds = [rm.GroupSpec(f"g{number}", "dp", share=False) for number in range(4)]
    before = me.resources()["threads"]
    with rm.connect(rm.Plan(rm.Mesh(dp=me.size), kinds), timeout=20):
        return me.resources()["threads"] - before
