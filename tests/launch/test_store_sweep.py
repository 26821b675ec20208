"""The rank that serves the store is stopped, or the way to it cut, at each message of a job: every wait has a limit."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests import limits
from tests.rendezvous.link import Link
from tests.sockets import free_port
from tests.sweeping import ALL

import rankmesh as rm
from rankmesh.backend import gloo
from rankmesh.launch.table import torchrun_variables
from rankmesh.rendezvous import round as rounds
from rankmesh.runtime import init

pytestmark = pytest.mark.nightly  # a sweep


def _cut(link):
    link.cut = True


def _job(me, port, how, moment, at, folder):
    """A job of three ranks, of which rank 1 counts its messages from a moment on; how it ended, and their number."""
    gloo.PATIENCE = rounds.PATIENCE = rounds._MOMENT = 1.0
    init._FAREWELL = 3.0
    me.store.set(f"process/{me.rank}", str(os.getpid()))
    served_by = int(me.store.get("process/0"))
    me.meet("all know who serves the store")
    happens = {"cut": _cut, "stopped": lambda _: os.kill(served_by, signal.SIGSTOP)}[how]
    link = Link(port, happens)
    place = link.port if me.rank == 1 else port
    os.environ.update(torchrun_variables(me.rank, 3, local_rank=me.rank, local_world_size=3, port=place))
    started, error, begun = time.monotonic(), None, {}

    def begin(name):
        begun[name] = link.messages
        link.at = begun[moment] + at if moment in begun else 0

    try:
        begin("init")
        with rm.init("gloo", timeout=3):
            with rm.connect("tp=3", timeout=3), rm.connect("dp=3", timeout=3) as groups:
                groups.warm_up(timeout=3)
                begin("close")
            begin("leave")
    except rm.RankmeshError as caught:
        error = [type(caught).__name__, str(caught), list(caught.values.get("missing", ()))]
    seconds = time.monotonic() - started
    (Path(folder) / f"ended-{me.rank}").touch()
    if how == "stopped" and all((Path(folder) / f"ended-{rank}").exists() for rank in (1, 2)):
        os.kill(served_by, signal.SIGKILL)
    return [error, seconds, link.messages - begun.get(moment, 0)]


def _wrong(ended, how):
    """What is wrong with how the ranks ended; those that are gone are the victim."""
    for one in ended:
        if one.rank == 0 and how == "stopped" and one.code == -signal.SIGKILL:
            continue
        if not one.ok:
            return str(one)
        error, seconds, _ = one.value
        if seconds > 30 + limits.AT_ONCE:
            return f"rank {one.rank} took {seconds:.0f} s: {error}"
        if error and not _right(one.rank, error, how):
            return f"rank {one.rank}: {error}"
    return None


def _right(rank, error, how):
    kind, message, missing = error
    if "was not warm" in message:  # names the members: others have made their groups by then
        return True
    return missing == [0] or kind == "StoreLost" if how == "stopped" or rank == 1 else missing == [1]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("moment", "some"), [("init", (1, 15, 30, 60)), ("close", (1, 2)), ("leave", (1,))])
@pytest.mark.parametrize("how", ["stopped", "cut"])
def test_every_wait_for_the_store_has_a_limit(outcomes, tmp_path, how, moment, some):
    """3 ranks: rank 0 stops or rank 1 loses its way there, at each of its messages in turn: all end, and name it."""
    wrong, messages = {}, 0
    for at in range(1, 400) if ALL else some:
        folder = tmp_path / str(at)
        folder.mkdir()
        ended = outcomes(3, _job, free_port(), how, moment, at, str(folder), world=None, limit=120)
        if (found := _wrong(ended, how)) is not None:
            wrong[at] = found
        messages = ended[1].value[2] if ended[1].ok else at
        if messages < at:
            break
    assert not wrong, "\n".join(f"at {at}: {found}" for at, found in wrong.items())
    assert messages >= some[-1] or ALL
