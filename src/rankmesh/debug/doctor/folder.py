"""Files and folders of a job: recognise each file, and choose a recording of this job and attempt for each rank.

```
nccl_trace_rank_3      torch, with NCCL          rank 3: the last number of the name
rank3.json.gz          rankmesh                  the recording contains its rank, job and attempt
ras.txt                ncclras                   recognised by how it begins
train.log, error.json  torch, NCCL, torchrun     a text, whose lines are recognised
rank3.txt              py-spy, pystack           a text with stacks
README                 neither                   not used: in a note
```

A folder without recordings whose subfolders have some (one for each attempt) is read as the newest of them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rankmesh.core.documents import Unreadable, parse_json, read_text
from rankmesh.debug.doctor.failures import Failure, failures_of
from rankmesh.debug.doctor.nccl import NcclLog, nccl_log_of
from rankmesh.debug.doctor.ras import Report, is_report, read_report
from rankmesh.debug.doctor.reader import Progress, read_files
from rankmesh.debug.doctor.recording import Recording
from rankmesh.debug.doctor.stacks import Place, stacks_of
from rankmesh.debug.doctor.texts import head_of, origin_of, text_of
from rankmesh.debug.doctor.watchdog import Log, log_of
from rankmesh.debug.slow import FILE, SlowReport
from rankmesh.errors import RecordingError, first_of, in_words

__all__ = ["Found", "chosen", "is_evidence", "read_paths"]

_NAME = re.compile(r"^(.*?)(\d{1,9})((?:\.(?:json|jsonl|pickle|pkl|pt|gz|bin|dump|trace))*)$", re.IGNORECASE)

# Nanoseconds by which hosts' clocks may differ, and calls of each recording that are compared in time.
_SKEW, _ROWS = 60 * 10**9, 64
# What the beginning of a recording has, and no layout.
_IS_RECORDING = re.compile(rb'"(?:entries|pg_config|pg_status)"')
# Binary files begin with these; what an error file of torchrun or a dump of py-spy has.
_NO_TEXT, _IS_ERROR = (b"\x80", b"{", b"\x1f"), re.compile(rb'"py_callstack"|^\s*\{\s*"message"\s*:|"thread_name"')
# Names of files in a note; how deep folders are searched, and how many files are read.
_SHOWN, _DEPTH, _FILES = 4, 6, 1 << 16
_KNOWN = "reports of ncclras, logs with lines of torch's watchdog or of NCCL, dumps of stacks, errors of torchrun"


# What a watch writes beside its recordings: its diagnosis, metrics, and what is slow.
DIAGNOSIS = "verdict.json"
_OURS = (DIAGNOSIS, "rankmesh.prom", FILE)

# What is read of a report or a text.
Evidence = Report | Log | Place | Failure | NcclLog | SlowReport
_Kind = TypeVar("_Kind", bound=Evidence)


@dataclass(frozen=True)
class Found:
    """The recordings of one job by rank, all other evidence, and notes on what was left out.

    ``size``: how many ranks the job has at least, by the ranks in names of files, even of files without evidence.
    ``watched`` is the diagnosis that a watch left beside its recordings.
    """

    recordings: dict[int, Recording]
    notes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    size: int = 0
    watched: str = ""

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the evidence of a kind."""
        return [one for one in self.evidence if isinstance(one, kind)]


@dataclass(frozen=True)
class _File:
    """A file, with the rank in its name and its kind by its first bytes; ``is_given``: by itself, not by its folder."""

    path: Path
    is_given: bool = False

    @cached_property
    def head(self) -> bytes:
        """The first bytes of the file."""
        return head_of(self.path)

    @cached_property
    def rank(self) -> int | None:
        """The last number in the file's name, None without one."""
        match = _NAME.match(self.path.name)
        return int(match[2]) if match else None

    @cached_property
    def kind(self) -> str:
        """``report``, ``text`` for what begins like neither a pickle, gzip nor JSON, or an error file; else ""."""
        if is_report(self.head):
            return "report"
        is_plain = self.head.lstrip()[:1] not in _NO_TEXT or _IS_ERROR.search(self.head) is not None
        return "text" if self.head and b"\0" not in self.head and is_plain else ""

    @property
    def is_named(self) -> bool:
        """Whether the file was given by itself, or has a name like a recording's."""
        return self.is_given or self.rank is not None


