"""Calls that ran out of time: where the order of a program ends, because it caught the error and went on.

```
seconds      0           5            5.01
rank 0       tp 4        gave up      dp 4  fails at once, as do all later calls
rank 1       dp 4        gave up      tp 4  comes when rank 0 has given up
                         ends here
```

A call has run out of time if one member made no other call for the group's timeout, and another came to it later than
that, or not at all, or with another call. Clocks of hosts differ: a rank that came later has also taken half of that
time longer since the call before, by its own clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History
from rankmesh.debug.doctor.recording import Recording

__all__ = ["in_time"]


def in_time(history: History) -> dict[int, Recording]:
    """Return the recordings, each up to the first of its calls that ran out of time."""
    ends: dict[int, tuple[int, float]] = {}
    for group, number in _quiet(history):
        for rank, end in _ends(history, group, number):
            ends[rank] = min(ends.get(rank, end), end)
    return {rank: _until(one, *ends[rank]) if rank in ends else one for rank, one in history.recordings.items()}


def _quiet(history: History) -> set[tuple[KnownGroup, int]]:
    """Return the calls of a CPU after which a rank made no other call for the timeout of their group."""
    found = set()
    for rank, recording in history.recordings.items():
        limits = np.array([group.limit for group in recording.groups] or [0.0])[recording.group] * 1e9
        pauses = np.append(np.diff(recording.created).astype(float), np.inf)[: len(recording)]
        for row in np.flatnonzero((limits > 0) & (pauses >= limits)).tolist():
            found.add((history.group_of[rank, int(recording.group[row])], int(recording.number[row])))
    return {(group, number) for group, number in found if not history.on_device(group)}


def _ends(history: History, group: KnownGroup, number: int) -> Iterator[tuple[int, tuple[int, float]]]:
    """Yield how many calls of each member count, and how late it came, if a call has run out of time."""
    rows = {rank: row for rank in history.tracks[group] if (row := history.row(group, rank, number)) is not None}
    created = {rank: history.created(group, rank, number) / 1e9 for rank in rows}
    first = min(rows, key=lambda rank: created[rank])
    limit = max(known.limit for known in history.known_as[group].values())
    since = {rank: created[rank] - _before(history, group, rank, number) for rank in rows}
    late = {rank for rank in rows if created[rank] - created[first] > limit <= 2 * (since[rank] - since[first])}
    is_incomplete = any(history.has(rank) and (history.last(group, rank) or number) < number for rank in group.members)
    if late or is_incomplete or len({history.signature(group, rank, number) for rank in rows}) > 1:
        for rank, row in rows.items():
            end = (row, created[rank] - created[first]) if rank in late else (row + 1, 0.0)
            if end[0] < len(history.recordings[rank]):
                yield rank, end


def _before(history: History, group: KnownGroup, rank: int, number: int) -> float:
    """Return when a rank made the call of the group before this one, or the first of all its calls, in seconds."""
    return float(history.recordings[rank].created[history.row(group, rank, number - 1) or 0]) / 1e9


def _until(recording: Recording, rows: int, late_by: float) -> Recording:
    """Return a recording without its later calls."""
    columns = ("group", "number", "signature", "pending", "site", "created")
    groups = [replace(group, enqueued=None) for group in recording.groups]
    kept = {name: getattr(recording, name)[:rows] for name in columns}
    return replace(recording, **kept, groups=groups, late_by=late_by)
