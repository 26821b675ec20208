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

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from operator import itemgetter

import numpy as np

from rankmesh.core.grouped import grouped
from rankmesh.core.plan import Plan
from rankmesh.debug.doctor.calls import Signature
from rankmesh.debug.doctor.columns import Bools, GroupName, Ints
from rankmesh.debug.doctor.groups import KnownGroup, known_groups, members_listed
from rankmesh.debug.doctor.recording import TRUST, Recording

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
        """Return the place of a call in this track; None if the track does not have it."""
        place = int(np.searchsorted(self.numbers, number))
        return place if place < len(self.numbers) and self.numbers[place] == number else None


@dataclass(eq=False)
class PendingCall:
    """One unfinished call of a group: ranks wait in it, and ``missing`` ones have not entered it.

    ``number`` is 0 if it is unknown. ``failed``: the call is over, but did not succeed.
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
        return f"{self.operation}, call {self.number} of {of}" if self.number else self.operation


@dataclass(frozen=True, eq=False)
class History:
    """All recordings by rank, and their tracks by group; ``known_as`` is each rank's record of a group."""

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
    def orders(self) -> Mapping[Hashable, Hashable]:
        """Map each family of groups to one that stands for all families whose calls are in one order.

        ```
        main thread   tp dp tp dp      tp and dp are in one order
        another one   metrics          the order of which to tp and dp is by chance
        ```
        """
        order: dict[Hashable, Hashable] = {family: family for family in self.families}

        def join(families: Collection[Hashable]) -> None:
            joined = {order[family] for family in families}
            if len(joined) > 1:
                first = next(order[family] for family in order if order[family] in joined)
                order.update({family: first for family, one in order.items() if one in joined})

        threads = []
        for rank, recording in self.recordings.items():
            made_on = recording.thread
            calls = (recording.group[made_on == t] for t in sorted(set(made_on.tolist())))
            of_rank = [{self.group_of[rank, g].family for g in set(groups.tolist())} for groups in calls]
            threads += [of_rank] if len(of_rank) > 1 else []
            for families in of_rank:
                join(families)
        # Families that no rank has on two threads are in one order, too.
        apart = {
            frozenset((order[next(iter(one))], order[next(iter(other))]))
            for of_rank in threads
            for one, other in combinations(of_rank, 2)
        }
        for one, other in combinations(list(dict.fromkeys(order.values())), 2):
            if frozenset((order[one], order[other])) not in apart:
                join((one, other))
        return order

    @cached_property
    def ended(self) -> Mapping[KnownGroup, Sequence[Track]]:
        """The tracks of ranks whose program has ended as it should, by group."""
        ended = {rank for rank, one in self.recordings.items() if one.ended and not one.failure}
        return {group: [track for r, track in tracks.items() if r in ended] for group, tracks in self.tracks.items()}

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

    @property
    def unrecorded(self) -> int:
        """The number of ranks without a recording, even one that others made."""
        return self.world_size - len(self.recordings)

    @property
    def is_partial(self) -> bool:
        """Whether most ranks have no recording: the files are perhaps of one host, or of a few ranks."""
        return 2 * self.unrecorded > self.world_size

    @cached_property
    def trust(self) -> str:
        """The lowest trust of a recording, one of ``TRUST``."""
        return min((recording.trust for recording in self.recordings.values()), key=TRUST.index, default=TRUST[0])

    def is_listed(self, group: KnownGroup) -> bool:
        """Return whether all members of a group are known: a recording lists all, lines may name a few."""
        known = self.known_as[group]
        return any(each.members for each in known.values()) or not any(self.recordings[rank].source for rank in known)

    def knows(self, rank: int) -> bool:
        """Return whether anything is known of a rank: it has a recording, or is one of few without."""
        return rank in self.recordings or not self.is_partial

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
        """Return the call of a rank at a number; None if its recording does not have it any more."""
        row = self.row(group, rank, number)
        return None if row is None else self.recordings[rank].signatures[self.recordings[rank].signature[row]]

    def operation(self, group: KnownGroup, rank: int, number: int) -> str:
        """Return the operation of a call, "" if the recording no longer has it."""
        signature = self.signature(group, rank, number)
        return signature.operation if signature else ""

    def site(self, group: KnownGroup, rank: int, number: int) -> str:
        """Return the line of a call: as it was recorded, else of the call that the rank waits in; "" if unknown."""
        recording, track = self.recordings[rank], self.tracks[group].get(rank)
        row = self.row(group, rank, number)
        if row is None or track is None:
            return ""
        if recording.site[row] >= 0:
            return str(recording.sites[recording.site[row]])
        about, last = recording.in_call, number == track.last
        return about.site if last and about is not None and about.group == self.known_as[group][rank].name else ""

    def created(self, group: KnownGroup, rank: int, number: int) -> int:
        """Return the time of a rank's call in nanoseconds, 0 if its recording no longer has it."""
        row = self.row(group, rank, number)
        return 0 if row is None else int(self.recordings[rank].created[row])

    def rows(self, rank: int) -> Mapping[Hashable, Ints]:
        """Return the places of a rank's calls by the order that they are in."""
        recording, numbers = self.recordings[rank], dict[Hashable, int]()
        for index in range(len(recording.groups)):
            numbers.setdefault(self.orders[self.group_of[rank, index].family], len(numbers))
        if len(numbers) == 1:
            return {order: np.arange(len(recording)) for order in numbers if len(recording)}
        of_group = [numbers[self.orders[self.group_of[rank, i].family]] for i in range(len(recording.groups))]
        of_row = np.array(of_group, dtype=np.int32)[recording.group]
        rows = {order: np.flatnonzero(of_row == number) for order, number in numbers.items()}
        return {order: each for order, each in rows.items() if len(each)}

    def last_row(self, rank: int, group: KnownGroup) -> int:
        """Return the place of a rank's last call among those in one order with the calls of a group; -1 for none."""
        rows = self.rows(rank).get(self.orders[group.family])
        return -1 if rows is None else int(rows[-1])

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
        for index in set(recording.exchanges["group"].tolist())
    )
    return History(recordings, size, tracks, tuple(signatures), group_of, known_as, exchanging)