def read_paths(paths: Sequence[Path], progress: Progress | None = None) -> Found:
    """Read these files and folders; raise ``RecordingError`` if none of them can be used."""
    files = [file for path in paths for file in _files(path)]
    evidence, notes, earlier = dict[_File, tuple[Evidence, ...]](), list[str](), _of_earlier_attempts(files)
    for file in files:
        if file not in earlier:
            try:
                evidence[file] = _evidence(file)
            except RecordingError as error:
                notes.append(str(error))
    ours = {file: evidence.get(file, ()) for file in files if file.path.name in _OURS}
    unused = [
        file for file in files if not (evidence.get(file) or file in earlier or file.kind == "report" or file in ours)
    ]
    recordings, refused = read_files([(file.path, file.rank) for file in unused if file.is_named], progress)
    notes += refused
    if earlier:
        notes.append(f"left out: {len(earlier)} files of earlier attempts")
    if names := [file.path.name for file in unused if not file.is_named]:
        notes.append(f"not used: {first_of(names, _SHOWN)}, neither recordings nor {_KNOWN}")
    found = chosen(recordings, notes) if recordings else Found({}, tuple(notes))
    if recordings or any(evidence.values()):
        size = max((rank + 1 for file in files if (rank := origin_of(file.path).rank) is not None), default=0)
        watched = _watched([file.path for file in ours], found.recordings)
        return replace(found, evidence=tuple(chain.from_iterable(evidence.values())), size=size, watched=watched)
    where, why = ", ".join(repr(str(path)) for path in paths[:4]), f"; {notes[0]}" if notes else ""
    raise RecordingError(
        f"{where} holds no recording that can be read{why}; a recording is a file of torch's flight recorder whose "
        f"name ends with the rank (nccl_trace_rank_3), or one that rankmesh wrote; the doctor reads {_KNOWN}, too",
        path=str(paths[0]) if paths else "",
        refused=tuple(notes),
    )


def _watched(paths: Sequence[Path], recordings: Mapping[int, Recording]) -> str:
    """Return the diagnosis that the watch of these recordings left, "" for none."""
    sessions = {recording.session for recording in recordings.values()} - {""}
    for path in paths:
        if path.name == DIAGNOSIS:
            with suppress(OSError, Unreadable):
                about = parse_json(read_text(path))
                if isinstance(about, dict) and sessions and about.get("session", min(sessions)) in sessions:
                    return str(about.get("verdict", ""))[:4000]
    return ""


def _evidence(file: _File) -> tuple[Evidence, ...]:
    """Read a report or a text; raise ``RecordingError`` for a report that cannot be read."""
    if file.path.name == FILE:
        return (slow,) if (slow := SlowReport.read(file.path.parent)) else ()
    if file.is_named and not file.kind:
        return ()
    text = text_of(file.path)
    if file.kind == "report":  # people paste lines of the watchdog behind it
        return (read_report(file.path), *log_of(text))
    return (*log_of(text), *stacks_of(text), *failures_of(text), *nccl_log_of(text))


def _of_earlier_attempts(files: Sequence[_File]) -> set[_File]:
    """Return the reports and texts of attempts before torchrun's last one."""
    matches = {file: re.search(r"/attempt_(\d{1,6})/", file.path.as_posix()) for file in files}
    attempts = {file: int(match[1]) for file, match in matches.items() if match and (file.kind or not file.is_named)}
    last = max(attempts.values(), default=0)
    return {file for file, attempt in attempts.items() if attempt < last}


def is_evidence(path: Path) -> bool:
    """Return whether a path is a folder, a report or a recording, by its name or its first bytes: a plan is none."""
    file = _File(path)
    if path.is_dir() or file.kind == "report":
        return True
    if path.suffix.lower() != ".json":
        return path.is_file() and file.rank is not None
    return _IS_RECORDING.search(file.head) is not None or _IS_ERROR.search(file.head) is not None


