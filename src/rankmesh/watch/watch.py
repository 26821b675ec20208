"""The watch: a thread that speaks for its rank when its program cannot.

```
every tick   a call under way for longer than the limit? another rank asks? SIGUSR1?
then         ask all -> write this rank's recording -> look at silent ranks of this host
             -> the first to claim it, rank 0 before others, gathers and tells the verdict
```

Nothing of it is collective: a rank that is dead, stopped, or in a loop is told of by the others.
"""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from rankmesh.doctor.diagnosis import diagnose
from rankmesh.doctor.formats import parsed, unpacked
from rankmesh.doctor.recording import Recording, recording_of
from rankmesh.doctor.words import report
from rankmesh.errors import RecordingError
from rankmesh.groups import torch_private
from rankmesh.groups.limits import time_limit
from rankmesh.groups.told import asked_of
from rankmesh.watch.posts import FolderPost, StorePost
from rankmesh.watch.recorder import Recorder, packed, write
from rankmesh.watch.siblings import Siblings

__all__ = ["Watch", "start"]

_Come = TypeVar("_Come")

_log = logging.getLogger("rankmesh.watch")
# Reading the recorder takes some 20 ms where it is full, so it is read less often than the stacks are looked at.
_LONGEST_READ = 10.0
_LONGEST_TICK, _MEET, _PATIENT = 1.0, timedelta(seconds=60), timedelta(seconds=5)
# Seconds that a rank waits at its beginning for the others' word, and at its end for a watch that has nothing to say.
_MOMENT = 1.0
# Left by the rank whose call lasts too long.
_HANGS = "hangs"
_sessions = count()


