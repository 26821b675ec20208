"""The watch: a thread that records its rank when its program cannot.

```
every tick   a call under way for longer than the limit? another rank asks? SIGUSR1?
then         all responsive ranks write their recordings, and one of them diagnoses (``inquiries``)
```
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path

from rankmesh.backend.default import default_group
from rankmesh.core.limits import time_limit
from rankmesh.debug.watch.board import Board
from rankmesh.debug.watch.host import HostRanks
from rankmesh.debug.watch.inquiries import Inquiries, Pace
from rankmesh.debug.watch.overdue import Overdue
from rankmesh.debug.watch.recorder import Recorder
from rankmesh.runtime.told import asked_of

__all__ = ["Watch", "start"]

_log = logging.getLogger("rankmesh.watch")
_MEET, _PATIENT = timedelta(seconds=60), timedelta(seconds=5)
# Seconds that a rank waits at its beginning for the others, and at its end for an idle watch.
_MOMENT = 1.0
# Seconds that an inquiry may take, beside the reading of its recordings.
_INQUIRY = 30.0
_sessions = count()


class Watch:
    """The watch of this rank: ``close`` it before the world is destroyed, or leave that to the end of the program.

    ``folder`` is where recordings go, None for nowhere but the store; ``verdict`` is the last diagnosis as a sentence,
    None before the first. ``heard`` takes the diagnosis, in place of the log; ``place`` is where the ranks of this
    host find each other.
    """

    def __init__(
        self,
        folder: Path | None,
        limit: timedelta | None = None,
        *,
        heard: Callable[[str], None] | None = None,
        place: Path | None = None,
    ) -> None:
        world = default_group()
        self.folder = folder
        self.verdict: str | None = None
        self._heard = heard
        patience = (limit or world.timeout / 2).total_seconds()
        self._recorder = Recorder()
        self._overdue = Overdue(self._recorder, patience, limited=limit is not None)
        self._pace = Pace(patience, self._recorder.world_size)
        self._store = None if world.store is None else world.store.clone()
        if self._store is not None:
            self._store.set_timeout(_PATIENT)
        self._process = os.getpid()
        self._number, self._place = next(_sessions), place
        self._board: Board | None = None
        self._stop, self._met = threading.Event(), threading.Event()
        self._inquiries_over = 0
        self._responding = self._hung = False
        self._told = threading.Condition()
        self._wanted: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="rankmesh-watch")
        self._thread.start()
        # A rank that stops soon is known to the others of its host by then.
        self._met.wait(_MOMENT)
        atexit.register(self.close)
        asked_of.append(self.ask)

    # -- the session -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            session = self._joined()
        except (RuntimeError, OSError) as error:
            _log.warning("rankmesh: no watch on rank %s: %s", self._recorder.rank, error)
            return
        self._board = board = Board(session, self.folder, self._store)
        host = HostRanks(session, self._recorder.rank, self._place)
        inquiries = Inquiries(board, self._recorder, host, self._pace)
        self._met.set()
        try:
            while not self._stop.wait(self._pace.tick):
                self._look(host, inquiries)
            with suppress(RuntimeError):  # a store that is gone keeps nothing
                self._leave_nothing(inquiries)
        finally:
            host.close()

    @property
    def _key(self) -> str:
        """The key of this session in the store."""
        return f"rankmesh/watch/{self._recorder.attempt}/{self._number}"

    def _joined(self) -> str:
        """A token that this session's ranks share: rank 0 makes it up."""
        if self._store is None:
            return f"{os.getppid()}-{self._number}"
        if self._recorder.rank == 0:
            self._store.set(self._key, os.urandom(8).hex())
        self._store.wait([self._key], _MEET)
        return str(self._store.get(self._key).decode())

    def _leave_nothing(self, inquiries: Inquiries) -> None:
        """Take away what this rank has left for others; the last of all ranks takes what belongs to none."""
        store, left = self._store, f"{self._key}/left"
        last = store is None or store.add(left, 1) == self._recorder.world_size
        inquiries.clear(shared=last)
        if store is not None and last:
            store.delete_key(self._key)
            store.delete_key(left)

    def close(self) -> None:
        """End the watch; the recording of a rank that has ended stays in the folder."""
        if self._stop.is_set() or os.getpid() != self._process:
            # A process that was forked off is no rank, whatever ends it.
            return
        if not self._hung and self._heard is None and _failed():
            self.ask("a call failed")
        self._stop.set()
        asked_of.remove(self.ask)
        self._thread.join(_MOMENT)
        if self._responding:
            self._thread.join(2 * self._pace.grace + self._pace.reading)
        atexit.unregister(self.close)
        board, self._store, self._board = self._board, None, None
        if self._hung or self._heard is not None or board is None:
            # What hung is what counts, whatever became of it.
            return
        try:
            board.leave(self._recorder.rank, self._inquiries_over, self._recorder.document("the end", ended=True))
        except RuntimeError as error:
            _log.debug("rankmesh: rank %s ended without a recording: %s", self._recorder.rank, error)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- when to respond -----------------------------------------------------------------------------------------

    def _look(self, host: HostRanks, inquiries: Inquiries) -> None:
        self._recorder.look()
        reason = self._wanted or ("SIGUSR1" if host.signalled() else "")
        if not reason and inquiries.asked():
            reason = "another rank asked"
        overdue = "" if reason else self._overdue.reason()
        if not reason and not overdue:
            return
        self._wanted, self._responding = None, True
        mark = self._overdue.mark
        # What the program is in by now is part of what is reported.
        self._overdue.follow()
        began = time.monotonic()
        self.verdict = None
        inquiries.speak(reason or overdue, mark, self._hear, hangs=bool(overdue))
        if inquiries.hung:
            self._hung, self._overdue.reported = True, began
        self._responding = False
        with self._told:
            # Who asked meanwhile has this inquiry's answer; another one would wait for ranks that have gone on.
            self._inquiries_over, self._wanted = inquiries.number, None
            self._told.notify_all()

    def _hear(self, verdict: str, text: str) -> None:
        self.verdict = verdict
        if self._heard is not None:
            self._heard(verdict)
        elif text:
            _log.warning("rankmesh: %s\nrankmesh: the recordings are in %s", text, self.folder)

    def ask(self, reason: str) -> str | None:
        """Ask all ranks for their recordings now; the diagnosis in one sentence, None where none came in time."""
        if not self._met.is_set():
            return None
        within = _INQUIRY + self._pace.reading
        with self._told:
            over, self._wanted = self._inquiries_over, reason
            if not self._told.wait_for(lambda: self._inquiries_over > over or not self._thread.is_alive(), within):
                return None
        return self.verdict


def _failed() -> bool:
    """Whether the program ends because a call of torch failed: gloo's peers of a rank that it has aborted end so."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return isinstance(error, RuntimeError)


def start(folder: str | os.PathLike[str] | None = None, *, limit: float | timedelta | None = None) -> Watch:
    """Watch over this rank, in a world that is initialised; called by every rank, in the same order of watches.

    ``folder`` takes the recordings (else the environment's ``RANKMESH_RECORD``, else ``recordings``); ``limit`` is how
    long a call may take, in seconds, before every responsive rank writes its recording: by default half of
    its group's timeout.
    """
    place = Path(folder or os.environ.get("RANKMESH_RECORD") or "recordings")
    return Watch(place.absolute(), None if limit is None else time_limit(limit))
