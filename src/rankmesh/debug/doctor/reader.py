"""Files are read in processes of their own, with limits: a hostile file ends its reader, not the doctor.

```
doctor ──"/dir/rank_3"──> reader    at most 1.5 GiB, 30 s a file
       <──(length, answer)──          the columns of the recording, or why there are none
```

The file that a reader had when it ended without an answer is skipped, with a note.
"""

from __future__ import annotations

import gzip
import marshal
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from rankmesh.core.documents import Unreadable, open_regular
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
        return _sorted_out(_here(path, rank) for path, rank in files)
    readers = [_Reader() for _ in range(max(1, min(os.cpu_count() or 1, len(files) // _EACH)))]
    free: SimpleQueue[_Reader] = SimpleQueue()
    for reader in readers:
        free.put(reader)

    def read(file: tuple[Path, int | None]) -> Recording | str:
        reader = free.get()
        try:
            return reader.read(*file)
        finally:
            free.put(reader)

    try:
        with ThreadPoolExecutor(len(readers)) as threads:
            return _sorted_out(threads.map(read, files))
    finally:
        for reader in readers:
            reader.end()


def _sorted_out(answers: Iterable[Recording | str]) -> tuple[list[Recording], list[str]]:
    """The recordings by rank, and the reasons for which there are none."""
    found: list[Recording] = []
    refused: list[str] = []
    for answer in answers:
        if isinstance(answer, Recording):
            found.append(answer)
        else:
            refused.append(answer)
    return sorted(found, key=lambda recording: (recording.rank, recording.path)), sorted(refused)


def _is_small_json(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            opened = gzip.GzipFile(fileobj=file) if file.read(2) == b"\x1f\x8b" else file
            file.seek(0)
            return path.stat().st_size < _SMALL and opened.read(1) == b"{" and len(opened.read(_SMALL)) < _SMALL
    except (Unreadable, OSError, EOFError, zlib.error):
        return False


def _here(path: Path, rank: int | None) -> Recording | str:
    """The recording in a file, or why there is none."""
    try:
        return recording_of(document(path), rank, path.name)
    except RecordingError as error:
        return str(error)


class _Reader:
    """The process that reads, as its user sees it: a new one whenever a file has ended it.

    It is a plain process: a start method of ``multiprocessing`` would import the user's program again, or copy its
    threads.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path, rank: int | None) -> Recording | str:
        """The recording in a file, or why there is none."""
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  - this interpreter, and a module of ours
                [sys.executable, "-c", f"from rankmesh.debug.doctor.reader import main; main({_SECONDS})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        try:
            answer = _asked(self._process, path, rank)
        except (BrokenPipeError, EOFError):
            self.end()
            return f"{path.name} takes more than {_MEMORY >> 20} MiB or {_SECONDS} s to read: skipped"
        return answer if isinstance(answer, str) else _unpacked(answer)

    def end(self) -> None:
        """End the process and close its pipes."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _asked(process: subprocess.Popen[bytes], path: Path, rank: int | None) -> Any:
    """What a reader says of a file; ``EOFError`` or ``BrokenPipeError`` when it ended without an answer."""
    if process.stdin is None or process.stdout is None:
        raise EOFError
    _write(process.stdin, (str(path), rank))
    return _read(process.stdout)


def _write(stream: IO[bytes], value: Any) -> None:
    data = marshal.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
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
            plain = f"{Path(path).name} holds more than any rank records: skipped"
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
    plain["groups"] = [tuple(vars(group).values()) for group in recording.groups]  # astuple copies every member
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
