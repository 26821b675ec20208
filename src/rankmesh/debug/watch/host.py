"""The ranks of this host, and what an unresponsive one looks like from outside.

```
/proc/PID/stat   gone                       its process is gone
                 T                          stopped by a signal (SIGSTOP)
                 else, after SIGUSR1        its process runs, at train.py:31 in step
                 by py-spy or pystack       its process runs, at train.py:31 in step, in spin (gil.c:3)
```

Each rank has a file in a folder of this host, with its process and, by ``faulthandler``, its stack: that works in C,
even where a call holds the interpreter and no Python runs. A program that handles SIGUSR1 itself, as those that Slurm
warns of their end, keeps it. Killed ranks leave their files: the first rank of a later session deletes them, once all
of a folder's processes are gone.

The folder is private, below a private folder of this user. A file that cannot be read hides its own rank alone.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Unreadable, parse_json
from rankmesh.core.private import PrivateFolder
from rankmesh.debug.doctor.stacks import threads_of
from rankmesh.errors import first_line

__all__ = ["LIMIT", "HostRanks", "Look", "native_stack"]

_SIGNAL = signal.SIGUSR1
_FOLDER = "watch-"
# Bytes of a rank's file that are read, and characters of its stacks that are kept.
_SIZE, _STACKS = 1 << 16, 20_000
# Seconds after which a rank that has a file in a folder has written there which process it is.
_SETTLED = 60.0
# A program that uses select() can have no descriptor above.
_SELECTABLE = 1024
# Seconds that a tool may take, which stops the process meanwhile; and what it is called with.
LIMIT = 3.0
_TOOLS = {"py-spy": ("dump", "--native", "--full-filenames", "--pid"), "pystack": ("remote", "--native")}

_log = logging.getLogger("rankmesh.watch")


@dataclass(frozen=True)
class Look:
    """A rank as its host sees it: its state in words, its stacks where it has any, and whether it runs."""

    state: str
    stacks: str = ""
    alive: bool = False


class HostRanks:
    """The ranks of one session on this host."""

    def __init__(self, token: str, rank: int) -> None:
        user_folder = Path(tempfile.gettempdir()) / f"rankmesh-{os.geteuid()}"
        self._place = user_folder / f"{_FOLDER}{token}"
        try:
            with PrivateFolder.create(user_folder) as parent:
                is_first = self._place.name not in parent.names()
                self._folder = PrivateFolder.create(self._place.name, parent)
                if is_first:
                    _sweep(parent)
        except Unreadable as error:
            _log.warning("rankmesh: no rank of this host is looked at: %s %s; set TMPDIR", user_folder, error)
            self._place = Path(tempfile.mkdtemp(prefix="rankmesh-watch-"))
            self._folder = PrivateFolder(self._place)
        self._rank, self._seen, self._folder_file = rank, 0, _file_of(self._folder.descriptor)
        self.by_signal = not _is_taken(_SIGNAL) and not _is_caught(_SIGNAL)
        self._stacks = self._opened() if self.by_signal else None
        self._publish()
        self._end: _StackFile | None = None

    def _opened(self) -> _StackFile:
        folder = self._checked()
        folder.remove(f"{self._rank}.stacks")
        return _StackFile(_SIGNAL, folder.create_file(f"{self._rank}.stacks"))

    def _checked(self) -> PrivateFolder:
        """Return the folder, opened again if the program has closed its descriptor, which may be another file's now."""
        if _file_of(self._folder.descriptor) != self._folder_file:
            self._folder = PrivateFolder(self._place)
            self._folder_file = _file_of(self._folder.descriptor)
        return self._folder

    def outlive_sigterm(self) -> None:
        """Put SIGTERM off until ``close``: launchers send it as soon as another rank has died.

        A program that handles it keeps it. So do processes that are forked off: who ends them does not wait.
        """
        if not _is_taken(signal.SIGTERM) and not _is_caught(signal.SIGTERM):
            self._end = _StackFile(signal.SIGTERM)
            os.register_at_fork(after_in_child=self._take_sigterm)

    def terminated(self) -> bool:
        """Return whether SIGTERM was put off."""
        if self._end is not None and self._end.size is None and not _is_taken(signal.SIGTERM):
            self._end = _StackFile(signal.SIGTERM)
        return self._end is not None and bool(self._end.size)

    def _take_sigterm(self) -> None:
        if self._end is not None and not _is_taken(signal.SIGTERM):
            faulthandler.unregister(signal.SIGTERM)

    def _publish(self) -> None:
        about = {"pid": os.getpid(), "began": _began(os.getpid()), "space": _space(), "signal": self.by_signal}
        self._checked().write(f"{self._rank}.json", json.dumps(about).encode())

    def signalled(self) -> bool:
        """Return whether SIGUSR1 was received since the last call; a program that handles it itself is sent none."""
        if self.by_signal and _is_taken(_SIGNAL):
            self.by_signal = False
            self._publish()
        size = None if self._stacks is None else self._stacks.size
        if size is None and self.by_signal:
            self._stacks, size = self._opened(), 0
        before, self._seen = self._seen, size or 0
        return self._seen > before

    def look(self, ranks: Collection[int]) -> dict[int, Look]:
        """Return each rank on this host as its host sees it; the lowest of the others looks."""
        here = dict(_ranks(self._checked())) if ranks else {}
        if any(rank < self._rank for rank in here if rank not in ranks):
            return {}
        return {rank: self._look_at(rank, about) for rank, about in here.items() if rank in ranks}

    def _look_at(self, rank: int, about: dict[str, Any]) -> Look:
        process = about["pid"]
        if _began(process) != about["began"] or _state(process) in ("", "Z", "X"):
            return Look("its process is gone")
        if _state(process) in ("T", "t"):
            return Look("stopped by a signal")
        text = self._stacks_of(rank, process) if about.get("signal") else ""
        native = native_stack(process)
        site = next((thread.site for thread in threads_of(text)), "")
        # The main thread is the first that tools print.
        frame = next((thread.native_frame for thread in threads_of(native)), "")
        state = "its process runs" + (f", at {site}" if site else "") + (f", in {frame[:200]}" if frame else "")
        return Look(state, f"{text}{native[:_STACKS]}", alive=True)

    def _stacks_of(self, rank: int, process: int) -> str:
        """Return the stacks of another rank, which its signal handler writes."""
        name = f"{rank}.stacks"
        with suppress(OSError, Unreadable), os.fdopen(self._checked().open(name), "rb") as file:
            before = os.fstat(file.fileno()).st_size
            os.kill(process, _SIGNAL)
            end = time.monotonic() + 1.0
            while os.fstat(file.fileno()).st_size == before and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.05)
            file.seek(before)
            return file.read(_STACKS).decode(errors="replace")
        return ""

    def close(self) -> None:
        """Unregister the signals, unless the program has taken them, and delete the files of this rank."""
        self._take_sigterm()
        if self.by_signal and not _is_taken(_SIGNAL):
            faulthandler.unregister(_SIGNAL)
        with suppress(OSError, Unreadable):  # the last to leave deletes the folder
            with self._checked() as folder:
                for ending in ("stacks", "json"):
                    folder.remove(f"{self._rank}.{ending}")
            self._place.rmdir()
        ended = self._end is not None and self._end.size
        for file in (self._stacks, self._end):
            if file is not None:
                file.close()
        self._end = None
        if ended:
            os.kill(os.getpid(), signal.SIGTERM)


