"""The recordings of one watch: what each rank leaves, for the rank that diagnoses and for the doctor.

```
folder       rankRANK.json.gz: the last recording of each rank, whichever session and dump request it is from
store        recording/REQUEST/RANK: for ranks that do not share the folder, until the diagnosis is made
diagnosis    verdict.json, in the folder
```

A recording contains its session and its dump request: one that an earlier watch, attempt or request left says
nothing of what its rank does now. Other users cannot read what is written, and what they write is not read.
"""

from __future__ import annotations

import base64
import gzip
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rankmesh.core.documents import Unreadable, limited
from rankmesh.core.private import open_file, write_whole
from rankmesh.debug.doctor.diagnosis import Diagnosis
from rankmesh.debug.doctor.folder import DIAGNOSIS
from rankmesh.debug.doctor.reader import LIMIT, read_here, read_many
from rankmesh.debug.doctor.recording import Recording
from rankmesh.errors import AgreementError, first_line
from rankmesh.rendezvous import BoundedChannel, ChannelLost, StoreChannel
from rankmesh.rendezvous.channel import LARGEST

__all__ = ["Recordings"]

_Result = TypeVar("_Result")
# Recordings that are asked of the store at once.
_AT_ONCE = 64
# Recordings for which it is worth to start processes that read them.
_MANY = 512

_log = logging.getLogger("rankmesh.watch")


class Recordings:
    """The recordings in a folder, if there is one, and in the store of the ``session``."""

    def __init__(self, session: str, folder: Path | None, store: BoundedChannel) -> None:
        self._session, self._folder, self._store = session, folder, store

    def put(self, rank: int, request: int, document: Mapping[str, Any], *, share: int = 0) -> None:
        """Write a recording to the folder; its last ``share`` calls to the store as well, until ``unshare``."""
        about = {**document["rankmesh"], "session": self._session, "inquiry": request}
        document = {**document, "rankmesh": about}
        if self._folder is not None:
            _write(self._path(self._folder, rank), _packed(document))
        if share:
            shared = base64.b64encode(_packed(_last_calls(document, share))).decode()
            if len(shared) < LARGEST:
                self._ask(lambda store: store.write(_key(rank, request), shared))
            else:
                _log.warning(
                    "rankmesh: the recording of rank %s is too large for the store: %s bytes", rank, len(shared)
                )

    def unshare(self, rank: int, request: int) -> None:
        """Delete a recording from the store."""
        self._ask(lambda store: store.delete([_key(rank, request)]))

    def read_all(self, ranks: Sequence[int], request: int) -> dict[int, Recording]:
        """Return the recordings of ranks for this dump request, or of the end of their programs, as far as they are."""
        stored, left = dict[int, bytes](), dict[int, bytes]()
        for first in range(0, len(ranks), _AT_ONCE):
            some = ranks[first : first + _AT_ONCE]
            for rank, text in zip(some, self._texts(some, request), strict=True):
                if text:
                    stored[rank] = _decoded(text)
                elif (content := self._file(rank)) is not None:
                    left[rank] = content
        found = _read(left)
        for rank, recording in list(found.items()):
            if recording.session != self._session or not (recording.ended or recording.request == request):
                del found[rank]
        return found | _read(stored)

    def read(self, rank: int, request: int) -> Recording | None:
        """Return a rank's recording for this dump request, or of the end of its program; None if there is neither."""
        return self.read_all([rank], request).get(rank)

    def _texts(self, ranks: Sequence[int], request: int) -> list[str | None]:
        """Return the texts of ranks in the store; None for a rank without one, or with one that no rank has written."""

        def read(store: StoreChannel) -> list[str | None]:
            found = list[str | None]()
            for rank in ranks:
                found.append(None)
                with suppress(AgreementError):
                    found[-1] = store.read(_key(rank, request))
            return found

        return self._ask(read) or [None] * len(ranks)

    def _file(self, rank: int) -> bytes | None:
        """Return the content of a rank's file; None without one, and None with a warning where it cannot be read."""
        if self._folder is None:
            return None
        try:
            with os.fdopen(open_file(self._path(self._folder, rank)), "rb") as file:
                return limited(file, LIMIT)
        except FileNotFoundError:
            pass
        except (OSError, Unreadable) as error:
            _warned(rank, first_line(error))
        return None

    def conclude(self, diagnosis: Diagnosis) -> None:
        """Write the diagnosis to the folder."""
        if self._folder is not None:
            about = {"session": self._session, **diagnosis.to_dict()}
            _write(self._folder / DIAGNOSIS, json.dumps(about, indent=2).encode())

    def _ask(self, call: Callable[[StoreChannel], _Result]) -> _Result | None:
        """Return the store's answer; None if it does not answer."""
        with suppress(ChannelLost, AgreementError):
            return self._store.ask(call)
        return None

    @staticmethod
    def _path(folder: Path, rank: int) -> Path:
        return folder / f"rank{rank}.json.gz"


def _packed(document: Mapping[str, Any]) -> bytes:
    # Equal data are equal bytes.
    return gzip.compress(json.dumps(document, separators=(",", ":"), default=str).encode(), mtime=0)


def _last_calls(document: Mapping[str, Any], calls: int) -> Mapping[str, Any]:
    """Return a recording as a recorder of this many calls would have kept it, with the stacks of these."""
    entries = document["entries"][-calls:]
    used = sorted({entry["frames"] for entry in entries if "frames" in entry})
    numbers = {number: place for place, number in enumerate(used)}
    stacks = document.get("stacks", [])
    last = [entry | ({"frames": numbers[entry["frames"]]} if "frames" in entry else {}) for entry in entries]
    return {**document, "stacks": [stacks[number] for number in used], "entries": last}


def _key(rank: int, request: int) -> str:
    return f"recording/{request}/{rank}"


def _decoded(text: str) -> bytes:
    """Return the bytes that a text in the store encodes, none for a text that no rank has written."""
    with suppress(ValueError):
        return base64.b64decode(text)
    return b""


def _read(contents: Mapping[int, bytes]) -> dict[int, Recording]:
    """Return the recordings in these contents, of many by several processes; a warning for each that has none."""
    sources = [(content, rank) for rank, content in contents.items()]
    answers = read_many(sources) if len(sources) >= _MANY else [read_here(*source) for source in sources]
    found = dict[int, Recording]()
    for rank, answer in zip(contents, answers, strict=True):
        if isinstance(answer, Recording):
            found[rank] = answer
        else:
            _warned(rank, answer)
    return found


def _warned(rank: int, why: str) -> None:
    _log.warning("rankmesh: the recording of rank %s cannot be read: %s", rank, why)


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; log a warning if it cannot be written: the store has what counts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        _log.warning("rankmesh: %s cannot be written: %s", path, error)
