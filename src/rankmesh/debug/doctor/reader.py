"""Files are read in processes of their own, with limits: a hostile file ends its reader, not the doctor.

```
doctor ──"/dir/rank_3"──> reader    at most 1.5 GiB, 30 s a file
       <──answer────────────          the recording, or why there is none
```

The file that a second reader, too, had when it ended without an answer is skipped, with a note.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from rankmesh.debug.doctor.formats import document
from rankmesh.debug.doctor.recording import Recording, recording_of
from rankmesh.errors import RecordingError

__all__ = ["read_files"]

_MEMORY, _SECONDS = 3 * 2**29, 30
# Files for which one more reader is worth its start.
_EACH = 32
# Bytes of one recording on its way: one of 2,000 calls takes about a hundred thousand.
_LARGEST = 32 * 2**20


def read_files(files: Sequence[tuple[Path, int | None]]) -> tuple[list[Recording], list[str]]:
    """Return the recordings in these files, each given with the rank in its name, and why others could not be read."""
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
    """Return the recordings by rank, and the reasons for which there are none."""
    found: list[Recording] = []
    refused: list[str] = []
    for answer in answers:
        if isinstance(answer, Recording):
            found.append(answer)
        else:
            refused.append(answer)
    return sorted(found, key=lambda recording: (recording.rank, recording.path)), sorted(refused)


def _here(path: Path, rank: int | None) -> Recording | str:
    """Return the recording in a file, or why there is none."""
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
        """Return the recording in a file, or why there is none.

        A reader that ends is replaced, once for each file: on a loaded machine it may not have begun.
        """
        for _ in range(2):
            try:
                return _asked(self._started(), path, rank)
            except (BrokenPipeError, EOFError, pickle.UnpicklingError):  # noqa: PERF203  - a loop of attempts
                self.end()
        return f"{path.name} takes more than {_MEMORY >> 20} MiB or {_SECONDS} s to read: skipped"

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  - this interpreter, and a module of ours
                [sys.executable, "-c", f"from rankmesh.debug.doctor.reader import main; main({_SECONDS})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _asked(process: subprocess.Popen[bytes], path: Path, rank: int | None) -> Recording | str:
    """Return a reader's answer; raise an error of the pipe or of the pickle if it ended without one."""
    if process.stdin is None or process.stdout is None:
        raise EOFError
    pickle.dump((path, rank), process.stdin)
    process.stdin.flush()
    answer: Recording | str = pickle.load(process.stdout)  # noqa: S301  - written by a process of ours
    return answer


def main(seconds: int) -> None:
    """Read files for the process that started this one, each within this many seconds."""
    import gc

    _limit_memory()
    gc.disable()
    while True:
        try:
            path, rank = pickle.load(sys.stdin.buffer)  # noqa: S301  - written by the process that started this one
        except EOFError:
            return
        _alarm(seconds)
        answer = pickle.dumps(_here(path, rank))
        if len(answer) > _LARGEST:
            answer = pickle.dumps(f"{path.name} holds more than any rank records: skipped")
        _alarm(0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


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
