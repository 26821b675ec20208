"""History: the recordings of all ranks, turned from ranks to groups.

```
rank 0   tp 1  dp 1  tp 2  dp 2 ...            dp@tp0   rank 0   1  2  3  4(pending)
rank 2   tp 1  dp 1  tp 2  dp 2 ...     ->              rank 2   1  2  3
```

A track holds the calls of one rank on one group. What the ring buffer no longer holds lies before its first number; a
rank that lost its oldest calls and has none on a group may have made any number of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.calls import Signature
from rankmesh.debug.doctor.columns import Bools, GroupName, Ints
from rankmesh.debug.doctor.groups import KnownGroup, known_groups
from rankmesh.debug.doctor.recording import Recording

__all__ = ["History", "PendingCall", "Track", "history_of"]


@dataclass(frozen=True, eq=False)
class Track:
    """The calls of one rank on one group, oldest first; ``rows`` are their places in its recording.

    ``signatures`` are indices into the signatures of the history.
    """

    rank: int
    numbers: Ints
    signatures: Ints
    pending: Bools
    rows: Ints

    @property
    def last(self) -> int:
        """The number of the last call."""
        return int(self.numbers[-1])

    @property
    def first_pending(self) -> int | None:
        """The number of the first call that is not over."""
        waiting = np.flatnonzero(self.pending)
        return int(self.numbers[waiting[0]]) if len(waiting) else None

    def at(self, number: int) -> int | None:
        """Return where a call is in this track; None when it is not there."""
        place = int(np.searchsorted(self.numbers, number))
        return place if place < len(self.numbers) and self.numbers[place] == number else None


@dataclass(eq=False)
class PendingCall:
    """One unfinished call of a group: who waits in it, and who has not entered it.

    ``failed``: the call is over, but did not succeed.
    """

    group: KnownGroup
    number: int
    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    numbered: bool = True
    site: str = ""
    since: int = 2**63 - 1
    failed: bool = False
    is_ambiguous: bool = False

    @property
    def name(self) -> str:
        """``all_reduce, call 42 of dp@tp1``; with torch's name of the group where others have the same label."""
        of = f"{self.group} ({self.group.name[:40]})" if self.is_ambiguous else str(self.group)
        return f"{self.operation}, call {self.number} of {of}"


