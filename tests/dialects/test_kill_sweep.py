"""SIGKILL in the middle of a dialect's initialisation, and of its end: the others hear which rank it was, in time.

``RANKMESH_TEST_SWEEP=1`` (make test-sweeps) kills at every group that is made and at every one that is destroyed, in
every dialect, and at every store operation of the meeting of Megatron; ``RANKMESH_TEST_SWEEP=all`` at every fourth of
the others, too, which meet alike. Otherwise a few of these stand for all.
"""

import os
import signal
import time

import pytest
import torch.distributed as dist
from tests import limits
from tests.counting import Killing

from rankmesh.backend.members import MemberBackend
from rankmesh.dialects import deepspeed, ezpz, fairscale, nanotron, process_groups, torchtitan
from rankmesh.dialects.megatron import lifecycle, parallel_state
from rankmesh.dialects.megatron.hyper_comm_grid import HyperCommGrid
from rankmesh.errors import AgreementError, ConnectError
from rankmesh.runtime import world
from rankmesh.runtime.connect import connect

pytestmark = pytest.mark.nightly  # a sweep

TIMEOUT, SIZE, VICTIM, ATTEMPTS = 1.0, 4, 1, 5
SWEEP = os.environ.get("RANKMESH_TEST_SWEEP")


def _megatron():
    parallel_state.initialize_model_parallel(2)
    return parallel_state.destroy_model_parallel


def _grid():
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    grid.create_pg("tp")
    return grid.destroy


def _ezpz():
    ezpz.initialize_tensor_parallel(2)
    return ezpz.destroy_tensor_parallel


def _fairscale():
    fairscale.initialize_model_parallel(2)
    return fairscale.destroy_model_parallel


def _torchtitan():
    dims = torchtitan.ParallelDims(1, -1, 1, 2, 1, 1, SIZE)
    dims.build_mesh()
    return dims.close


DIALECTS = {
    "megatron": _megatron,
    "grid": _grid,
    "ezpz": _ezpz,
    "fairscale": _fairscale,
    "nanotron": lambda: nanotron.ParallelContext(2, 1, 2).destroy,
    "process_groups": lambda: process_groups.ProcessGroups(tp=2, pp=1, dp=2).close,
    "deepspeed": lambda: deepspeed.Mpu.connect(tp=2).close,
    "torchtitan": _torchtitan,
}


def _kill_at(name, nth):
    """End this process at the nth call of a function of the backend."""
    local, left = getattr(MemberBackend, name), [nth]

    def counted(*args, **how):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return local(*args, **how)

    setattr(MemberBackend, name, counted)


def _begin(initialise):
    """What initialisation gives, or what this rank hears in its place, and after how many seconds."""
    started = time.perf_counter()
    try:
        return initialise(), None
    except (AgreementError, ConnectError) as error:
        missing = list(error.values.get("missing", ()))
        return None, {"missing": missing, "seconds": time.perf_counter() - started, "said": str(error)}


def _survive(me, dialect, where, nth):
    """A rank of a world that loses one there; the victim says so where there was nothing to be killed at."""
    connect.__wrapped__.__kwdefaults__["timeout"] = lifecycle.DEFAULT_TIMEOUT = TIMEOUT  # what every dialect waits for
    initialise = DIALECTS[dialect]
    dist.barrier()
    if me.rank == VICTIM and where == "store":
        agree = world.agree
        world.agree = lambda store, *rest, **more: agree(Killing(store, nth), *rest, **more)
    if me.rank == VICTIM and where == "create":
        _kill_at("create", nth)
    close, received = _begin(initialise)
    if close is None:
        return received
    if where != "destroy":
        return "nothing to kill at" if me.rank == VICTIM else None
    if me.rank == VICTIM:
        _kill_at("destroy", nth)
    started = time.perf_counter()
    close()
    seconds = time.perf_counter() - started
    if me.rank == VICTIM:
        return "nothing to kill at"
    again, received = _begin(initialise)
    return {
        **(received or {"missing": [], "seconds": 0.0, "said": "nothing"}),
        "close": seconds,
        "again": again is None,
    }


def _wrong(ended):
    """What the survivors heard that they should not have, or not so late."""
    for outcome in (ended[rank] for rank in range(SIZE) if rank != VICTIM):
        result = outcome.value
        if not outcome.ok:
            yield str(outcome)
        elif result is not None and not (
            result["missing"] == [VICTIM] and max(result["seconds"], result.get("close", 0.0)) < limits.AT_ONCE
        ):
            yield result


def _killed_or_through(outcomes, dialect, where, nth):
    """How each rank ended; again where a busy machine kept them from that moment for longer than they wait."""
    for _ in range(ATTEMPTS):
        ended = outcomes(SIZE, _survive, dialect, where, nth)
        if ended[VICTIM].value in (None, "nothing to kill at"):
            return ended
    pytest.fail(f"the rank was {ATTEMPTS} times not killed, and its groups not made: {ended[VICTIM].value}")


POINTS = {
    (name, where): range(1, 60, 4 if where == "store" and name != "megatron" else 1)
    for name in DIALECTS
    for where in ("store", "create", "destroy")
    if where != "store" or name == "megatron" or SWEEP == "all"
}
if not SWEEP:
    POINTS = {("megatron", "store"): range(1, 60, 5), ("megatron", "create"): (2,), ("ezpz", "destroy"): (1,)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dialect", "where"), [pytest.param(*point, id="-".join(point)) for point in POINTS])
def test_the_rank_that_was_killed_is_named(outcomes, dialect, where):
    """4 ranks, one ends there: whoever has not succeeded by then names it alone, and soon."""
    bad = {}
    for nth in POINTS[dialect, where]:
        ended = _killed_or_through(outcomes, dialect, where, nth)
        if ended[VICTIM].value == "nothing to kill at":
            assert nth > 1
            break
        if wrong := list(_wrong(ended)):
            bad[nth] = wrong
    assert not bad, bad
