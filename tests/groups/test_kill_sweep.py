"""SIGKILL at every store operation of connect: the others hear which rank it was, in the timeout and two seconds."""

import os
import signal
import time

import pytest
import torch.distributed as dist

import rankmesh as rm
from rankmesh.errors import AgreementError, ConnectError
from rankmesh.groups import World

TIMEOUT = 1.0
PLAN = rm.Plan(rm.Mesh(tp=3), [rm.GroupSpec("tp")])
VICTIM = 1


class Killing:
    """A store that ends its process at the nth operation, before or after it is done."""

    def __init__(self, store, at, after):
        self._store, self._left, self._after = store, at, after

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def counted(*args):
            self._left -= 1
            if self._left == 0 and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = method(*args)
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted


def _survive(me, at, after, late, kind, folder):
    """What one rank hears when the victim ends at this operation; None where connect had succeeded by then."""
    if kind == "file":
        dist.init_process_group("gloo", store=dist.FileStore(folder, 3), rank=me.rank, world_size=3)
    else:
        me.world(timeout=20)
    world = World.current()
    dist.barrier()
    if me.rank == VICTIM:
        store = Killing(world.default.store, at, after)
        object.__setattr__(world.default, "store", store)
        time.sleep(0.1 if late else 0)
    elif not late:
        time.sleep(0.1)
    started = time.perf_counter()
    try:
        groups = rm.connect(PLAN, timeout=TIMEOUT)
    except (AgreementError, ConnectError) as error:
        return {
            "message": str(error),
            "missing": list(error.values.get("missing", ())),
            "seconds": time.perf_counter() - started,
        }
    if me.rank == VICTIM:  # there are fewer operations than that
        groups.close()
        return "done"
    return None


def _heard(outcomes, at, *, after, late, kind, folder):
    """What is wrong with what the others heard, None where nothing is; and whether connect has fewer operations."""
    ended = outcomes(3, _survive, at, after, late, kind, folder, world=None, limit=25)
    others = [ended[rank] for rank in range(3) if rank != VICTIM]
    wrong = [
        str(outcome.value if outcome.ok else outcome)
        for outcome in others
        if not outcome.ok or (outcome.value and not _names_the_victim(outcome.value))
    ]
    return wrong, ended[VICTIM].value == "done"


def _names_the_victim(told):
    return told["missing"] == [VICTIM] and told["seconds"] < TIMEOUT + 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("late", [False, True], ids=["first to come", "last to come"])
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_the_rank_that_was_killed_is_named(outcomes, tmp_path, kind, late):
    """3 ranks, one ends after each of its operations in turn: the others name it, and nobody else."""
    if kind == "file" and not os.environ.get("RANKMESH_TEST_SWEEP"):
        pytest.skip("set RANKMESH_TEST_SWEEP=1 to sweep over this store too; a FileStore looks once a second")
    bad = {}
    for at in range(1, 40):
        wrong, done = _heard(outcomes, at, after=True, late=late, kind=kind, folder=str(tmp_path / f"store-{at}"))
        if wrong:
            bad[at] = wrong
        if done:
            break
    assert 8 < at < 39
    assert not bad, bad
