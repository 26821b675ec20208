"""Groups that connect when they are made: what that asks of the store, a slow member, and one that fails."""

import time

import pytest
import torch.distributed as dist
from tests.groups.test_lifecycle import use

import rankmesh as rm
from bench.counting import CountingStore
from rankmesh.backend.members import MemberBackend

PLAN = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp"), rm.GroupSpec("all", "tp-dp")])


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


@pytest.mark.long
def test_a_slow_member_is_waited_for(ranks):
    """4 ranks, of which the first, or the last, is slow between its groups: the others wait, and all are used."""
    ranks(4, _one_is_slow)


def _after_failure(me):
    """A connect that one rank fails in the middle, then three more, and the timeout of the store after them."""
    create, made, before = MemberBackend.create, [], dist.distributed_c10d._get_default_store().timeout

    def failing(self, request, deadline):
        made.append(request.name)
        if me.rank == 3 and len(made) == 2:
            raise RuntimeError("a full disk")
        return create(self, request, deadline)

    MemberBackend.create = failing
    failed = me.error(rm.ConnectError, rm.connect, PLAN, timeout=3)["message"]
    # Until all have given up, some may be about to read where the others are, and gloo crashes where nothing is.
    tp_group = dist.PrefixStore("gloo/", dist.PrefixStore(f"{made[0]}/", dist.distributed_c10d._get_default_store()))
    there = tp_group.check(["0/0", "0/1"])
    MemberBackend.create = create
    for _ in range(3):
        with rm.connect(PLAN, timeout=20) as groups:
            use(groups)
    return "full disk" in failed, there, dist.distributed_c10d._get_default_store().timeout == before


def test_connect_works_after_a_failure(ranks):
    """4 ranks, one fails while groups are made: all report it, connect again, and the store's timeout is as before."""
    assert ranks(4, _after_failure) == [[True, True, True]] * 4
