"""The board: what the ranks of one session leave for each other, on all posts as on one.

```
inquiry 0    ask/0   said/0 (who has spoken)   recording/0/RANK   gather/0 (who gathers)   verdict/0
inquiry 1    ask/1   ...
folder       rankRANK.json.gz: the last recording of each, whichever session and inquiry it is from
```

A recording in the folder says its session and inquiry: one that an earlier watch, attempt or inquiry left there is not
what its rank says now.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rankmesh.debug.doctor.formats import parsed, unpacked
from rankmesh.debug.doctor.recording import Recording, recording_of
from rankmesh.debug.watch.posts import FolderPost, StorePost
from rankmesh.errors import RecordingError

__all__ = ["Board"]

_Answer = TypeVar("_Answer")

_log = logging.getLogger("rankmesh.watch")


class Board:
    """The posts of one session: the store first, which answers for all ranks at once, then the folder."""

    def __init__(self, session: str, folder: Path | None, store: Any | None) -> None:
        # Without a store each host has a session of its own, which says nothing of the others' recordings.
        self._session = "" if store is None else session
        self._folder = folder
        self._store = None if store is None else StorePost(store, session)
        posts = (self._store, None if folder is None else FolderPost(folder, session))
        self._posts: tuple[StorePost | FolderPost, ...] = tuple(post for post in posts if post is not None)

    # -- word ----------------------------------------------------------------------------------------------------

    def put(self, key: str, content: bytes = b"") -> None:
        """Leave word under a key, on every post."""
        for post in self._posts:
            post.put(key, content)

    def get(self, key: str) -> bytes | None:
        """The word under a key, None where there is none."""
        return next((word for post in self._posts if (word := post.get(key))), None)

    def has(self, key: str) -> bool:
        """Whether there is word under a key."""
        return any(post.has(key) for post in self._posts)

    def told(self, key: str) -> bool:
        """Whether there is word under a key, as the first post tells that answers."""
        return _first((post.has(key) for post in self._posts), otherwise=False)

    def join(self, key: str, rank: int) -> None:
        """Be one of those who have joined under a key."""
        for post in self._posts:
            post.join(key, rank)

    def count(self, key: str) -> int:
        """How many have joined, as the first post tells that answers."""
        return _first((post.count(key) for post in self._posts), otherwise=0)

    def joined(self, key: str) -> set[int]:
        """Who has joined, as the first post tells that answers."""
        return _first((post.joined(key) for post in self._posts), otherwise=set())

    def forget(self, key: str, rank: int, *, shared: bool) -> None:
        """Take away that this rank has joined under a key; and what all of them share there."""
        for post in self._posts:
            post.forget(key, rank, shared=shared)

    def claim(self, key: str) -> bool:
        """Whether this rank is the first to claim a key; true where nobody can be asked."""
        return _first((post.claim(key) for post in self._posts), otherwise=True)

    def clear(self, keys: Iterable[str]) -> None:
        """Take away what was left under these keys."""
        keys = list(keys)
        for post in self._posts:
            post.clear(keys)

    # -- recordings ----------------------------------------------------------------------------------------------

    def leave(self, rank: int, inquiry: int, document: Mapping[str, Any]) -> None:
        """Put a recording in the folder, and in the store for those who do not share the folder."""
        about = {**document["rankmesh"], "session": self._session, "inquiry": inquiry}
        # The same bytes for the same data.
        text = json.dumps({**document, "rankmesh": about}, separators=(",", ":"), default=str)
        content = gzip.compress(text.encode(), mtime=0)
        if self._folder is not None:
            _write(self._path(self._folder, rank), content)
        if self._store is not None and not about.get("ended"):
            self._store.put(f"recording/{inquiry}/{rank}", content)

    def recording(self, rank: int, inquiry: int) -> Recording | None:
        """What a rank has left in this inquiry, or when its program ended; None where it has left nothing since."""
        if self._store is not None and (content := self._store.get(f"recording/{inquiry}/{rank}")):
            return _read(content, rank)
        path = None if self._folder is None else self._path(self._folder, rank)
        found = None if path is None or not path.exists() else _read(path.read_bytes(), rank)
        if found is None or found.session != self._session or not (found.ended or found.inquiry == inquiry):
            return None
        return found

    def tell(self, inquiry: int, verdict: str, diagnosis: Mapping[str, Any]) -> None:
        """Leave the verdict for all, and the whole diagnosis in the folder."""
        if self._folder is not None:
            _write(self._folder / "verdict.json", json.dumps(diagnosis, indent=2).encode())
        self.put(f"verdict/{inquiry}", verdict.encode())

    @staticmethod
    def _path(folder: Path, rank: int) -> Path:
        return folder / f"rank{rank}.json.gz"


def _first(answers: Iterable[_Answer | None], *, otherwise: _Answer) -> _Answer:
    """What the first post says that answers."""
    return next((answer for answer in answers if answer is not None), otherwise)


def _read(content: bytes, rank: int) -> Recording | None:
    """The recording in a file; none, with a line in the log, in one that is torn."""
    try:
        data = parsed(unpacked(io.BytesIO(content)))
        return recording_of(data if isinstance(data, dict) else {}, rank, f"rank{rank}")
    except (RecordingError, OSError, EOFError, ValueError, zlib.error) as error:
        _log.warning("rankmesh: the recording of rank %s cannot be read: %s", rank, error)
        return None


def _write(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all; a folder that takes none is told of, the store has what counts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        _log.warning("rankmesh: %s cannot be written: %s", path, error)