class Watch:
    """The watch of this rank: ``close`` it before the world is destroyed, or leave that to the end of the program.

    ``folder`` is where recordings go, None for nowhere but the store; ``verdict`` is what was told of the last hang, by
    the rank that gathered. ``heard`` is given the verdict, in place of the log; ``place`` is where the ranks of this
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
        world = torch_private.default_group()
        self.folder = folder
        self.verdict: str | None = None
        self._heard = heard
        self._limit = None if limit is None else limit.total_seconds()
        self._patience = self._limit or world.timeout.total_seconds() / 2
        self._recorder = Recorder()
        self._store = None if world.store is None else world.store.clone()
        if self._store is not None:
            self._store.set_timeout(_PATIENT)
        self._number, self._place = next(_sessions), place
        self._posts: list[FolderPost | StorePost] = []
        self._stop, self._met = threading.Event(), threading.Event()
        self._turn = 0
        self._speaking = self._hung = False
        self._mark: tuple[int, int] | None = None
        self._since, self._read_at = time.monotonic(), 0.0
        self._told = threading.Condition()
        self._wanted: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="rankmesh-watch")
        self._thread.start()
        # A rank that stops soon is known to the others of its host by then.
        self._met.wait(_MOMENT)
        atexit.register(self.close)
        asked_of.append(self.ask)

    @property
    def _tick(self) -> float:
        return min(_LONGEST_TICK, self._patience / 10)

    @property
    def _grace(self) -> float:
        """How long ranks that were asked may take to answer."""
        return max(3.0, min(10.0, self._patience / 5))

    # -- the session -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            token = self._meet()
        except (RuntimeError, OSError) as error:
            _log.warning("rankmesh: no watch on rank %s: %s", self._recorder.rank, error)
            return
        if self.folder is not None:
            self._posts.append(FolderPost(self.folder, token))
        if self._store is not None:
            self._posts.append(StorePost(self._store, token))
        self._siblings = Siblings(token, self._recorder.rank, self._place)
        self._met.set()
        try:
            while not self._stop.wait(self._tick):
                self._look()
            with suppress(RuntimeError):  # a store that is gone keeps nothing
                self._leave_nothing()
        finally:
            self._siblings.close()

    @property
    def _key(self) -> str:
        """Where the ranks of this session meet in the store."""
        return f"rankmesh/watch/{self._recorder.attempt}/{self._number}"

    def _meet(self) -> str:
        """A word that this session's ranks share: rank 0 makes it up."""
        if self._store is None:
            return f"{os.getppid()}-{self._number}"
        if self._recorder.rank == 0:
            self._store.set(self._key, os.urandom(8).hex())
        self._store.wait([self._key], _MEET)
        return str(self._store.get(self._key).decode())

    def _leave_nothing(self) -> None:
        """Take away what this rank has left for others; the last of all ranks takes what belongs to none."""
        # One turn more than this rank has spoken in: another may have asked again.
        rank, turns = self._recorder.rank, range(self._turn + 1)
        own = [f"{what}/{turn}/{rank}" for turn in turns for what in ("said", "recording")]
        shared = [f"{what}/{turn}" for turn in turns for what in ("ask", "gather", "verdict")]
        counts = [f"said/{turn}/count" for turn in turns]
        store, left = self._store, f"{self._key}/left"
        last = store is None or store.add(left, 1) == self._recorder.world_size
        for post in self._posts:
            post.clear([*own, *shared, *counts, _HANGS] if last else own)
        if store is not None and last:
            store.delete_key(self._key)
            store.delete_key(left)

    def close(self) -> None:
        """End the watch; the recording of a rank that has ended stays in the folder."""
        if self._stop.is_set():
            return
        self._stop.set()
        asked_of.remove(self.ask)
        self._thread.join(_MOMENT)
        if self._speaking:
            self._thread.join(2 * self._grace)
        atexit.unregister(self.close)
        self._store, self._posts = None, []
        if self._hung or self._heard is not None:
            # What hung is what counts, whatever became of it.
            return
        try:
            self._leave(self._recorder.document("the end", ended=True))
        except (RuntimeError, OSError) as error:
            _log.debug("rankmesh: rank %s ended without a recording: %s", self._recorder.rank, error)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- when to speak -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._recorder.look()
        reason = self._wanted or self._signal() or self._asked()
        if not reason and (reason := self._overdue()):
            self._put(_HANGS, b"")
        if reason:
            self._wanted = None
            self._speak(reason)

    def _signal(self) -> str:
        return "SIGUSR1" if self._siblings.signalled() else ""

    def _asked(self) -> str:
        return "another rank asked" if any(post.has(f"ask/{self._turn}") for post in self._posts) else ""

    def _overdue(self) -> str:
        """Why this rank speaks up by itself: a call that lasts too long; once for each watch, whichever rank it was."""
        call, mark = self._recorder.in_call(self._mark)
        if mark != self._mark:
            self._mark, self._since = mark, time.monotonic()
        if self._hung:
            return ""
        waited = time.monotonic() - self._since
        if call.get("operation") and waited > self._patience:
            return f"{call['operation']} is under way for {waited:.0f} s"
        return self._overdue_by_record()

    def _overdue_by_record(self) -> str:
        if time.monotonic() - self._read_at < min(_LONGEST_READ, self._patience / 10):
            return ""
        self._read_at, now = time.monotonic(), time.time_ns()
        for entry in chain.from_iterable(json.loads(data).get("entries") or () for data in torch_private.under_way()):
            limit = self._limit or float(entry.get("timeout_ms") or 0) / 2000 or self._patience
            lasted = (now - int(entry["time_created_ns"])) / 1e9
            if lasted > limit and not entry.get("retired"):
                return f"{entry['profiling_name']} is under way for {lasted:.0f} s"
        return ""

    def ask(self, reason: str, within: float = 30.0) -> str | None:
        """Ask all ranks for their recordings now; the verdict, None where none was told in time."""
        if not self._met.is_set():
            return None
        with self._told:
            turn, self._wanted = self._turn, reason
            self._told.wait_for(lambda: self._turn > turn or not self._thread.is_alive(), within)
        return self.verdict

    # -- speaking ----------------------------------------------------------------------------------------------

    def _speak(self, reason: str) -> None:
        turn, self._speaking = self._turn, True
        self._put(f"ask/{turn}", reason.encode())
        self._leave(self._recorder.document(reason, self._mark))
        for post in self._posts:
            post.join(f"said/{turn}", self._recorder.rank)
        self._await_others(turn)
        spoke = self._spoke(turn)
        self._tell_of_silent(spoke)
        if self._claims(turn, spoke):
            self._gather(turn)
        self._hear(turn)
        if not torch_private.frames_are_ready():
            # Now that all is said there is time to load what names the frames.
            self._leave(self._recorder.document(reason, self._mark, frames=True))
        # A rank that was slow to speak was sent SIGUSR1 for its stacks: that is answered.
        self._siblings.signalled()
        self._hung = self._hung or any(post.has(_HANGS) for post in self._posts)
        self._speaking = False
        with self._told:
            # Who asked meanwhile has this turn's answer; another turn would wait for ranks that have gone on.
            self._turn, self._wanted = self._turn + 1, None
            self._told.notify_all()

    def _put(self, key: str, content: bytes) -> None:
        for post in self._posts:
            post.put(key, content)

    def _leave(self, data: Mapping[str, Any], rank: int | None = None) -> None:
        """Put a recording in the folder, and in the store for those who do not share the folder."""
        rank = self._recorder.rank if rank is None else rank
        content = packed(data)
        if self.folder is not None:
            write(self.folder / f"rank{rank}.json.gz", content)
        for post in self._stores:
            if not data["rankmesh"].get("ended"):
                post.put(f"recording/{self._turn}/{rank}", content)

    @property
    def _stores(self) -> list[StorePost]:
        return [post for post in self._posts if isinstance(post, StorePost)]

    def _await_others(self, turn: int) -> None:
        self._await(lambda: self._count(turn) >= self._recorder.world_size)

    def _await(self, come: Callable[[], _Come]) -> _Come:
        """What has come, waited for as long as ranks are given for their answers."""
        end = time.monotonic() + self._grace
        while not (found := come()) and time.monotonic() < end:
            time.sleep(self._tick / 2)
        return found

    def _count(self, turn: int) -> int:
        return max((post.count(f"said/{turn}") for post in self._posts), default=0)

    def _spoke(self, turn: int) -> set[int]:
        ranks = range(self._recorder.world_size)
        return {rank for rank in ranks if any(post.has(f"said/{turn}/{rank}") for post in self._posts)}

    def _tell_of_silent(self, spoke: set[int]) -> None:
        for rank, (state, text) in self._siblings.silent(spoke).items():
            if self._left_by(rank, self._turn) is None:
                self._leave(self._recorder.silent(rank, state, text), rank)

    def _claims(self, turn: int, spoke: set[int]) -> bool:
        """Whether this rank gathers: the lowest that spoke, unless another one has begun to."""
        if self._recorder.rank != min(spoke, default=self._recorder.rank):
            self._await(lambda: any(post.has(f"verdict/{turn}") for post in self._posts))
        answers = (post.claim(f"gather/{turn}") for post in reversed(self._posts))
        return next((answer for answer in answers if answer is not None), True)

    def _gather(self, turn: int) -> None:
        diagnosis = diagnose(self._recordings(turn))
        text = report(diagnosis)
        if self.folder is not None:
            write(self.folder / "verdict.json", json.dumps(diagnosis.to_dict(), indent=2).encode())
        self._put(f"verdict/{turn}", diagnosis.verdict.encode())
        if self._heard is None:
            _log.warning("rankmesh: %s\nrankmesh: the recordings are in %s", text, self.folder)

    def _recordings(self, turn: int) -> dict[int, Recording]:
        found = {}
        for rank in range(self._recorder.world_size):
            content = self._left_by(rank, turn)
            if content is not None:
                try:
                    found[rank] = recording_of(_document(content), rank, f"rank{rank}")
                except RecordingError as error:
                    _log.warning("rankmesh: %s", error)
        return found

    def _left_by(self, rank: int, turn: int) -> bytes | None:
        """The recording that a rank has left, in the store or in the folder."""
        content = next((data for post in self._stores if (data := post.get(f"recording/{turn}/{rank}"))), None)
        path = None if self.folder is None else self.folder / f"rank{rank}.json.gz"
        return path.read_bytes() if content is None and path is not None and path.exists() else content

    def _hear(self, turn: int) -> None:
        """The verdict of the rank that gathers."""
        said = self._await(lambda: next((data for post in self._posts if (data := post.get(f"verdict/{turn}"))), None))
        if said:
            self.verdict = said.decode()
            if self._heard is not None:
                self._heard(self.verdict)


def _document(content: bytes) -> dict[str, Any]:
    data = parsed(unpacked(io.BytesIO(content)))
    return data if isinstance(data, dict) else {}


def start(folder: str | os.PathLike[str] | None = None, *, limit: float | timedelta | None = None) -> Watch:
    """Watch over this rank, in a world that is initialised; called by every rank, in the same order of watches.

    ``folder`` takes the recordings (else the environment's ``RANKMESH_RECORD``, else ``recordings``); ``limit`` is how
    long a call may take, in seconds, before every rank that can still speak writes its recording: by default half of
    its group's timeout.
    """
    place = Path(folder or os.environ.get("RANKMESH_RECORD") or "recordings")
    return Watch(place.absolute(), None if limit is None else time_limit(limit))
