"""Files are read in processes of their own, with limits: a hostile file ends its reader, not the doctor.

No code of a file is run: a pickle names classes and functions by ``GLOBAL`` and its kin, and all of them go through
``find_class``, which refuses. What remains can be large or slow to build.

```
first bytes    1f 8b      gzip: what is inside, up to a limit
               80         a pickle: dicts, lists, tuples, texts, numbers; any class in it is refused
               {          JSON

doctor ──"/dir/rank_3"──> reader    at most 1.5 GiB, 30 s a file
       <──answer────────────          the recording, or why there is none
```

The file that a second reader, too, had when it ended without an answer is skipped, with a note. A watch has the content
of its ranks' recordings instead of files: that is read here if readers end.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from rankmesh.core.documents import Unreadable, open_regular
from rankmesh.debug.doctor.recording import Recording, recording_of
from rankmesh.errors import RecordingError, first_line

__all__ = ["LIMIT", "Progress", "document", "parsed", "read_files", "read_here", "read_many", "unpacked"]

_MEMORY, _SECONDS = 3 * 2**29, 30
# Files for which one more reader is worth its start, and after which progress is reported again.
_EACH = 32
# Bytes of one recording on its way: one of 2,000 calls takes about a hundred thousand.
_LARGEST = 32 * 2**20
# Bytes of one recording, unpacked: 2,000 calls with frames take about one million.
LIMIT = 128 * 2**20
# Takes how many files are read, and of how many; called on the threads that read.
Progress = Callable[[int, int], None]
# A file or a content, and its rank.
_Source = tuple[Path | bytes, int | None]
# What is wrong with a file, by the error that reading it raises.
_PROBLEMS: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((OSError, EOFError, zlib.error), "cannot be read"),
    ((RecursionError,), "is nested too deeply"),
    ((MemoryError,), "takes too much memory"),
)


class _Plain(pickle.Unpickler):
    """Unpickles plain data; a pickle that names anything that could run is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {str(module)[:60]}.{str(name)[:60]}, and only plain data is read")

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it asks for an object from outside, and only plain data is read")


def document(source: Path | bytes, name: str = "") -> dict[str, Any]:
    """Return the plain data of a file, or of its content; ``RecordingError``, which names it, for anything else."""
    name, path = (source.name, str(source)) if isinstance(source, Path) else (name, "")
    try:
        with open_regular(source) if isinstance(source, Path) else io.BytesIO(source) as file:
            found = parsed(unpacked(file))
        if isinstance(found, dict):
            return found
        raise RecordingError("holds no recording")
    except Exception as error:  # a hostile pickle raises whatever its opcodes lead to
        what = str(error)
        if not isinstance(error, Unreadable | RecordingError):
            known = (problem for kinds, problem in _PROBLEMS if isinstance(error, kinds))
            what = f"{next(known, 'is truncated, or is not a recording')} ({first_line(error)})"
        raise RecordingError(
            f"{name} {what}: skipped; a recording is what torch's flight recorder or rankmesh wrote",
            path=path,
        ) from error


