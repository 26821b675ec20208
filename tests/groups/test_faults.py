import os
import pickle
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests import limits
from tests.torch_lacks import call_timeouts, private_backend
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import rankmesh as rm
from rankmesh.backend.members import MemberBackend
from rankmesh.backend.protocol import NotJoined
from rankmesh.backend.registries import registries
from rankmesh.errors import AgreementError, ConnectError, PlanError
from rankmesh.rendezvous import StoreChannel
from rankmesh.runtime.agreement import Agreement

TWO = rm.Plan(rm.Mesh(dp=2), [rm.GroupSpec("dp")])


def _plan(size, **options):
    return rm.Plan(rm.Mesh(dp=size), [rm.GroupSpec("dp", **options)])


def _first_use_without_others(me):
    """Each rank in turn uses a group of its own alone; who has to connect to whom depends on the addresses."""
    kinds = [rm.GroupSpec(f"g{rank}", "dp", timeout=1, share=False) for rank in range(me.size)]
    with rm.connect(rm.Plan(rm.Mesh(dp=me.size), kinds)) as groups:
        group = groups[f"g{me.rank}"].pg
        seconds = me.error(RuntimeError, dist.all_reduce, torch.ones(1), group=group)["seconds"]
        me.meet("all have waited in vain")
    return seconds


def test_the_first_use_of_a_large_group_keeps_its_timeout(ranks):
    """6 ranks, a time limit of 1 s: whoever uses a group alone hears so in time, whichever side was to connect."""
    seconds = ranks(6, _first_use_without_others)
    assert all(0.9 < spent < limits.AT_ONCE for spent in seconds), seconds


def _late_to_receive(me, size):
    """A message that comes later than ranks wait for each other in connect, in a group of this size."""
    limit = 5 if size == 2 else 8  # a busy machine takes a while to start 17 ranks
    me.meet("all are there")
    with rm.connect(rm.Plan(rm.Mesh(tp=size), [rm.GroupSpec("tp")]), timeout=limit) as groups:
        if me.rank == 1:
            time.sleep(limit + 2)
            dist.send(torch.ones(1), 0, group=groups["tp"].pg)
        if me.rank == 0:
            dist.recv(x := torch.zeros(1), 1, group=groups["tp"].pg)
            return x.item()
    return None


@pytest.mark.parametrize("size", [2, pytest.param(17, marks=pytest.mark.long)])
def test_a_message_waits_as_long_as_its_group_allows(ranks, size):
    """2 ranks, that connect at once, and 17, that do when they first talk: the limit of connect bounds no call."""
    assert ranks(size, _late_to_receive, size)[0] == 1.0


def _lazy_without_others(me):
    with rm.connect(_plan(3, timeout=1, lazy=True), timeout=limits.LONG) as groups:
        seen = me.error(ConnectError, lambda: groups["dp"].pg) if me.rank == 0 else None
        me.meet("rank 0 has waited in vain")
    return seen


@private_backend("lazy groups are made with the others")
def test_a_lazy_group_whose_members_do_not_come_names_them(ranks):
    """3 ranks, rank 0 asks alone: within the group's time limit it hears who came and who did not."""
    error = ranks(3, _lazy_without_others)[0]
    assert (error["seen"], error["missing"]) == ([0], [1, 2])
    assert error["seconds"] < limits.AT_ONCE
    assert re.search(r"within (1|0\.9[0-9]*) s", error["message"])


def _lazy_late(me):
    class Slow(c10d.ProcessGroupGloo):
        def __init__(self, *given):
            time.sleep(0.1)
            super().__init__(*given)

    with rm.connect(_plan(3, timeout=limits.LONG, lazy=True), timeout=5) as groups:
        time.sleep(6 if me.rank == 2 else 0)
        c10d.ProcessGroupGloo = Slow
        total = torch.ones(1)
        dist.all_reduce(total, group=groups["dp"].pg)
    return total.item()


def test_a_lazy_group_waits_as_long_as_its_own_timeout(ranks):
    """3 ranks, connected within 5 s, the last comes to the lazy group after 6 s: its own time limit counts.

    Also for making it, which takes 0.1 s once the limit of connect is over.
    """
    assert ranks(3, _lazy_late) == [3.0] * 3


def _closes_after_a_failed_warm_up(me):
    groups = rm.connect(TWO, timeout=limits.LONG)
    seconds = None
    if me.rank == 0:
        started = time.monotonic()
        error = me.error(ConnectError, groups.warm_up, timeout=timedelta(seconds=1))
        groups.close()
        seconds = [time.monotonic() - started, error["group"]]
    me.meet("rank 0 has closed")
    groups.close()
    return seconds


@call_timeouts
def test_groups_close_soon_after_a_warm_up_in_vain(ranks):
    """2 ranks, rank 1 does not warm up: rank 0 closes its groups at once, though their time limit is a minute."""
    seconds, group = ranks(2, _closes_after_a_failed_warm_up)[0]
    assert group == "dp"
    assert seconds < limits.AT_ONCE


def _interrupted(me):
    """Rank 1 is interrupted while it waits for the others."""
    if me.rank == 1:

        def interrupt(*_):
            raise KeyboardInterrupt

        StoreChannel.wait = interrupt
        me.error(KeyboardInterrupt, rm.connect, _plan(3), timeout=5)
        me.store.set("interrupted", "yes")
        return None
    me.store.wait(["interrupted"])
    return me.error(AgreementError, rm.connect, _plan(3), timeout=5)


