"""Files and folders of a job: what each file is, and which recordings are of this job and this attempt, one a rank.

```
nccl_trace_rank_3      torch, with NCCL          rank 3: the last number of the name
rank3.json.gz          rankmesh                  the recording contains its rank, job and attempt
ras.txt                ncclras                   recognised by how it begins
train.log              neither                   not used: in a note
```

A folder without recordings whose subfolders have some (one for each attempt) is read as the newest of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankmesh.debug.doctor.logs import Log, read_log
from rankmesh.debug.doctor.ras import Report, head_of, is_report, read_report
from rankmesh.debug.doctor.reader import read_files
from rankmesh.debug.doctor.recording import Recording
from rankmesh.errors import RecordingError, in_words

__all__ = ["Found", "chosen", "is_evidence", "read_paths"]

_NAME = re.compile(r"^(.*?)(\d{1,9})((?:\.(?:json|jsonl|pickle|pkl|pt|gz|bin|dump|trace))*)$", re.IGNORECASE)

# Nanoseconds by which hosts' clocks may differ, and calls of each recording that are compared in time.
_SKEW, _ROWS = 60 * 10**9, 64
# What the beginning of a recording has, and no layout.
_IS_RECORDING = re.compile(rb'"(?:entries|pg_config|pg_status)"')
# Names of files in a note.
_SHOWN = 4


@dataclass(frozen=True)
class Found:
    """The recordings of one job by rank, reports of NCCL, logs of the watchdog, and notes on what was left out."""

    recordings: dict[int, Recording]
    notes: tuple[str, ...] = ()
    reports: tuple[Report, ...] = ()
    logs: tuple[Log, ...] = ()


def read_paths(paths: Sequence[Path]) -> Found:
    """Return what is in these files and folders; ``RecordingError`` when none of it can be used."""
    candidates, others = list[tuple[Path, int | None]](), list[Path]()
    for path in paths:
        if path.is_dir():
            named, rest = _files(path)
            candidates += named
            others += rest
        elif path.exists():
            candidates.append((path, _rank_in(path)))
        else:
            raise RecordingError(
                f"{str(path)!r} is not a folder, and not a file; give the one in which the ranks left their recordings",
                path=str(path),
            )
    of_nccl = {path for path, rank in candidates if _may_be_report(path, rank) and is_report(path)}
    of_nccl |= set(filter(is_report, others))
    reports, notes = _reports(sorted(of_nccl))
    texts = [*others, *(path for path, rank in candidates if rank is None)]
    logs = {path: log for path in texts if path not in of_nccl and (log := read_log(path)) is not None}
    recordings, refused = read_files([file for file in candidates if file[0] not in of_nccl | logs.keys()])
    notes += refused
    if unused := [path.name for path in others if path not in of_nccl | logs.keys()]:
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        notes.append(
            f"not used: {', '.join(unused[:_SHOWN])}{more}, neither recordings nor reports of ncclras nor logs with "
            "lines of torch's watchdog"
        )
    evidence = Found({}, tuple(notes), tuple(reports), tuple(logs.values()))
    if recordings:
        found = chosen(recordings, notes)
        return replace(evidence, recordings=found.recordings, notes=found.notes)
    if reports or logs:
        return evidence
    where, why = ", ".join(repr(str(path)) for path in paths[:4]), f"; {notes[0]}" if notes else ""
    raise RecordingError(
        f"{where} holds no recording that can be read{why}; a recording is a file of torch's flight recorder whose "
        "name ends with the rank (nccl_trace_rank_3), or one that rankmesh wrote; a report is what ncclras printed; "
        "a log has lines of torch's NCCL watchdog",
        path=str(paths[0]) if paths else "",
        refused=tuple(notes),
    )


def is_evidence(path: Path) -> bool:
    """Return whether a path is a folder, a report or a recording, by its name or its first bytes: a plan is none."""
    if path.is_dir() or is_report(path):
        return True
    if path.suffix.lower() != ".json":
        return path.is_file() and _rank_in(path) is not None
    return _IS_RECORDING.search(head_of(path)) is not None


def _reports(paths: Sequence[Path]) -> tuple[list[Report], list[str]]:
    reports, refused = [], []
    for path in paths:
        try:
            reports.append(read_report(path))
        except RecordingError as error:  # noqa: PERF203  - each file of its own
            refused.append(str(error))
    return reports, refused


def _may_be_report(path: Path, rank: int | None) -> bool:
    """Return whether a file is opened to see whether it is a report: one named like torch's recordings is not."""
    return rank is None or path.suffix.lower() in (".json", ".txt")