def _tracks(recording: Recording, numbers: Ints) -> list[tuple[int, Track]]:
    """Return the tracks of one rank, each with the index of its group."""
    if not len(recording):
        return []
    rows = np.lexsort((recording.number, recording.group))
    groups = recording.group[rows]
    # Tracks are views of one array for each column: of 16,384 ranks, arrays of their own take seconds.
    number, signature, pending = recording.number[rows], numbers[recording.signature[rows]], recording.pending[rows]
    cuts = [0, *((groups[1:] != groups[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
    return [
        (int(groups[a]), Track(recording.rank, number[a:b], signature[a:b], pending[a:b], rows[a:b]))
        for a, b in pairwise(cuts)
    ]


def _world_size(recordings: Mapping[int, Recording], plan: Plan | None) -> int:
    """Return the world size: the plan's, or the largest that a recording states or lists ranks of."""
    if plan is not None:
        return plan.world_size
    given = [recording.world_size for recording in recordings.values() if recording.world_size]
    last = max((max(members) for members in members_listed(recordings.values()).values()), default=0)
    return max([*given, last + 1, max(recordings, default=0) + 1])


# -- calls that ran out of time --------------------------------------------------------------------------------------


def _in_time(history: History) -> dict[int, Recording]:
    """Return the recordings, each up to the first of its calls that ran out of time; other threads go on."""
    ends = grouped(
        (rank, (history.orders[group.family], *end))
        for group, number in _quiet(history)
        for rank, end in _ends(history, group, number)
    )
    return {
        rank: _until(history, rank, ends[rank]) if rank in ends else one for rank, one in history.recordings.items()
    }


def _quiet(history: History) -> set[tuple[KnownGroup, int]]:
    """Return the calls of a CPU after which a rank made no other call for the timeout of their group."""
    found = set()
    for rank, recording in history.recordings.items():
        limits = np.array([group.limit for group in recording.groups] or [0.0])[recording.group] * 1e9
        for rows in history.rows(rank).values():
            pauses = np.append(np.diff(recording.created[rows]).astype(float), np.inf)[: len(rows)]
            for row in rows[(limits[rows] > 0) & (pauses >= limits[rows])].tolist():
                found.add((history.group_of[rank, int(recording.group[row])], int(recording.number[row])))
    return {(group, number) for group, number in found if not history.on_device(group)}


def _ends(history: History, group: KnownGroup, number: int) -> Iterator[tuple[int, tuple[int, float]]]:
    """Yield for each member of a call that timed out the row where its order ends, and its delay in seconds."""
    rows = {rank: row for rank in history.tracks[group] if (row := history.row(group, rank, number)) is not None}
    created = {rank: history.created(group, rank, number) / 1e9 for rank in rows}
    first = min(rows, key=lambda rank: created[rank])
    limit = max(known.limit for known in history.known_as[group].values())
    since = {rank: created[rank] - _before(history, group, rank, number) for rank in rows}
    late = {rank for rank in rows if created[rank] - created[first] > limit <= 2 * (since[rank] - since[first])}
    is_incomplete = any(history.has(rank) and (history.last(group, rank) or number) < number for rank in group.members)
    if late or is_incomplete or len({history.signature(group, rank, number) for rank in rows}) > 1:
        for rank, row in rows.items():
            yield rank, (row, created[rank] - created[first]) if rank in late else (row + 1, 0.0)


def _before(history: History, group: KnownGroup, rank: int, number: int) -> float:
    """Return the time in seconds of a rank's previous call of the group, or of its first call of all."""
    return float(history.recordings[rank].created[history.row(group, rank, number - 1) or 0]) / 1e9


def _until(history: History, rank: int, ends: Sequence[tuple[Hashable, int, float]]) -> Recording:
    """Return a rank's recording without the calls of each order from the first of its ends on."""
    recording, rows, late_by = history.recordings[rank], history.rows(rank), 0.0
    kept = np.ones(len(recording), dtype=bool)
    for order, end, late in sorted(ends, key=itemgetter(1, 2), reverse=True):
        kept[rows[order][rows[order] >= end]] = False
        late_by = late
    if kept.all():
        return recording
    columns = ("group", "number", "signature", "pending", "site", "created", "thread")
    groups = [replace(group, enqueued=None) for group in recording.groups]
    return replace(
        recording, **{name: getattr(recording, name)[kept] for name in columns}, groups=groups, late_by=late_by
    )
