"""The start of the watch in a job that was not written for rankmesh (``setting``), and the action after a diagnosis."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from itertools import count

from rankmesh.backend.default import default_group
from rankmesh.debug.watch import watch
from rankmesh.debug.watch.recorder import prepare
from rankmesh.debug.watch.setting import SWITCH, setting
from rankmesh.debug.watch.watch import Watch
from rankmesh.errors import ConnectError
from rankmesh.runtime.world import World

__all__ = ["EXIT", "THEMSELVES", "begin", "start"]

# The status of a process that ends because its job hangs, as `rankmesh doctor` has it.
EXIT = 7
# Modules of what watches over its worlds itself; a job that survives adds its own.
THEMSELVES = {"rankmesh.debug.verification.work"}
_log = logging.getLogger("rankmesh.watch")
_worlds = count()


def start(environment: Mapping[str, str] = os.environ) -> list[Watch]:
    """Watch over this rank of the world that was just initialised, if the environment asks for it.

    Returns its watch, and none for a world of one, of a backend without recordings, or that is watched already; a job
    that survives, and a check, watch over their worlds themselves. What cannot be read is told by rank 0 alone.
    """
    world, ignored = default_group(), list[str]()
    try:
        wanted = setting(environment, ignored)
    except ConnectError as error:
        wanted = None
        _log_once(world.rank, f"this job is not watched: {error}")
    if ignored:
        _log_once(world.rank, f"{' and '.join(ignored)} of {SWITCH} cannot be read: ignored")
    if wanted is None:
        return []
    if world.size == 1 or not {"gloo", "nccl"} & {*world.backend.replace(",", ":").split(":")}:
        return []
    if World.current().diagnosing or any(name in sys.modules for name in THEMSELVES):
        return []
    after = None if wanted.after is None else timedelta(seconds=wanted.after)
    # Groups of an earlier world have the same names.
    anew = next(_worlds) > 0
    return [Watch(wanted.folder.absolute(), after, then=ACTIONS[wanted.then], anew=anew, slow=wanted.slow)]


@cache
def _log_once(rank: int, line: str) -> None:
    """Log a line once in a job, whose worlds may be many."""
    if rank == 0:
        _log.warning("rankmesh: %s", line)


def begin(record: bool | str | os.PathLike[str]) -> Callable[[], list[Callable[[], None]]]:
    """Record from now on, for ``rm.init(record=)``; what starts the watch of the world, and returns what ends it.

    The environment goes before ``record``. torch has started its watch already, where it loads entry points.
    """
    wanted = setting(os.environ)  # on all ranks, where a program asks for it, what cannot be read is an error
    prepare(slow=True)

    def started() -> list[Callable[[], None]]:
        watches = start() if wanted else [watch.start(None if isinstance(record, bool) else record)]
        return [one.close for one in watches]

    return started


def _abort() -> None:
    _log.warning("rankmesh: %s=watch:then=abort has blocked calls return with an error", SWITCH)
    World.current().abort()


def _exit() -> None:
    _log.warning("rankmesh: %s=watch:then=exit ends this process with status %s", SWITCH, EXIT)
    logging.shutdown()
    os._exit(EXIT)


ACTIONS = {"log": None, "abort": _abort, "exit": _exit}