def test_a_rank_that_is_interrupted_while_ranks_agree_is_the_missing_one(ranks):
    """3 ranks, rank 1 is interrupted at the meeting: the others name it, and it alone, at their time limit."""
    for error in ranks(3, _interrupted)[::2]:
        assert error["missing"] == [1]
        assert "waited 5 s for rank 1, which did not arrive" in error["message"]


def _interrupted_at_the_end(me):
    complete = Agreement.complete

    def interrupt(*_):
        me.store.wait(["made"])  # else rank 0 may see that a connection closes before it has its own group
        raise KeyboardInterrupt

    def publishes(*given):
        me.store.set("made", "")
        return complete(*given)

    if me.rank == 1:
        Agreement.complete = interrupt
        me.error(KeyboardInterrupt, rm.connect, TWO, timeout=limits.LONG)
        return None
    Agreement.complete = publishes
    return me.error(ConnectError, rm.connect, TWO, timeout=limits.LONG)


def test_a_rank_that_is_interrupted_as_ranks_complete_informs_the_others(ranks):
    """2 ranks, rank 1 is interrupted when its groups are made: rank 0 hears so long before its time limit."""
    error = ranks(2, _interrupted_at_the_end)[0]
    assert "rank 1 could not make its own groups: KeyboardInterrupt" in error["message"]
    assert error["seconds"] < limits.AT_ONCE


def _first_to_fail(me):
    """Rank 0, which serves the store, cannot make its group and ends; the others fail a moment later."""

    def fail(*_, **__):
        if me.rank == 0:
            raise RuntimeError("no more sockets")
        time.sleep(0.7)
        raise NotJoined("not all of its members have connected", ())

    MemberBackend.create = fail
    error = me.error(ConnectError, rm.connect, _plan(3), timeout=limits.LONG)
    if me.rank == 0:
        os._exit(0)
    return error["message"], error["ranks"]


@private_backend("one rank fails in a call that all ranks make")
def test_who_serves_the_store_stays_until_its_own_failure_is_read(outcomes):
    """3 ranks, the first cannot make its group and ends: the others, which still make theirs, hear who failed."""
    _, *others = outcomes(3, _first_to_fail)
    for one in others:
        message, ranks = one.value
        assert "rank 0 could not make its own groups" in message, message
        assert ranks == [0]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e-7, 1e10, "1", None, True, timedelta(0)])
def test_a_time_limit_that_is_none_is_refused(timeout):
    """A store takes zero and less for no limit at all, so none of these reaches it."""
    with pytest.raises(PlanError, match="timeout is"):
        rm.connect(TWO, timeout=timeout)


@pytest.mark.parametrize("given", [3, None, ["tp=2"], TWO.mesh.groups("dp")])
def test_what_is_no_plan_is_refused(given):
    """Neither plan, mesh nor SPEC: the message says what makes one."""
    with pytest.raises(PlanError, match=r"cannot connect.*GroupSpec"):
        rm.connect(given)


def _asked_oddly(me):
    with rm.connect(TWO) as groups:
        return [
            groups.device_mesh().mesh_dim_names,
            me.error(ConnectError, groups.device_mesh, "dp", "dp")["message"],
            me.error(PlanError, groups.warm_up, timeout=0)["message"],
            me.error(ConnectError, pickle.dumps, groups)["message"],
        ]


def test_odd_requests_are_refused_in_words(ranks):
    """2 ranks: a device mesh of one axis twice, a warm-up without time, pickled groups; no axes are all of them."""
    for whole, twice, warm, pickled in ranks(2, _asked_oddly):
        assert tuple(whole) == ("dp",)
        assert "('dp', 'dp')" in twice
        assert "timeout is 0" in warm
        assert "belong to their process" in pickled


DRY = [
    {"backend": "gloo"},
    {"backend": "nccl", "nccl": {"max_ctas": 4}, "high_priority": True},
    {"backend": "cpu:gloo,cuda:nccl", "sharp": True},
    {"lazy": True, "backend": "gloo"},
    {"high_priority": True},
]


def _dry(me):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    sizes = []
    for options in DRY:
        kinds = [rm.GroupSpec("tp", **options), rm.GroupSpec("dp")]
        with rm.connect(rm.Plan(rm.Mesh(tp=8, dp=8), kinds)) as groups:
            sizes.append(dist.get_world_size(groups["tp"].pg))
            groups.warm_up()
            groups.device_mesh("dp", "tp")
    return sizes


def test_a_dry_run_takes_any_options(ranks):
    """1 process plays rank 3 of 64: backends and NCCL options of the real run ask for nothing that is not there."""
    assert ranks(1, _dry, world=None) == [[8] * len(DRY)]


def _interrupted_close(me):
    before = registries()
    groups = rm.connect(rm.Plan(rm.Mesh(dp=2), [rm.GroupSpec("dp"), rm.GroupSpec("own", "dp", share=False)]))
    destroy = MemberBackend.destroy

    def interrupt(self, pg, **_):
        MemberBackend.destroy = destroy
        raise KeyboardInterrupt

    MemberBackend.destroy = interrupt
    me.error(KeyboardInterrupt, groups.close)
    groups.close()
    return registries() == before


@private_backend("torch keeps an entry of each group that it names")
def test_an_interrupted_close_can_be_finished(ranks):
    """2 ranks: the second close() destroys what the first one left, the group that it was at included."""
    assert ranks(2, _interrupted_close) == [True, True]