def unpacked(file: BinaryIO) -> bytes:
    """Return the content of a file, without gzip; never unpack more than the limit."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    data = gzip.GzipFile(fileobj=file).read(LIMIT + 1) if packed else file.read(LIMIT + 1)
    if not data:
        raise RecordingError("is empty")
    if len(data) > LIMIT:
        raise RecordingError(f"is larger than {LIMIT >> 20} MiB")
    return data


def parsed(data: bytes) -> object:
    """Return the plain data of a text or a pickle; raise ``pickle.UnpicklingError`` if it asks for more."""
    if data[:1] == b"\x80":
        # Buffered, or each opcode would be a read of its own.
        return _Plain(io.BufferedReader(io.BytesIO(data))).load()
    if not data.lstrip()[:1] == b"{":
        raise RecordingError("is neither JSON nor a pickle")
    return json.loads(data)


# -- many files -------------------------------------------------------------------------------------------------------


def read_files(files: Sequence[_Source], progress: Progress | None = None) -> tuple[list[Recording], list[str]]:
    """Return the recordings in these files, each given with the rank in its name, and why others could not be read."""
    answers = read_many(files, progress)
    found = [answer for answer in answers if isinstance(answer, Recording)]
    refused = [answer for answer in answers if isinstance(answer, str)]
    return sorted(found, key=lambda recording: (recording.rank, recording.path)), sorted(refused)


def read_many(sources: Sequence[_Source], progress: Progress | None = None) -> list[Recording | str]:
    """Return the recordings of files or contents, each given with its rank, in order, by a reader on each core."""
    readers = max(1, min(os.cpu_count() or 1, len(sources) // _EACH))
    answers: list[Recording | str] = [""] * len(sources)
    numbers = count(1)

    def counted(part: Sequence[_Source]) -> Iterator[_Source]:
        for source in part:
            yield source  # which is read when the next one is asked for
            if (done := next(numbers)) % _EACH == 0 and progress is not None:
                progress(done, len(sources))

    with ThreadPoolExecutor(readers) as threads:
        parts = threads.map(_answers, (counted(sources[first::readers]) for first in range(readers)))
        for first, part in enumerate(parts):
            answers[first::readers] = part
    return answers


def _answers(sources: Iterable[_Source]) -> list[Recording | str]:
    """Read these files and contents by one reader."""
    reader = _Reader()
    try:
        return [reader.read(*source) for source in sources]
    finally:
        reader.end()


def read_here(source: Path | bytes, rank: int | None) -> Recording | str:
    """Return the recording in a file or a content, read in this process, or why there is none."""
    name = _name(source, rank)
    try:
        return recording_of(document(source, name), rank, name)
    except RecordingError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever one file leads to, the others are read
        return f"{name} is not a recording ({first_line(error)}): skipped"


def _name(source: Path | bytes, rank: int | None) -> str:
    return source.name if isinstance(source, Path) else f"rank{rank}"


class _Reader:
    """A process that reads files; it is started anew after a file has ended it.

    It is a plain process: a start method of ``multiprocessing`` would import the user's program again, or copy its
    threads.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = False

    def read(self, source: Path | bytes, rank: int | None) -> Recording | str:
        """Return the recording in a file or a content, or why there is none.

        A reader that ends is replaced, once for each file: on a loaded machine it may not have begun.
        """
        for _ in range(0 if self._lost and isinstance(source, bytes) else 2):
            try:
                return _asked(self._started(), source, rank)
            except (OSError, EOFError, pickle.UnpicklingError):  # noqa: PERF203  - a loop of attempts
                self.end()
        self._lost = True
        if isinstance(source, bytes):
            return read_here(source, rank)
        return f"{_name(source, rank)} takes more than {_MEMORY >> 20} MiB or {_SECONDS} s to read: skipped"

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # Modules come from where this process has them: `-c` alone looks for them in the folder that is read, too.
            path = "import sys; sys.path[:] = filter(None, sys.path)"
            run = f"from rankmesh.debug.doctor.reader import main; main({_SECONDS})"
            self._process = subprocess.Popen(  # noqa: S603  - this interpreter, and a module of ours
                [sys.executable, "-c", f"{path}; {run}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # It finds what this process has found, and has no watch of its own.
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "RANKMESH": "",
                },
            )
        return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _asked(process: subprocess.Popen[bytes], source: Path | bytes, rank: int | None) -> Recording | str:
    """Return a reader's answer; raise an error of the pipe or of the pickle if it ended without one."""
    if process.stdin is None or process.stdout is None:
        raise EOFError
    pickle.dump((source, rank), process.stdin)
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
            source, rank = pickle.load(sys.stdin.buffer)  # noqa: S301  - written by the process that started this one
        except EOFError:
            return
        _alarm(seconds)
        answer = pickle.dumps(read_here(source, rank))
        if len(answer) > _LARGEST:
            answer = pickle.dumps(f"{_name(source, rank)} holds more than any rank records: skipped")
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
    """End this process after this many seconds, even inside C code; 0 cancels that."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)
