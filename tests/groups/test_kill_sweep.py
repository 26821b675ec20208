"""SIGKILL at every store operation of connect: the others hear which rank it was, long before the store gives up."""

import os
import signal
import time

import pytest
import torch.distributed as dist
from tests import limits

import rankmesh as rm
from rankmesh.backend.members import MemberBackend
from rankmesh.errors import AgreementError, ConnectError
from rankmesh.runtime import world

pytestmark = pytest.mark.nightly  # a sweep

TIMEOUT = 1.0
PLAN = rm.Plan(rm.Mesh(tp=3), [rm.GroupSpec("tp")])
VICTIM = 1


class Killing:
    """A store that ends its process after the nth operation."""

    def __init__(self, store, at):
        self._store, self._left = store, 0 if at == "create" else at

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def counted(*args):
            # A rank that waits asks again and again: how often is a matter of the machine.
            self._left -= name != "check"
            result = method(*args)
            if self._left == 0 and name != "check":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted


def _survive(me, at, late, kind, folder):
    """What one rank hears when the victim ends at this operation; None where connect had succeeded by then.

    The rank that serves the store ends as soon as it has an error.
    """
    if kind == "file":
        dist.init_process_group("gloo", store=dist.FileStore(folder, 3), rank=me.rank, world_size=3)
    else:
        me.world(timeout=limits.LONG)
    dist.barrier()
    if me.rank == VICTIM:
        local = world.agree
        world.agree = lambda store, *rest, **more: local(Killing(store, at), *rest, **more)
        if at == "create":
            MemberBackend.create = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1 if late else 0)
    elif not late:
        time.sleep(0.1)
    started = time.perf_counter()
    try:
        groups = rm.connect(PLAN, timeout=TIMEOUT)
    except (AgreementError, ConnectError) as error:
        if me.rank == 0 and error.missing == [VICTIM]:
            os._exit(0)
        return {
            "message": str(error),
            "missing": list(error.values.get("missing", ())),
            "seconds": time.perf_counter() - started,
        }
    if me.rank == VICTIM:  # there are fewer operations than that
        groups.close()
        return "done"
    return None


def _received(outcomes, at, *, late, kind, folder):
    """What is wrong with what the others heard, None where nothing is; and whether connect has fewer operations."""
    ended = outcomes(3, _survive, at, late, kind, folder, world=None)
    others = [ended[rank] for rank in range(3) if rank != VICTIM]
    wrong = [
        str(outcome.value if outcome.ok else outcome)
        for outcome in others
        if not outcome.ok or (outcome.value and not _names_the_victim(outcome.value))
    ]
    return wrong, ended[VICTIM].value == "done"


def _names_the_victim(answer):
    return answer["missing"] == [VICTIM] and answer["seconds"] < limits.AT_ONCE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("late", [False, True], ids=["first to come", "last to come"])
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_the_rank_that_was_killed_is_named(outcomes, tmp_path, kind, late):
    """3 ranks, one ends after each of its operations in turn: the others name it, and nobody else."""
    whole = bool(os.environ.get("RANKMESH_TEST_SWEEP"))
    if (kind, late) != ("tcp", True) and not whole:
        pytest.skip("one sweep of four, in longer steps; RANKMESH_TEST_SWEEP=1 (make test-sweeps) makes them all")
    bad = {}
    for at in ("create", *range(1, 60, 1 if whole else 5)):
        wrong, done = _received(outcomes, at, late=late, kind=kind, folder=str(tmp_path / f"store-{at}"))
        if wrong:
            bad[at] = wrong
        if done:
            break
    assert not bad, bad
    assert 8 < at < 40
