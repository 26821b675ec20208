"""All groups are made, or none: a rank that fails, or is slow; groups that connect at once, and late."""

import time

import pytest
import torch
import torch.distributed as dist
from tests import limits
from tests.groups.test_lifecycle import use
from tests.torch_lacks import private_backend

import rankmesh as rm
from bench.counting import CountingStore
from rankmesh.backend import gloo
from rankmesh.backend.members import MemberBackend
from rankmesh.backend.registries import registries
from rankmesh.errors import ConnectError
from rankmesh.runtime import World

PLAN = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp"), rm.GroupSpec("all", "tp-dp")])
LATE = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec(spec.name, spec.axes, lazy=True) for spec in PLAN.specs])


def _state(me, store):
    return {**registries(), "threads": me.resources()["threads"], "timeout": store.timeout}


def _one_fails(me, timeout):
    """Rank 2 cannot make its second group; what every rank is told, how soon, and what is left; then all connect."""
    create, made, store = MemberBackend.create, [], dist.distributed_c10d._get_default_store()
    before = _state(me, store)

    def failing(self, request, deadline):
        made.append(request.name)
        if me.rank == 2 and len(made) == 2:
            raise RuntimeError("no more sockets")
        return create(self, request, deadline)

    MemberBackend.create = failing
    error = me.error(ConnectError, rm.connect, PLAN, timeout=timeout)
    left = limits.until(lambda: _state(me, store) == before, limits.AT_ONCE)
    # Until all have given up, some may be about to read where the others are, and gloo crashes where nothing is.
    there = store.check([f"{made[0]}//gloo//0/{rank}" for rank in (0, 1)])
    MemberBackend.create = create
    for _ in range(3):
        with rm.connect(PLAN, timeout=20) as groups:
            use(groups)
    return error, left, there


@private_backend("one rank fails in a call that all ranks make")
def test_a_rank_that_cannot_make_its_groups_stops_all(ranks):
    """4 ranks, one of which fails: each is told within the timeout, its groups are gone, and the next connect works."""
    for rank, (error, left, there) in enumerate(ranks(4, _one_fails, 3)):
        assert (left, there) == (True, True)
        assert error["seconds"] < limits.AT_ONCE
        # Some waited for a member in vain; the cause is what rank 2 said.
        cause = "could not be made" if rank == 2 else "rank 2 could not make its own groups"
        assert cause in error["message"]
        assert "no more sockets" in error["message"]


def _one_is_late(me):
    """Rank 1 agrees and is not heard of again."""
    if me.rank == 1:
        World._create = lambda *_: time.sleep(11)
    return me.error(ConnectError, rm.connect, LATE, timeout=5)["message"]


@private_backend("lazy groups are made with the others")
def test_a_rank_that_is_not_through_in_time_is_named(ranks):
    """4 ranks: one hangs while it makes its groups; the others name it at the timeout, and so does it afterwards."""
    assert all("rank 1 did not finish creating its groups within 5 s" in error for error in ranks(4, _one_is_late))


class _Requests(CountingStore):
    def multi_get(self, keys):
        """Read keys: one request."""
        return self._count("multi_get", keys)


def _operations(me, plan):
    """Store requests from the world to groups that are used, and the process groups."""
    store = _Requests(me.store)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size)
    dist.barrier()
    before = store.operations
    with rm.connect(plan, timeout=20) as groups:
        use(groups)
        done, made = store.operations - before, sum(group.size > 1 for group in groups.local.communicators)
    dist.destroy_process_group()
    return done, made


@private_backend("torch asks more")
def test_a_group_asks_the_store_twice(ranks):
    """8 ranks, Megatron's 20 kinds: each group writes one address and reads the others' with one operation."""
    plan = rm.recipes.megatron(8, tp=2, cp=2, pp=2, ep=2)
    for done, made in ranks(8, _operations, plan, world=None):
        assert done <= 2 * made + 26  # the rank that leaves the round last deletes its keys


def _one_is_slow(me):
    """Connect while rank 0, then the last rank, takes its time between two groups."""
    create, rounds = MemberBackend.create, []

    def slow(self, request, deadline):
        if "all" in request.desc:
            rounds.append(len(rounds))
            time.sleep(2 if me.rank == (0, me.size - 1)[rounds[-1]] else 0)
        return create(self, request, deadline)

    MemberBackend.create = slow
    for _ in range(2):
        with rm.connect(PLAN, timeout=6) as groups:
            assert groups.phases["all"] > 2
            use(groups)
    assert rounds == [0, 1]


@private_backend("one rank is slow in a call that all ranks make")
@pytest.mark.long
def test_a_slow_member_is_waited_for(ranks):
    """4 ranks, of which the first, or the last, is slow between its groups: the others wait, and all are used."""
    ranks(4, _one_is_slow)


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
