"""A folder of recordings: which files are of this job and this attempt, one for each rank.

```
nccl_trace_rank_3      torch, with NCCL          rank 3: the last number of the name
rank3.json.gz          rankmesh                  the recording contains its rank, job and attempt
train.log              no recording              ignored
```

A folder without recordings whose subfolders have some (one for each attempt) is read as the newest of them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rankmesh.debug.doctor.reader import read_files
from rankmesh.debug.doctor.recording import Recording
from rankmesh.errors import RecordingError, in_words

__all__ = ["Found", "chosen", "read_folder"]

_NAME = re.compile(r"^(.*?)(\d{1,9})((?:\.(?:json|jsonl|pickle|pkl|pt|gz|bin|dump|trace))*)$", re.IGNORECASE)

# Nanoseconds by which hosts' clocks may differ, and calls of each recording that are compared in time.
_SKEW, _ROWS = 60 * 10**9, 64


@dataclass(frozen=True)
class Found:
    """The recordings of one job by rank, and notes on what was left out."""

    recordings: dict[int, Recording]
    notes: tuple[str, ...] = ()


def read_folder(folder: Path) -> Found:
    """Return the recordings of a folder; ``RecordingError`` when it has none that can be read."""
    files = _files(folder)
    recordings, refused = read_files(files)
    if not recordings:
        why = f"; {refused[0]}" if refused else ""
        raise RecordingError(
            f"{str(folder)!r} holds no recording that can be read{why}; a recording is a file of "
            "torch's flight recorder whose name ends with the rank (nccl_trace_rank_3), or one that rankmesh wrote",
            path=str(folder),
            refused=tuple(refused),
        )
    return chosen(recordings, refused)


def _files(folder: Path) -> list[tuple[Path, int | None]]:
    if not folder.is_dir():
        raise RecordingError(
            f"{str(folder)!r} is not a folder; give the one in which the ranks left their recordings",
            path=str(folder),
        )
    inside = [folder, *sorted((f for f in folder.iterdir() if f.is_dir()), key=lambda f: -f.stat().st_mtime)]
    return next((files for files in map(_named, inside) if files), [])


def _named(folder: Path) -> list[tuple[Path, int | None]]:
    """Return the files whose name ends with a number, which is the rank."""
    named = [(path, _NAME.match(path.name)) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(path, int(match[2])) for path, match in named if match]


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
