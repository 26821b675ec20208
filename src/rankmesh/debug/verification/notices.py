"""Notices: what the ranks of a check tell each other through the job's store, whatever their collectives do.

```
open         rank 0 is there: the store is not that of a check before, which rank 0 is about to close
diary/3      the diary of rank 3, written again after each event
ended        how many ranks have had their last word
roll         somebody calls the roll: a rank failed, or stands still
here/3       rank 3 answers: its process is alive
result       what the rank that reports found out
readers      how many have read it
```

A thread of its own talks to the store: where the way to it is cut, torch's client does not come back at its timeout.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.debug.verification.diary import Diary, ended
from rankmesh.launch.started import Launch
from rankmesh.runtime.served_store import is_served, turn

__all__ = ["Notices"]

_LARGEST = 2**20
# How long a rank waits for its own words to be on their way, in seconds.
_MOMENT = 1.0


class Notices:
    """The notices of one check, seen from one rank; ``heard`` is when the store last answered.

    Where the store does not answer any more, calls come back all the same, with what was known until then.
    """

    def __init__(self, launch: Launch, store: Store, again: Callable[[], Store]) -> None:
        self._store, self._again = store, again
        self._what = f"rankmesh/check/{launch.attempt}"
        self._rank, self._size = launch.rank, launch.world_size
        self._lock = threading.Lock()
        self._todo: list[tuple[str, str | int]] = []
        self._over, self._news, self._sent = threading.Event(), threading.Event(), threading.Event()
        self._pause = 0.1 if launch.world_size <= 256 else 1.0
        self.heard, self.gone = time.monotonic(), False
        self.called: float | None = None
        self.result: dict[str, Any] | None = None
        self.ended = 0
        self._thread = threading.Thread(target=self._talk, daemon=True, name="rankmesh-notices")
        self._thread.start()

    # -- what this rank tells -----------------------------------------------------------------------------------

    def write(self, diary: Diary) -> None:
        """This rank's diary, as it is now; a rank that dies next has said so much."""
        self._sent.clear()
        self._tell(f"diary/{self._rank}", json.dumps(diary))
        if ended(diary):
            self._tell("ended", 1)
        self._sent.wait(_MOMENT)

    def call_the_roll(self) -> None:
        """Ask every rank whether it is there."""
        self._tell("roll", "yes")

    def show(self, result: dict[str, Any]) -> None:
        """What this rank, as the one that reports, found out."""
        self._tell("result", json.dumps(result))

    def _tell(self, key: str, value: str | int) -> None:
        with self._lock:
            self._todo.append((key, value))
        self._news.set()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        try:
            self._find()
            while not self._over.is_set() or self._todo:
                self._send()
                self._look()
                self.heard = time.monotonic()
                self._news.wait(self._pause)
                self._news.clear()
        except RuntimeError:
            self.gone = True

    def _find(self) -> None:
        """The keys of this check; a rank that is early may find the store of the one before, and looks again."""
        try:
            self._store = PrefixStore(f"{self._what}/{turn(self._store, self._what, self._rank)}", self._store)
            if self._rank == 0:
                self._store.set("open", "yes")
            while not (is_served() or self._store.check(["open"]) or self._over.is_set()):
                time.sleep(self._pause)
        except RuntimeError:
            if self._rank == 0 or is_served() or self._over.is_set():
                raise
            self._store = self._again()
            self._find()

    def _send(self) -> None:
        with self._lock:
            todo, self._todo = self._todo, []
        for key, value in todo:
            if isinstance(value, int):
                self._store.add(key, value)
            else:
                self._store.set(key, value)
        self._sent.set()

    def _look(self) -> None:
        if self.called is None and self._store.check(["roll"]):
            self._store.set(f"here/{self._rank}", "yes")
            self.called = time.monotonic()
        if self._rank == 0:
            self.ended = self._store.add("ended", 0)
        if self.result is None and self._store.check(["result"]):
            self.result = self._read("result")
            self._store.add("readers", 1)

    def _read(self, key: str) -> Any:
        """The JSON under a key, None where there is none or more than a rank of ours would write."""
        text = self._store.get(key) if self._store.check([key]) else b""
        return json.loads(text) if 0 < len(text) <= _LARGEST else None

    # -- for the rank that reports ------------------------------------------------------------------------------

    def diaries(self) -> dict[int, Diary]:
        """The diaries of all ranks, as far as the store answers."""
        found: dict[int, Diary] = {}
        with suppress(RuntimeError):
            found |= {rank: self._read(f"diary/{rank}") or [] for rank in range(self._size)}
        return found

    def silent(self) -> list[int]:
        """The ranks that have not answered the roll."""
        with suppress(RuntimeError):
            return [rank for rank in range(self._size) if not self._store.check([f"here/{rank}"])]
        return []

    def is_first(self) -> bool:
        """Whether this rank is the first that would report in the place of rank 0."""
        with suppress(RuntimeError):
            return self._store.add("deputy", 1) == 1
        return False

    def await_readers(self, readers: int, seconds: float) -> None:
        """Stay until the others have read the result: the store may live in this process."""
        end = time.monotonic() + seconds
        with suppress(RuntimeError):
            while not self.gone and self._store.add("readers", 0) < readers and time.monotonic() < end:
                time.sleep(self._pause)

    def close(self) -> None:
        """Say what is still to be said, and no more."""
        self._over.set()
        self._news.set()
        self._thread.join(_MOMENT)
