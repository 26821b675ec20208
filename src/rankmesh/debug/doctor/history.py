"""History: the recordings of all ranks, turned from ranks to groups.

```
rank 0   tp 1  dp 1  tp 2  dp 2 ...            dp@tp0   rank 0   1  2  3  4(pending)
rank 2   tp 1  dp 1  tp 2  dp 2 ...     ->              rank 2   1  2  3
```

A track holds the calls of one rank on one group. What the ring buffer no longer holds lies before its first number; a
rank that lost its oldest calls and has none on a group may have made any number of them.

Where a program catches the error of a call that ran out of time and goes on, the order of its calls ends:

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

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rankmesh.core.grouped import grouped
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
        return grouped((group.family, group) for group in self.tracks)

    def last(self, group: KnownGroup, rank: int, *, handed_over: bool = False) -> int | None:
        """Return the number of the last call of a group that a rank has entered, 0 for none, None if unknown.

        ``handed_over``: that its program has made, reached by its device or not.
        """
        track, known = self.tracks[group].get(rank), self.known_as[group].get(rank)
        if known is not None and known.queued is not None and (handed_over or track is None):
            return known.queued[1] if handed_over else known.queued[0] - 1
        if track is not None:
            return track.last
        # What torch counted for a group without calls; it also counts what two members exchange.
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
    """Return the history of a job, of each rank up to the first of its calls that ran out of time."""
    history = _whole(recordings, plan)
    in_time = _in_time(history)
    return history if in_time == recordings else _whole(in_time, plan)


def _whole(recordings: Mapping[int, Recording], plan: Plan | None) -> History:
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


# -- calls that ran out of time --------------------------------------------------------------------------------------


def _in_time(history: History) -> dict[int, Recording]:
    """Return the recordings, each up to the first of its calls that ran out of time."""
    ends = grouped(end for group, number in _quiet(history) for end in _ends(history, group, number))
    return {rank: _until(one, *min(ends[rank])) if rank in ends else one for rank, one in history.recordings.items()}


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