def _files(path: Path) -> list[_File]:
    """Return a file; for a folder its recordings, or else its newest subfolder's, and all other evidence."""
    if not path.is_dir():
        if path.exists():
            return [_File(path, is_given=True)]
        raise RecordingError(
            f"{str(path)!r} is not a folder, and not a file; give the one in which the ranks left their recordings",
            path=str(path),
        )
    inside = [path, *sorted((f for f in path.iterdir() if f.is_dir()), key=lambda f: -f.stat().st_mtime)]
    recordings = ([f for f in _below(folder, 0) if f.rank is not None and not f.kind] for folder in inside)
    named = next(filter(None, recordings), [])
    taken = {file.path for file in named}
    others = (file for file in _below(path, _DEPTH) if file.path not in taken)
    return [*named, *(f for f in others if f.path.parent == path or f.path.name == FILE or f.kind)]


def _below(folder: Path, most: int) -> list[_File]:
    """Return the files of a folder and of those inside it, ``most`` deep, no more than a limit."""
    found = list[_File]()
    for where, folders, names in os.walk(folder):
        depth = len(Path(where).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < most else []
        found += [_File(path) for name in sorted(names) if (path := Path(where, name)).is_file()]
        if len(found) > _FILES:
            break
    return found[:_FILES]


def chosen(recordings: list[Recording], refused: list[str]) -> Found:
    """Choose one recording for each rank: of the largest job, its last attempt, watch and dump request.

    A recording that no watch wrote belongs to any watch, and one of a program that has ended to any request.
    """
    notes, kept = list(refused), recordings

    def keep(chosen: list[Recording], others: str) -> None:
        nonlocal kept
        left, kept = {id(one) for one in kept} - {id(one) for one in chosen}, chosen
        if ranks := sorted(one.rank for one in recordings if id(one) in left):
            notes.append(f"left out: {len(ranks)} of {others} ({in_words(ranks)})")

    run, _ = Counter(one.run for one in kept).most_common(1)[0]
    keep([one for one in kept if one.run == run], "another job")
    attempt = max(one.attempt for one in kept)
    keep([one for one in kept if one.attempt == attempt], "an earlier attempt")
    session = max(kept, key=lambda one: one.written if one.session else -1).session
    keep([one for one in kept if one.session in (session, "")], "an earlier watch")
    request = max((one.request for one in kept if one.session and not one.ended), default=0)
    asked = [one for one in kept if one.request == request or one.ended or not one.session]
    keep(asked, "an earlier time that all ranks were asked")
    newest = max(kept, key=_last_call)
    keep([one for one in kept if not _is_older(one, newest)], "an earlier attempt, over before the others began")
    by_age = sorted(kept, key=lambda one: (one.from_rank, one.written, _last_call(one)))
    found = {one.rank: one for one in by_age}
    keep(list(found.values()), "which there is a newer one")
    return Found(dict(sorted(found.items())), tuple(notes))


def _last_call(recording: Recording) -> int:
    """Return the time of a rank's last call in nanoseconds, 0 for none."""
    return int(recording.created[-1]) if len(recording) else 0


def _is_older(one: Recording, newest: Recording) -> bool:
    """Return whether a rank left a call long before the newest one entered it, which no collective allows."""
    theirs = _call_times(newest)
    times = _call_times(one).items()
    return any(time + _SKEW < theirs.get((group, number - 1), 0) for (group, number), time in times)


def _call_times(recording: Recording) -> dict[tuple[str, int], int]:
    """Return the times of the last calls in nanoseconds, by the group's name and the number."""
    last = slice(max(0, len(recording) - _ROWS), None)
    names = (recording.groups[group].name for group in recording.group[last].tolist())
    return dict(
        zip(zip(names, recording.number[last].tolist(), strict=True), recording.created[last].tolist(), strict=True)
    )