class _StackFile:
    """A file into which the stack of the main thread, which the kernel gives signals to, is written at a signal.

    Other threads run meanwhile: to read their frames ends the process, if it is busy (SIGSEGV), and so the job.

    A program may close all descriptors, and get their numbers for files of its own. This one has a high number, which
    is not the next one to be given, and is not used unless it is still of this file.
    """

    def __init__(self, number: signal.Signals, file: int | None = None) -> None:
        if file is None:
            with tempfile.TemporaryFile() as made:
                file = os.dup(made.fileno())
        limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _SELECTABLE)
        self._descriptor = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, limit * 3 // 4)
        os.close(file)
        self._file = _file_of(self._descriptor)
        faulthandler.register(number, file=self._descriptor, all_threads=False)

    @property
    def size(self) -> int | None:
        """Its bytes; None if the program has closed it."""
        return os.fstat(self._descriptor).st_size if _file_of(self._descriptor) == self._file else None

    def close(self) -> None:
        """Close the file, if its descriptor is not another one's by now."""
        if self.size is not None:
            os.close(self._descriptor)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return which file a descriptor is of, None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_taken(number: signal.Signals) -> bool:
    """Return whether the program has a handler of Python's for a signal."""
    return signal.getsignal(number) != signal.SIG_DFL


def _is_caught(number: signal.Signals) -> bool:
    """Return whether anything in this process handles a signal, a library in C among others."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return bool(int(re.findall(r"SigCgt:\s*([0-9a-f]+)", status)[0], 16) >> (number - 1) & 1)


def _ranks(folder: PrivateFolder) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield what each rank of a session has written, of those whose file can be read."""
    for name in folder.names():
        rank, _, ending = name.partition(".")
        if ending == "json" and rank.isdecimal():
            try:
                about = parse_json(folder.read(name, _SIZE).decode())
                if type(about["pid"]) is not int or not isinstance(about["began"], str):
                    raise Unreadable("names no process")
            except FileNotFoundError:  # the rank has left, or others sweep the folder of a session that is over
                continue
            except (OSError, LookupError, TypeError, ValueError) as error:
                _log.warning("rankmesh: rank %s cannot be looked at: its file %r %s", rank, name, first_line(error))
            else:
                yield int(rank), about


def _sweep(parent: PrivateFolder) -> None:
    """Delete the folders of sessions whose every process is gone."""
    for name in parent.names():
        with suppress(OSError, Unreadable):  # swept by another job at this moment
            with PrivateFolder(name, parent) as folder:
                is_over = _is_over(folder)
            if is_over:
                parent.remove(name)


def _is_over(folder: PrivateFolder) -> bool:
    if time.time() - os.fstat(folder.descriptor).st_mtime < _SETTLED:
        return False
    gone = [rank.get("space") == _space() and _began(rank["pid"]) != rank["began"] for _, rank in _ranks(folder)]
    return bool(gone) and all(gone)


def _space() -> str:
    """Return the process-number namespace: containers may share a folder, and number their processes by themselves."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def native_stack(process: int) -> str:
    """Return the output of a tool for a process; empty if none is installed, or it may not look, or takes too long."""
    for name, options in _TOOLS.items():
        program = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if program is not None:
            with suppress(OSError, subprocess.SubprocessError):
                printed = subprocess.run(  # noqa: S603
                    (program, *options, str(process)), capture_output=True, timeout=LIMIT, check=True
                )
                return printed.stdout.decode(errors="replace")
    return ""


def _stat(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def _state(process: int) -> str:
    fields = _stat(process)
    return fields[0] if fields else ""


def _began(process: int) -> str:
    """Return when a process began, in ticks: its number may be another's by now."""
    fields = _stat(process)
    return fields[19] if len(fields) > 19 else ""
