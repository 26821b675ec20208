import os
import signal
import threading

import pytest
import torch.distributed as dist
from tests import limits
from tests.torch_lacks import private_backend

import rankmesh as rm
from rankmesh.errors import AgreementError, ConnectError
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


def test_sizes_that_are_none():
    """Sizes are bytes, at least one of them."""
    for sizes in ((), (0,)):
        with pytest.raises(RanksFailed, match="bytes that a rank holds"):
            run(lambda groups, sizes: groups.measure(sizes), "tp=2", sizes, timeout=60)


def _end_at(moment, number):
    """End this process by a signal while it measures, at its last barrier, or when it is through."""
    rows, speed, timed, calls = measuring._rows, measuring._speed, measuring._timed, iter(range(100))

    def end(*_):
        # Another thread takes a signal to the process, a moment later.
        signal.pthread_kill(threading.get_ident(), number)

    if moment == "measures":
        measuring._timed = lambda *given: end() if next(calls) == 2 else timed(*given)
    elif moment == "last barrier":
        measuring._rows = lambda *given: [*rows(*given), *filter(None, [end()])]
    else:
        measuring._speed = lambda device: end() or speed(device)


def _loses_one(me, number, moment):
    """Rank 2 is killed or stopped; what the others hear, and how soon. Who serves the store ends as soon as it may."""
    if me.rank == 4:
        return
    plan = rm.Plan(rm.Mesh(tp=2, dp=2), [rm.GroupSpec("tp"), rm.GroupSpec("dp")])
    me.store.set(f"process/{me.rank}", str(os.getpid()))
    lost = int(me.store.get("process/2"))
    with rm.connect(plan, timeout=20) as groups:
        if me.rank == 2:
            _end_at(moment, number)
        error = me.error((ConnectError, AgreementError), groups.measure, (64,), timeout=8)
        os.write(1, f"rank {me.rank}: {error['message']}\n".encode())
        if me.rank == 3:
            os.kill(lost, signal.SIGKILL)
        os._exit(0 if list(error["missing"]) == [2] and error["seconds"] < 16 + limits.AT_ONCE else 9)


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [4, pytest.param(5, marks=private_backend("a part of the world connects alone"))])
@pytest.mark.parametrize("moment", ["measures", "last barrier", "is through"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_is_named_within_the_limit(outcomes, number, moment, size):
    """4 ranks, one is killed or stopped as it measures: the others name it, soon after their limit of 8 s.

    The world's barrier makes them start together, or the store, where the world has a fifth rank.
    """
    ended = outcomes(size, _loses_one, number, moment)
    assert [ended[rank].code for rank in (0, 1, 3)] == [0, 0, 0], ended
    assert ended[2].code == -signal.SIGKILL
