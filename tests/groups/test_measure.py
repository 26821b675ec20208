import os
import signal

import pytest
import torch.distributed as dist
from tests import limits

import rankmesh as rm
from rankmesh.errors import ConnectError
from rankmesh.runtime import measure as measuring
from rankmesh.sim import RanksFailed, run


def _measured(groups):
    seen = []
    found = groups.measure((64, 4096), progress=lambda done, total: seen.append((done, total)))
    dist.barrier()
    return found, seen, groups.world.default.store.num_keys()


def test_every_rank_gets_one_measurement():
    """8 simulated ranks: all kinds, sizes and collectives, the same on each; progress to the end; no key is left."""
    (first, seen, keys), *others = run(_measured, "tp=2,dp=2,pp=2", timeout=60)
    assert all(found == first for found, _, _ in others)
    assert seen[-1] == (len(seen), len(seen))
    assert keys <= run(lambda groups: groups.world.default.store.num_keys(), "tp=2,dp=2,pp=2", timeout=60)[0]
    result = {(row.name, row.collective) for row in first.rows}
    three = ("all-reduce", "all-gather", "reduce-scatter")
    assert result == {("pp", "send/recv"), *((name, what) for name in ("tp", "dp") for what in three)}
    assert all(group.isolated is not None for row in first.rows for group in row.groups)
    assert {row.name for row in first.hops} == {"tp", "dp", "pp"}
    assert 1e6 < first.to_dict()["speed"] < 1e14  # of a matrix product on a CPU, FLOP/s


def test_ranks_that_a_kind_leaves_out():
    """4 simulated ranks, of which the ends of pp are a kind: the others wait at its barriers."""
    plan = rm.Plan(rm.Mesh(pp=4), [rm.GroupSpec("pp"), rm.GroupSpec("embd", axes="pp", pick=rm.ends)])
    found = run(lambda groups: groups.measure((64,), kinds=["embd"]), plan, timeout=60)
    assert {row.name for row in found[1].rows} == {"embd"}
    assert found[1].rows[0].groups[0].ranks == (0, 3)


def _sized(groups, sizes):
    return groups.measure(sizes)


def test_sizes_that_are_none():
    """Sizes are bytes, at least one of them."""
    for sizes in ((), (0,)):
        with pytest.raises(RanksFailed, match="bytes that a rank holds"):
            run(_sized, "tp=2", sizes, timeout=60)


def _loses_one(me, number):
    """Rank 2 is killed or stopped in the middle of measuring; what the others hear, and how soon."""
    with rm.connect("tp=2,dp=2", timeout=20) as groups:
        if me.rank == 2:
            timed, calls = measuring._timed, iter(range(100))
            measuring._timed = lambda *a: os.kill(os.getpid(), number) if next(calls) == 2 else timed(*a)
        error = me.error(ConnectError, groups.measure, (64,), timeout=4)
        os.write(1, f"rank {me.rank}: {error['message']}\n".encode())
        me.store.set(f"heard/{me.rank}", f"{error['missing']} {error['seconds']}")
        if me.rank == 0 and number == signal.SIGSTOP:  # which serves the store, so it stays until all have said so
            me.store.wait(["heard/1", "heard/3"])
            os.kill(int(me.store.get("stopped")), signal.SIGKILL)
        os._exit(0 if error["missing"] == [2] and error["seconds"] < 4 + limits.AT_ONCE else 9)


def _killed(me):
    _loses_one(me, signal.SIGKILL)


def _stopped(me):
    if me.rank == 2:
        me.store.set("stopped", str(os.getpid()))
    _loses_one(me, signal.SIGSTOP)


@pytest.mark.parametrize("lost", [_killed, pytest.param(_stopped, marks=pytest.mark.long)])
def test_a_rank_that_is_lost_is_named_within_the_limit(outcomes, lost):
    """4 ranks, one is killed or stopped while it measures: the others name it, soon after their limit of 4 s."""
    ended = outcomes(4, lost)
    assert [ended[rank].code for rank in (0, 1, 3)] == [0, 0, 0], ended
    assert ended[2].code == -signal.SIGKILL