def _rank_in(path: Path) -> int | None:
    match = _NAME.match(path.name)
    return int(match[2]) if match else None


def _files(folder: Path) -> tuple[list[tuple[Path, int | None]], list[Path]]:
    """Return the files of a folder that are named after a rank, or those of its newest folder, and its other files."""
    inside = [folder, *sorted((f for f in folder.iterdir() if f.is_dir()), key=lambda f: -f.stat().st_mtime)]
    named = next((files for files in map(_named, inside) if files), [])
    return named, [path for path in sorted(folder.iterdir()) if path.is_file() and _rank_in(path) is None]


def _named(folder: Path) -> list[tuple[Path, int | None]]:
    """Return the files whose name ends with a number, which is the rank."""
    named = [(path, _rank_in(path)) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(path, rank) for path, rank in named if rank is not None]


def chosen(recordings: list[Recording], refused: list[str]) -> Found:
    """Choose one recording for each rank: of the largest job, its last attempt, watch and dump request."""
    notes, current = list(refused), recordings
    for choose, others in _CHOICES:
        before, current = current, choose(current)
        _note(notes, before, current, others)
    newest: dict[int, Recording] = {}
    for recording in sorted(current, key=_newest):
        newest[recording.rank] = recording
    _note(notes, current, list(newest.values()), "which there is a newer one")
    return Found(dict(sorted(newest.items())), tuple(notes))


def _newest(recording: Recording) -> tuple[bool, int, int]:
    return recording.from_rank, recording.written, int(recording.created[-1]) if len(recording) else 0


def _of_one_job(recordings: list[Recording]) -> list[Recording]:
    """Return the recordings of the job that has most of them."""
    run, _ = Counter(recording.run for recording in recordings).most_common(1)[0]
    return [recording for recording in recordings if recording.run == run]


def _of_one_attempt(recordings: list[Recording]) -> list[Recording]:
    """Return the recordings of the last attempt."""
    last = max(recording.attempt for recording in recordings)
    return [recording for recording in recordings if recording.attempt == last]


def _of_one_watch(recordings: list[Recording]) -> list[Recording]:
    """Return the recordings of the watch that wrote last, and those that no watch wrote."""
    last = max(recordings, key=lambda recording: recording.written if recording.session else -1).session
    return [recording for recording in recordings if recording.session in (last, "")]


def _of_one_request(recordings: list[Recording]) -> list[Recording]:
    """Return the recordings of the last dump request, of programs that have ended, and those that no watch wrote."""
    last = max((one.request for one in recordings if one.session and not one.ended), default=0)
    return [one for one in recordings if one.request == last or one.ended or not one.session]


def _of_one_time(recordings: list[Recording]) -> list[Recording]:
    """Return the recordings that are not of an earlier attempt (``_is_older``)."""
    newest = max(recordings, key=lambda recording: int(recording.created[-1]) if len(recording) else 0)
    return [recording for recording in recordings if not _is_older(recording, newest)]


def _is_older(one: Recording, newest: Recording) -> bool:
    """Return whether a rank left a call long before the newest one entered it, which no collective allows."""
    theirs = _call_times(newest)
    for name, numbers in _call_times(one).items():
        for number, time in numbers.items():
            entered = theirs.get(name, {}).get(number - 1)
            if entered is not None and time + _SKEW < entered:
                return True
    return False


# The choices, in order, and how a note calls the recordings that are left out.
_CHOICES = (
    (_of_one_job, "another job"),
    (_of_one_attempt, "an earlier attempt"),
    (_of_one_watch, "an earlier watch"),
    (_of_one_request, "an earlier time that all ranks were asked"),
    (_of_one_time, "an earlier attempt, over before the others began"),
)


def _call_times(recording: Recording) -> dict[str, dict[int, int]]:
    """Return when the last calls of each group were made."""
    times: dict[str, dict[int, int]] = {}
    for row in range(max(0, len(recording) - _ROWS), len(recording)):
        name = recording.groups[recording.group[row]].name
        times.setdefault(name, {})[int(recording.number[row])] = int(recording.created[row])
    return times


def _note(notes: list[str], before: list[Recording], after: list[Recording], what: str) -> None:
    kept = {id(recording) for recording in after}
    ranks = sorted(recording.rank for recording in before if id(recording) not in kept)
    if ranks:
        notes.append(f"left out: {len(ranks)} of {what} ({in_words(ranks)})")
