"""A job that loses ranks on NCCL: its calls are aborted, and the others go on, in the same processes."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.sockets import free_port
from tests.survival.program import member, text_of

import rankmesh as rm

STEPS = 8
# The sums of a run that shrinks are taken in another order.
CLOSE = 1e-9


@pytest.fixture
def job(outcomes, tmp_path):
    """What each member of a job returned of which some die; None for those."""

    def run(size, deaths, layout, **how):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        ended = outcomes(size, member, free_port(), str(folder), deaths, STEPS, layout, how, world=None, limit=120.0)
        dead = {int(path.name.removeprefix("dead-")) for path in folder.glob("dead-*")}
        for outcome in ended:
            assert outcome.rank in dead or (outcome.ok and "error" not in outcome.value), text_of(ended)
        return [None if outcome.rank in dead else outcome.value for outcome in ended]

    return run


def _results(ended):
    """What train returned, by rank of the plan; every history is of the same last epoch."""
    return {value["history"][-1][1]: value["result"] for value in ended if value and value.get("result")}


def _near(one, other):
    return all(torch.allclose(torch.tensor(one[name]), torch.tensor(other[name]), atol=CLOSE) for name in one)


@pytest.mark.parametrize(("layout", "redundancy"), [("tp=2,pp=1,dp=*", 0), ("tp=2,pp=2,dp=*", 1)])
@pytest.mark.parametrize("death", [{"member": 1}, {"member": 0}, {"member": 3, "how": "SIGSTOP"}])
def test_a_spare_takes_over(job, death, layout, redundancy):
    """4 ranks and a spare on NCCL: one is killed or stopped in step 4, and the results are those without a loss."""
    expected = _results(job(4, [], layout))
    ended = job(5, [{**death, "at": "step", "n": 4}], layout, spares=1, timeout=5, redundancy=redundancy)
    assert _results(ended) == expected
    assert ended[4]["history"][-1][0] == 1


def test_a_replica_is_lost(job):
    """4 ranks on NCCL, no spare: the two that are left go on with half of dp."""
    expected = _results(job(2, [], "tp=2,pp=1,dp=*"))
    found = _results(job(4, [{"member": 3, "at": "step", "n": 4}], "tp=2,pp=1,dp=*", shrink="dp", timeout=5))
    assert found.keys() == {0, 1}
    assert all(_near(found[rank], expected[rank]) for rank in found)


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
