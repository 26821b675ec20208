"""``rm.init``: join the world of this process, and record it from its beginning if that is wanted.

The recorder and the watch are loaded only then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rankmesh.runtime.init import LiveRank, enter

__all__ = ["init", "watched"]


def init(
    backend: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    record: bool | str | os.PathLike[str] = False,
) -> LiveRank:
    """Join the world that this process's launcher started, or be a world of one; called by every rank.

    Without ``backend`` it is NCCL where every rank has a GPU of its own, else gloo, on all ranks alike. ``timeout``
    (seconds, or a timedelta) is how long ranks wait for each other here and in the world's collectives; without it
    that is 300 s here, and torch's own default there. Where a world is initialised already, as in Ray's workers, it is
    taken as it is, and stays when this closes. No environment variable is changed but the recorder's.

    ``record`` keeps the calls of this rank, with their lines of code, and watches over them until the world is left:
    when one takes longer than half of its group's timeout, every responsive rank writes its recording, and the log
    (``rankmesh.watch``) says what hangs. It is True, or the folder for the recordings; the environment's
    ``RANKMESH=watch`` and ``RANKMESH_RECORD``, a folder, take its place. Every rank records, or none.

    Raises ``ConnectError`` for variables that contradict each other, a meeting place that does not resolve or answer,
    ranks that ask for different backends, and a backend that some rank has no device for; ``AgreementError`` naming
    the ranks that did not come.
    """
    switched = bool(os.environ.get("RANKMESH") or os.environ.get("RANKMESH_RECORD"))
    if not record and not switched:
        return enter(backend=backend, timeout=timeout)
    from rankmesh.debug.watch import switch
    from rankmesh.debug.watch.recorder import prepare
    from rankmesh.debug.watch.watch import start

    prepare()
    live = enter(backend=backend, timeout=timeout)
    # The initialisation has started the watch that the environment asks for, where torch loads entry points.
    watches = switch.start() if switched else [start(None if isinstance(record, bool) else record)]
    live.before_leaving += [watch.close for watch in watches]
    return live


@contextmanager
def watched(live: LiveRank, diagnosed: Callable[[str], None]) -> Iterator[LiveRank]:
    """Watch over a rank until it leaves its world; ``diagnosed`` is given the diagnosis of a hang.

    Recordings are left only in the folder ``RANKMESH_RECORD``.
    """
    from rankmesh.debug.watch.watch import Watch

    with live:
        if not live.launch.single_rank:
            folder = os.environ.get("RANKMESH_RECORD")
            watch = Watch(Path(folder).absolute() if folder else None, diagnosed=lambda verdict, _: diagnosed(verdict))
            live.before_leaving.append(watch.close)
        yield live
