"""``rm.init``: join the world of this process, and record it from its beginning if that is wanted.

The recorder and the watch are loaded only then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rankmesh.errors import at_caller
from rankmesh.runtime.init import LiveRank, enter

__all__ = ["init", "watched"]


@at_caller
def init(
    backend: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    record: bool | str | os.PathLike[str] = False,
) -> LiveRank:
    """Initialise ``torch.distributed`` for the ranks that the launcher started, or for one rank without a launcher.

    Every rank calls it. The default ``backend`` is NCCL if every rank has a GPU of its own, else gloo on all ranks.
    ``timeout`` (seconds, or a timedelta) limits the wait for other ranks here, 300 s by default, and in the world's
    collectives, where torch's default applies. A world that is already initialised, as in Ray's workers, is used as it
    is, and is not destroyed at the end. Only environment variables of the recorder are changed.

    ``record`` is True, or the folder for recordings: it records the calls of this rank with their source lines, and
    watches them. When a call takes longer than half of its group's timeout, every responsive rank writes its recording,
    and the log (``rankmesh.watch``) reports the diagnosis. The environment variables ``RANKMESH=watch`` and
    ``RANKMESH_RECORD`` (a folder) override ``record``. Either every rank records, or none does.

    Raises ``ConnectError`` if variables contradict each other, if the rendezvous address does not resolve or answer, if
    ranks request different backends, or if a rank has no device for the backend. Raises ``AgreementError`` with the
    ranks that did not arrive.
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
