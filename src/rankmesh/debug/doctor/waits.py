"""Who waits for whom: the unfinished calls, and the members that have not come to them.

```
rank 0 ─┐                                            rank 3 has no recording, is in no call,
rank 1 ─┼─> all_reduce, call 42 of dp@tp1 ─> rank 3  or is in another call, which waits for others
rank 2 ─┘
```

A rank waits in its unfinished calls unless its own stack shows that its program runs. A rank that left no word of its
unfinished calls (gloo's end when they fail) still shows by its numbers that others went on without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History

__all__ = ["Turn", "Waits", "waits_of"]

# Unfinished calls of a rank in a group that are looked at: those after the first wait for it.
_FIRST = 64


@dataclass(eq=False)
class Turn:
    """One unfinished call of a group: who waits in it, and who has not come."""

    group: KnownGroup
    number: int
    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    numbered: bool = True
    site: str = ""
    since: int = 2**63 - 1

    @property
    def words(self) -> str:
        """``all_reduce, call 42 of dp@tp1``."""
        return f"{self.operation}, call {self.number} of {self.group}"


@dataclass(frozen=True)
class Waits:
    """All unfinished calls, and those of each rank."""

    turns: tuple[Turn, ...]
    of_rank: dict[int, list[Turn]] = field(default_factory=dict)

    @property
    def waiting(self) -> list[int]:
        """Every rank that waits."""
        return sorted(rank for rank, turns in self.of_rank.items() if turns)


def waits_of(history: History) -> Waits:
    """The unfinished calls of a history; of one without any, where some members went on without the others."""
    turns = [*_collectives(history), *_exchanges(history), *_unrecorded(history)]
    waits = _by_rank(history, turns)
    return waits if waits.of_rank else _by_rank(history, list(_behind(history)))


def _by_rank(history: History, turns: list[Turn]) -> Waits:
    of_rank: dict[int, list[Turn]] = {}
    for turn in turns:
        for rank in turn.waiting:
            about = history.recordings[rank].in_call
            if not (about is not None and about.running):
                of_rank.setdefault(rank, []).append(turn)
    return Waits(tuple(turn for turn in turns if any(turn in of_rank.get(rank, ()) for rank in turn.waiting)), of_rank)


def _collectives(history: History) -> Iterator[Turn]:
    for group, tracks in history.tracks.items():
        waiting: dict[int, list[int]] = {}
        for rank, track in tracks.items():
            for number in track.numbers[track.pending][:_FIRST].tolist():
                waiting.setdefault(number, []).append(rank)
        if waiting:
            yield from _turns(history, group, waiting)


def _turns(history: History, group: KnownGroup, waiting: dict[int, list[int]]) -> Iterator[Turn]:
    last = {rank: history.last(group, rank) if history.has(rank) else 0 for rank in group.members}
    for number, ranks in sorted(waiting.items()):
        missing = tuple(rank for rank, seen in last.items() if seen is not None and seen < number)
        signature = history.signature(group, ranks[0], number)
        operation = signature.operation if signature else ""
        since = min(_created(history, group, rank, number) for rank in ranks)
        yield Turn(group, number, operation, tuple(sorted(ranks)), missing, since=since)


def _created(history: History, group: KnownGroup, rank: int, number: int) -> int:
    """When a rank made a call, in nanoseconds."""
    track = history.tracks[group][rank]
    return int(history.recordings[rank].created[track.rows[track.at(number)]])


def _behind(history: History) -> Iterator[Turn]:
    """Calls that are over for some members and never came for others."""
    for group, tracks in history.tracks.items():
        last = {rank: history.last(group, rank) if history.has(rank) else 0 for rank in group.members}
        most = max((seen for seen in last.values() if seen is not None), default=0)
        ahead = [rank for rank, seen in last.items() if seen == most and rank in tracks]
        missing = tuple(rank for rank, seen in last.items() if seen is not None and seen < most)
        waiting = tuple(rank for rank in ahead if tracks[rank].rows[-1] == len(history.recordings[rank]) - 1)
        if missing and waiting:
            signature = history.signature(group, ahead[0], most)
            yield Turn(group, most, signature.operation if signature else "", waiting, missing)


# -- between two members -------------------------------------------------------------------------------------------


def _exchanges(history: History) -> Iterator[Turn]:
    """Sends and receives that are not over: each waits for its partner, unless that is there."""
    for rank, recording in history.recordings.items():
        for row in np.flatnonzero(recording.exchanges["pending"]).tolist():
            one = {name: int(column[row]) for name, column in recording.exchanges.items()}
            group = history.group_of[rank, one["group"]]
            peer = group.members[one["peer"]] if one["peer"] < len(group.members) else one["peer"]
            missing = () if _has_partner(history, rank, peer, group, one, row) else (peer,)
            site = recording.sites[one["site"]] if one["site"] >= 0 else ""
            operation = "send" if one["sends"] else "recv"
            yield Turn(group, row + 1, operation, (rank,), missing, numbered=False, site=site)


def _has_partner(history: History, rank: int, peer: int, group: KnownGroup, one: dict[str, int], row: int) -> bool:
    """Whether the peer has posted the other half; where nothing was dropped, halves are counted."""
    recording, ours = history.recordings.get(peer), history.recordings[rank]
    if recording is None or not recording.spoke:
        return False
    theirs = [
        pending
        for index, pending in _between(recording.exchanges, 1 - one["sends"], one["peer"], one["me"])
        if history.group_of[peer, index] is group
    ]
    if recording.dropped or ours.dropped:
        return any(theirs)
    earlier = {name: column[:row] for name, column in ours.exchanges.items()}
    mine = [index for index, _ in _between(earlier, one["sends"], one["me"], one["peer"]) if index == one["group"]]
    return len(theirs) > len(mine)


def _between(exchanges: Mapping[str, Any], sends: int, me: int, peer: int) -> list[tuple[int, bool]]:
    """Of what these two exchanged in one direction: the group, and whether it is not over."""
    same = (exchanges["sends"] == bool(sends)) & (exchanges["me"] == me) & (exchanges["peer"] == peer)
    return list(zip(exchanges["group"][same].tolist(), exchanges["pending"][same].tolist(), strict=True))


_PAIRS = {"send": "recv", "recv": "send"}
_MEETINGS = ("monitored_barrier", "connect", "warm_up")
_FIRST_CALLS = frozenset(
    ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier")
)


def _unrecorded(history: History) -> Iterator[Turn]:
    """Calls that only the stacks show: gloo records neither what two members exchange nor monitored barriers.

    Ranks that connect their groups meet through the store; those whose warm-up ran out have no call any more. The first
    call of a group on NCCL waits for all members before it is recorded.
    """
    meetings: dict[tuple[KnownGroup, str], list[int]] = {}
    for rank, recording in history.recordings.items():
        about = recording.in_call
        group = history.named(about.group, rank) if about is not None else None
        if about is None or group is None:
            continue
        if about.operation in _PAIRS and not recording.exchanges["pending"].any():
            yield _exchange_in_stacks(history, rank, group)
        elif about.operation in _MEETINGS or _is_first(history, rank, group, about.operation):
            meetings.setdefault((group, about.operation), []).append(rank)
    for (group, operation), ranks in meetings.items():
        missing = tuple(rank for rank in group.members if rank not in ranks)
        number = 1 + max(history.last(group, rank) or 0 for rank in ranks)
        yield Turn(group, number, operation, tuple(ranks), missing, numbered=False)


def _is_first(history: History, rank: int, group: KnownGroup, operation: str) -> bool:
    """Whether a rank is in the first collective of a group, of which nothing is recorded yet."""
    return operation in _FIRST_CALLS and history.last(group, rank) == 0


def _exchange_in_stacks(history: History, rank: int, group: KnownGroup) -> Turn:
    about = history.recordings[rank].in_call
    peer = about.peer if about is not None else None
    other = history.recordings.get(-1 if peer is None else peer)
    theirs = other.in_call if other is not None and other.spoke else None
    operation = about.operation if about is not None else ""
    meets = theirs is not None and (theirs.operation, theirs.peer) == (_PAIRS[operation], rank)
    missing = () if peer is None or meets else (peer,)
    number = 1 + (history.last(group, rank) or 0)
    site = about.site if about is not None else ""
    return Turn(group, number, operation, (rank,), missing, numbered=False, site=site)
