"""History: the recordings of all ranks, turned from ranks to groups.

```
rank 0   tp 1  dp 1  tp 2  dp 2 ...            dp@tp0   rank 0   1  2  3  4(pending)
rank 2   tp 1  dp 1  tp 2  dp 2 ...     ->              rank 2   1  2  3
```

A track holds the calls of one rank on one group. What the ring buffer no longer holds lies before its first number; a
rank that lost its oldest calls and has none on a group may have made any number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.calls import Signature
from rankmesh.debug.doctor.groups import KnownGroup, known_groups
from rankmesh.debug.doctor.recording import Recording

__all__ = ["History", "Track", "history_of"]


@dataclass(frozen=True, eq=False)
class Track:
    """The calls of one rank on one group, oldest first; ``rows`` are where they stand in its recording.

    ``signatures`` number those of the history.
    """

    rank: int
    numbers: Any
    signatures: Any
    pending: Any
    rows: Any

    @property
    def last(self) -> int:
        """The number of the last call."""
        return int(self.numbers[-1])

    def at(self, number: int) -> int | None:
        """Where a call is in this track; None when it is not there."""
        place = int(np.searchsorted(self.numbers, number))
        return place if place < len(self.numbers) and self.numbers[place] == number else None


@dataclass(frozen=True, eq=False)
class History:
    """All recordings by rank, and their tracks by group."""

    recordings: Mapping[int, Recording]
    world_size: int
    tracks: Mapping[KnownGroup, Mapping[int, Track]]
    signatures: tuple[Signature, ...]
    group_of: Mapping[tuple[int, int], KnownGroup]

    def last(self, group: KnownGroup, rank: int) -> int | None:
        """The number of a rank's last call on a group, 0 for none, None where it cannot be known."""
        track = self.tracks[group].get(rank)
        if track is not None:
            return track.last
        recording = self.recordings.get(rank)
        return None if recording is not None and recording.dropped else 0

    def has(self, rank: int) -> bool:
        """Whether the rank left a recording of its own."""
        recording = self.recordings.get(rank)
        return recording is not None and recording.spoke

    def signature(self, group: KnownGroup, rank: int, number: int) -> Signature | None:
        """What a rank called at a number, where its recording still has it."""
        track = self.tracks[group].get(rank)
        place = None if track is None else track.at(number)
        return None if track is None or place is None else self.signatures[track.signatures[place]]

    def site(self, group: KnownGroup, rank: int, number: int) -> str:
        """The line of a call, empty where frames were not recorded."""
        track = self.tracks[group].get(rank)
        place = None if track is None else track.at(number)
        if track is None or place is None:
            return ""
        recording = self.recordings[rank]
        site = int(recording.site[track.rows[place]])
        return recording.sites[site] if site >= 0 else ""

    def named(self, name: str, rank: int) -> KnownGroup | None:
        """The group that a rank knows under a name."""
        for index, group in enumerate(self.recordings[rank].groups):
            if group.name == name:
                return self.group_of[rank, index]
        return None


def history_of(recordings: Mapping[int, Recording], plan: Plan | None = None) -> History:
    """The history of a job."""
    size = _world_size(recordings, plan)
    group_of = known_groups(recordings, plan, size)
    tracks: dict[KnownGroup, dict[int, Track]] = {group: {} for group in group_of.values()}
    signatures: dict[Signature, int] = {}
    for rank, recording in recordings.items():
        numbers = [signatures.setdefault(signature, len(signatures)) for signature in recording.signatures]
        for index, track in _tracks(recording, np.array(numbers, dtype=np.int32)):
            tracks[group_of[rank, index]][rank] = track
    return History(recordings, size, tracks, tuple(signatures), group_of)


def _tracks(recording: Recording, numbers: Any) -> list[tuple[int, Track]]:
    """The tracks of one rank by the index of their group."""
    if not len(recording):
        return []
    rows = np.lexsort((recording.number, recording.group))
    groups = recording.group[rows]
    cuts = np.flatnonzero(np.diff(groups)) + 1
    return [
        (
            int(recording.group[part[0]]),
            Track(
                recording.rank,
                recording.number[part],
                numbers[recording.signature[part]],
                recording.pending[part],
                part,
            ),
        )
        for part in np.split(rows, cuts)
    ]


def _world_size(recordings: Mapping[int, Recording], plan: Plan | None) -> int:
    """The size of the world: of the plan, as recordings say, or up to the last rank that any of them speaks of."""
    if plan is not None:
        return plan.world_size
    said = [recording.world_size for recording in recordings.values() if recording.world_size]
    listed = {group.members for recording in recordings.values() for group in recording.groups if group.members}
    spoken = max((max(members) for members in listed), default=0)
    return max([*said, spoken + 1, max(recordings, default=0) + 1])