@dataclass(frozen=True, eq=False)
class History:
    """All recordings by rank, and their tracks by group; ``known_as`` is what each rank knows of a group."""

    recordings: Mapping[int, Recording]
    world_size: int
    tracks: Mapping[KnownGroup, Mapping[int, Track]]
    signatures: tuple[Signature, ...]
    group_of: Mapping[tuple[int, int], KnownGroup]
    known_as: Mapping[KnownGroup, Mapping[int, GroupName]]
    exchanging: frozenset[KnownGroup]
    # Of what was compared: kinds, signatures, operations and lines.
    numbers: dict[Hashable, int] = field(default_factory=dict)

    @cached_property
    def families(self) -> Mapping[Hashable, Sequence[KnownGroup]]:
        """The groups that have calls by their family."""
        found: dict[Hashable, list[KnownGroup]] = {}
        for group in self.tracks:
            found.setdefault(group.family, []).append(group)
        return found

    def last(self, group: KnownGroup, rank: int) -> int | None:
        """Return the number of the last call of a group that a rank has entered, 0 for none, None if unknown."""
        track, known = self.tracks[group].get(rank), self.known_as[group].get(rank)
        if track is not None:
            return track.last
        if known is not None and known.queued is not None:
            return known.queued[0] - 1
        return self._counted(known, rank, group)

    def handed_over(self, group: KnownGroup, rank: int) -> int | None:
        """Return the number of the last call of a group that a rank's program has made, reached by its device or not.

        0 for none, None where it cannot be known.
        """
        track, known = self.tracks[group].get(rank), self.known_as[group].get(rank)
        if known is not None and known.queued is not None:
            return known.queued[1]
        return self._counted(known, rank, group) if track is None else track.last

    def _counted(self, known: GroupName | None, rank: int, group: KnownGroup) -> int | None:
        """Return what torch counted for a group without calls; it also counts what two members exchange."""
        if known is not None and known.enqueued is not None and group not in self.exchanging:
            return known.enqueued
        recording = self.recordings.get(rank)
        return None if recording is not None and recording.dropped else 0

    def on_device(self, group: KnownGroup) -> bool:
        """Return whether the calls of a group run on a device."""
        return any(known.on_device for known in self.known_as[group].values())

    def is_last(self, track: Track) -> bool:
        """Return whether the last call of a track is the last of its recording."""
        return int(track.rows[-1]) == len(self.recordings[track.rank]) - 1

    def has(self, rank: int) -> bool:
        """Return whether the rank left a recording of its own."""
        recording = self.recordings.get(rank)
        return recording is not None and recording.from_rank

    def are_alive(self, ranks: Iterable[int]) -> bool:
        """Return whether others saw that the processes of these ranks run."""
        return all(rank in self.recordings and self.recordings[rank].alive for rank in ranks)

    def row(self, group: KnownGroup, rank: int, number: int) -> int | None:
        """Return the place of a call in a rank's recording; None if it is not there any more, or not yet."""
        track = self.tracks[group].get(rank)
        place = None if track is None else track.at(number)
        return None if track is None or place is None else int(track.rows[place])

    def signature(self, group: KnownGroup, rank: int, number: int) -> Signature | None:
        """Return what a rank called at a number, where its recording still has it."""
        row = self.row(group, rank, number)
        return None if row is None else self.recordings[rank].signatures[self.recordings[rank].signature[row]]

    def operation(self, group: KnownGroup, rank: int, number: int) -> str:
        """Return the operation of a call, empty where a recording has it no more."""
        signature = self.signature(group, rank, number)
        return signature.operation if signature else ""

    def site(self, group: KnownGroup, rank: int, number: int) -> str:
        """Return the line of a call, empty where frames were not recorded."""
        row = self.row(group, rank, number)
        site = -1 if row is None else int(self.recordings[rank].site[row])
        return self.recordings[rank].sites[site] if site >= 0 else ""

    def created(self, group: KnownGroup, rank: int, number: int) -> int:
        """Return when a rank made a call, in nanoseconds; 0 where its recording has it no more."""
        row = self.row(group, rank, number)
        return 0 if row is None else int(self.recordings[rank].created[row])

    def named(self, name: str, rank: int) -> KnownGroup | None:
        """Return the group that a rank knows under a name."""
        for index, group in enumerate(self.recordings[rank].groups):
            if group.name == name:
                return self.group_of[rank, index]
        return None


def history_of(recordings: Mapping[int, Recording], plan: Plan | None = None) -> History:
    """Return the history of a job."""
    size = _world_size(recordings, plan)
    group_of = known_groups(recordings, plan, size)
    tracks: dict[KnownGroup, dict[int, Track]] = {group: {} for group in group_of.values()}
    signatures: dict[Signature, int] = {}
    for rank, recording in recordings.items():
        numbers = [signatures.setdefault(signature, len(signatures)) for signature in recording.signatures]
        for index, track in _tracks(recording, np.array(numbers, dtype=np.int32)):
            tracks[group_of[rank, index]][rank] = track
    known_as: dict[KnownGroup, dict[int, GroupName]] = {group: {} for group in tracks}
    for (rank, index), group in group_of.items():
        known_as[group][rank] = recordings[rank].groups[index]
    exchanging = frozenset(
        group_of[rank, index]
        for rank, recording in recordings.items()
        for index in np.unique(recording.exchanges["group"]).tolist()
    )
    return History(recordings, size, tracks, tuple(signatures), group_of, known_as, exchanging)


def _tracks(recording: Recording, numbers: Ints) -> list[tuple[int, Track]]:
    """Return the tracks of one rank by the index of their group."""
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
    """Return the size of the world: of the plan, as recordings say, or up to the last rank that any of them lists."""
    if plan is not None:
        return plan.world_size
    given = [recording.world_size for recording in recordings.values() if recording.world_size]
    listed = {group.members for recording in recordings.values() for group in recording.groups if group.members}
    last = max((max(members) for members in listed), default=0)
    return max([*given, last + 1, max(recordings, default=0) + 1])
