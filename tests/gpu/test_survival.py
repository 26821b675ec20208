"""A job that loses ranks on NCCL: its calls are aborted, and the others go on, in the same processes."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.sockets import free_port
from tests.survival.program import member, text_of

import rankmesh as rm


@pytest.fixture
def job(outcomes, tmp_path):
    """Run a job of which some members die; the ranks that the others had at its end, each with its last epoch."""

    def run(size, deaths, layout, **how):
        ended = outcomes(size, member, free_port(), str(tmp_path), deaths, layout, how, world=None, limit=120.0)
        dead = {int(path.name.removeprefix("dead-")) for path in tmp_path.glob("dead-*")}
        for outcome in ended:
            assert outcome.rank in dead or (outcome.ok and "error" not in outcome.value), text_of(ended)
        values = [outcome.value for outcome in ended if outcome.rank not in dead]
        return sorted((value["result"], value["history"][-1][0]) for value in values if value["result"] is not None)

    return run


@pytest.mark.parametrize(("layout", "redundancy"), [("tp=2,pp=1,dp=*", 0), ("tp=2,pp=2,dp=*", 1)])
@pytest.mark.parametrize("death", [{"member": 1}, {"member": 0}, {"member": 3, "how": "SIGSTOP"}])
def test_a_spare_takes_over(job, death, layout, redundancy):
    """4 ranks and a spare on NCCL: one is killed or stopped in step 4, and all numbers are right."""
    ended = job(5, [{**death, "at": "step", "n": 4}], layout, spares=1, timeout=5, redundancy=redundancy)
    assert ended == [(rank, 1) for rank in range(4)]


def test_a_replica_is_lost(job):
    """4 ranks on NCCL, no spare: the two that are left go on with half of dp."""
    ended = job(4, [{"member": 3, "at": "step", "n": 4}], "tp=2,pp=1,dp=*", shrink="dp", timeout=5)
    assert ended == [(0, 1), (1, 1)]


def _aborted(me):
    """Three ranks wait for one that does not come; they abort, and are back soon."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    me.world("nccl")
    groups = rm.connect("tp=2,dp=2")
    one = torch.ones(1, device="cuda")
    for group in groups.values():
        dist.all_reduce(one, group=group.pg)
    torch.cuda.synchronize()
    seconds = None
    if me.rank != 3:
        for group in groups.values():
            dist.all_reduce(one, group=group.pg)
        time.sleep(1)
        started = time.monotonic()
        groups.abort()
        torch.cuda.synchronize()
        seconds = time.monotonic() - started
    me.meet("all have aborted")
    groups.close()
    dist.destroy_process_group()
    return seconds


def test_an_abort_frees_who_waits(ranks):
    """4 ranks on NCCL: who waits for a rank that makes no call is free within a second of the abort."""
    for rank, seconds in enumerate(ranks(4, _aborted, world=None, limit=90.0)):
        assert rank == 3 or seconds < 1
