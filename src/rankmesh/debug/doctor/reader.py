"""Files are read in processes of their own, with limits: a hostile file ends its reader, not the doctor.

```
doctor ──"/dir/rank_3"──> reader    at most 1.5 GiB, 30 s a file
       <──(length, answer)──          the columns of the recording, or why there are none
```

A reader that ends without an answer was ended by the file that it had, which is told and left out.
"""

from __future__ import annotations

import gzip
import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

import numpy as np

from rankmesh.debug.doctor.calls import Signature
from rankmesh.debug.doctor.columns import CALLS, EXCHANGES, GroupName
from rankmesh.debug.doctor.formats import document
from rankmesh.debug.doctor.recording import InCall, Recording, recording_of
from rankmesh.errors import RecordingError

__all__ = ["read_files"]

_MEMORY, _SECONDS = 3 * 2**29, 30
# Files for which one more reader is worth its start.
_EACH = 32
# Bytes of plain JSON that are read without a process of their own.
_SMALL = 2**20
# Bytes of the columns of one recording: those of 2,000 calls take fifty thousand.
_LARGEST = 32 * 2**20


def read_files(files: Sequence[tuple[Path, int | None]]) -> tuple[list[Recording], list[str]]:
    """The recordings in these files, given with the rank that the name of each says; and what could not be read.

    A few small files of plain JSON are read here: nothing in them can take long.
    """
    if len(files) <= _EACH and all(_is_small_json(path) for path, _ in files):
        return _read_here(files)
    found: list[Recording] = []
    refused: list[str] = []
    queue = iter(files)
    lock = threading.Lock()
    readers = max(1, min(os.cpu_count() or 1, len(files) // _EACH))
    threads = [threading.Thread(target=_serve, args=(queue, lock, found, refused)) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found, key=lambda recording: (recording.rank, recording.path)), sorted(refused)


def _is_small_json(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            opened = gzip.GzipFile(fileobj=file) if file.read(2) == b"\x1f\x8b" else file
            file.seek(0)
            return path.stat().st_size < _SMALL and opened.read(1) == b"{" and len(opened.read(_SMALL)) < _SMALL
    except (OSError, EOFError, zlib.error):
        return False


def _read_here(files: Sequence[tuple[Path, int | None]]) -> tuple[list[Recording], list[str]]:
    answers = [_here(path, rank) for path, rank in files]
    found = [answer for answer in answers if isinstance(answer, Recording)]
    return found, [answer for answer in answers if isinstance(answer, str)]


def _here(path: Path, rank: int | None) -> Recording | str:
    """The recording in a file, or why there is none."""
    try:
        return recording_of(document(path), rank, path.name)
    except RecordingError as error:
        return str(error)


def _serve(
    queue: Iterator[tuple[Path, int | None]], lock: threading.Lock, found: list[Recording], refused: list[str]
) -> None:
    """Take one file after the other from the queue to a reader, a new one whenever a file has ended it."""
    reader: _Reader | None = None
    while True:
        with lock:
            path, rank = next(queue, (None, None))
        if path is None:
            break
        reader = reader or _Reader()
        answer = reader.ask(path, rank)
        if answer is None:
            reader.end()
            reader = None
            answer = (
                f"received {path.name}, which takes more than {_MEMORY >> 20} MiB or {_SECONDS} s to read; "
                "it is left out; look where it comes from"
            )
        if isinstance(answer, str):
            refused.append(answer)
        else:
            found.append(_unpacked(answer))
    if reader is not None:
        reader.end()


class _Reader:
    """The process that reads, as its user sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603  - this interpreter, and a module of ours
            [sys.executable, "-c", f"from rankmesh.debug.doctor.reader import main; main({_SECONDS})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    def ask(self, path: Path, rank: int | None) -> Any:
        """What the reader says of a file; None when it ended without a word."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            return None
        try:
            _write(process.stdin, (str(path), rank))
            return _read(process.stdout)
        except (BrokenPipeError, EOFError):
            return None

    def end(self) -> None:
        """End the process and close its pipes."""
        self._process.kill()
        self._process.communicate()


def _write(stream: Any, value: Any) -> None:
    data = marshal.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _read(stream: Any) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack("<Q", head)[0]
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return marshal.loads(data)  # noqa: S302  - written by the other end of this pipe, a process of ours


def main(seconds: int) -> None:
    """The reader: answers for each file that it is asked for, each within so many seconds."""
    import gc

    _limit_memory()
    gc.disable()
    while True:
        try:
            path, rank = _read(sys.stdin.buffer)
        except EOFError:
            return
        _alarm(seconds)
        answer = _here(Path(path), rank)
        plain = answer if isinstance(answer, str) else _packed(answer)
        if len(marshal.dumps(plain)) > _LARGEST:
            plain = f"received {Path(path).name}, which holds more than any rank records; it is left out"
        _alarm(0)
        _write(sys.stdout.buffer, plain)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # no limits on this system
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _alarm(seconds: int) -> None:
    """End this process after so long, whatever it is in; 0 calls it off."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _packed(recording: Recording) -> dict[str, Any]:
    """A recording as plain values for the pipe."""
    plain = {f.name: getattr(recording, f.name) for f in fields(recording)}
    plain |= {name: plain[name].tobytes() for name in CALLS}
    plain["exchanges"] = {name: column.tobytes() for name, column in recording.exchanges.items()}
    plain["signatures"] = [(one.operation, one.facts, one.shown) for one in recording.signatures]
    plain["groups"] = [astuple(group) for group in recording.groups]
    plain["in_call"] = None if recording.in_call is None else asdict(recording.in_call)
    return plain


def _unpacked(plain: dict[str, Any]) -> Recording:
    changed = {
        **{name: np.frombuffer(plain[name], dtype) for name, dtype in CALLS.items()},
        "exchanges": {name: np.frombuffer(plain["exchanges"][name], dtype) for name, dtype in EXCHANGES.items()},
        "signatures": [Signature(*values) for values in plain["signatures"]],
        "groups": [GroupName(*values) for values in plain["groups"]],
        "in_call": None if plain["in_call"] is None else InCall(**plain["in_call"]),
    }
    return Recording(**{**plain, **changed})
