"""Waits: the unfinished calls, the ranks that wait in each, and the members that have not entered it.

```
rank 0 ─┐                                            rank 3 has no recording, is in no call,
rank 1 ─┼─> all_reduce, call 42 of dp@tp1 ─> rank 3  or is in another call, which waits for others
rank 2 ─┘
```

A send or receive waits for its partner alone, unless that is there:

```
rank 0   send 0->1  pending      rank 1   recv 1<-0  pending      both halves are there: the network, or a device
rank 2   recv 2<-1  pending      rank 1   -                       rank 2 waits for rank 1
```

A rank waits in its unfinished calls unless its own stack shows that its program runs. Two kinds of recordings
are misleading:

- Gloo marks a call that failed as over, like one that succeeded. A collective that is over for one member and that
  another has never made has failed.
- A device that is broken reports no call as over. A rank has taken part in every call that its peers have left.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

import numpy as np

from rankmesh.core.grouped import grouped
from rankmesh.debug.doctor.columns import Bools
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall, Track
from rankmesh.debug.doctor.recording import InCall

__all__ = ["Waits", "waits_of"]

# Unfinished calls of a rank in a group that are looked at: those after the first wait for it.
_FIRST = 64
# No member leaves one of these before all have entered it.
_SYMMETRIC = (
    *("all_reduce", "allreduce", "all_gather", "allgather", "_all_gather", "reduce_scatter", "_reduce_scatter"),
    *("all_to_all", "alltoall", "barrier"),
)
# Nanoseconds after which a call that others have left counts as one that a device does not report.
_REPORTED = 10 * 10**9


@dataclass(frozen=True)
class Waits:
    """All unfinished calls, also by rank; ``broken`` are the ranks whose device reports no call as over.

    For a broken rank: the call that it seems to be in, and a rank that has left that call.
    """

    calls: tuple[PendingCall, ...]
    of_rank: Mapping[int, list[PendingCall]]
    broken: Mapping[int, tuple[PendingCall, int]]

    @property
    def waiting(self) -> list[int]:
        """Every rank that waits."""
        return sorted(rank for rank, calls in self.of_rank.items() if calls)

    @cached_property
    def for_whom(self) -> Mapping[int, list[PendingCall]]:
        """The calls by the ranks that are missing in them."""
        return grouped((rank, call) for call in self.calls for rank in call.missing)


def waits_of(history: History) -> Waits:
    """Return the unfinished calls of a history, and those that failed."""
    broken = _broken(history)
    calls = [*_collectives(history, broken), *_exchanges(history, broken), *_unrecorded(history)]
    calls += _of_unknown_groups(history, {rank for call in calls for rank in call.waiting})
    of_rank = _by_rank(history, calls)
    if len(set(history.orders.values())) > 1:
        blocked = list(_of_blocked_threads(history, calls, of_rank))
        if any(_by_rank(history, blocked).values()):  # else every rank waits on another thread than it is missed in
            calls, of_rank = blocked, _by_rank(history, blocked)
    kept = tuple(call for call in calls if any(call in of_rank.get(rank, ()) for rank in call.waiting))
    labels = Counter(group.label for group in {call.group for call in kept})
    for call in kept:
        call.is_ambiguous = labels[call.group.label] > 1
    return Waits(kept, of_rank, broken)


def _by_rank(history: History, calls: Iterable[PendingCall]) -> dict[int, list[PendingCall]]:
    return grouped(
        (rank, call)
        for call in calls
        for rank in call.waiting
        if not history.recordings[rank].is_running or (call.failed and _is_certain(history, call))
    )


def _of_blocked_threads(
    history: History, calls: Iterable[PendingCall], of_rank: Mapping[int, Sequence[PendingCall]]
) -> Iterator[PendingCall]:
    """Yield calls without the missing members that wait on other threads only: their thread for these calls goes on."""
    orders = history.orders
    waits_in = {rank: {orders[call.group.family] for call in waits} for rank, waits in of_rank.items()}
    for call in calls:
        order = orders[call.group.family]
        missing = tuple(rank for rank in call.missing if order in waits_in.get(rank, {order}))
        if missing or not call.missing:
            yield replace(call, missing=missing)


def _is_certain(history: History, call: PendingCall) -> bool:
    """Return whether a call that is over has surely failed: a missing member did not run, and cannot enter later.

    Recordings are not written in the same moment.
    """
    return any(history.has(rank) and not history.recordings[rank].is_running for rank in call.missing)


# -- collectives ---------------------------------------------------------------------------------------------------


def _collectives(history: History, broken: Iterable[int]) -> Iterator[PendingCall]:
    for group, tracks in history.tracks.items():
        last = _last(history, group, broken)
        failed = {} if history.on_device(group) else _failed(history, group, last)
        unfinished = (
            (number, rank)
            for rank, track in tracks.items()
            for number in ([] if rank in broken else track.numbers[track.pending][:_FIRST].tolist())
        )
        pending = grouped((*unfinished, *((number, rank) for rank, number in failed.items())))
        for number, ranks in sorted(pending.items()):
            if _is_over(history, group, number, ranks):
                continue
            missing = tuple(rank for rank, seen in last.items() if seen is not None and seen < number)
            yield PendingCall(
                group,
                number,
                history.operation(group, ranks[0], number),
                tuple(sorted(ranks)),
                missing,
                since=min(history.created(group, rank, number) for rank in ranks),
                failed=all(failed.get(rank) == number for rank in ranks),
            )


def _last(history: History, group: KnownGroup, broken: Iterable[int]) -> dict[int, int | None]:
    """Return the last call of each member, as far as it is known."""
    return {
        rank: history.last(group, rank, handed_over=rank in broken) if history.has(rank) else 0
        for rank in group.members
        if history.knows(rank)
    }


def _is_over(history: History, group: KnownGroup, number: int, waiting: Sequence[int]) -> bool:
    """Return whether a call ended after these ranks were recorded in it: a member left it, and ended as it should.

    The recordings of a job that was slow are of different moments: of the slow one, and of the end of each rank.
    """
    latest = max(history.recordings[rank].written for rank in waiting)
    for track in history.ended[group] if latest else ():
        place = track.at(number) if history.recordings[track.rank].written > latest else None
        if place is not None:
            return not track.pending[place] and _is_symmetric(history.operation(group, track.rank, number))
    return False


def _is_symmetric(operation: str) -> bool:
    return operation.startswith(_SYMMETRIC)


def _failed(history: History, group: KnownGroup, last: Mapping[int, int | None]) -> dict[int, int]:
    """Return for each rank the call that is over but cannot have succeeded: a member never made it, or made another.

    A call that has a root may be over for members that need not wait: of those only the last of a rank counts. What a
    member without a recording made is not known: others wait for it in their last call.
    """
    tracks = history.tracks[group]
    lowest_of = _lowest(history, group, {rank: seen for rank, seen in last.items() if seen is not None})
    odd, is_incomplete = _made_otherwise(tracks), not all(map(history.has, group.members))
    found = {}
    for rank, track in tracks.items():
        lowest = lowest_of(rank)
        over = track.numbers[~track.pending] if track.last > lowest else track.numbers[:0]
        place = int(np.searchsorted(over, lowest, side="right"))
        number = int(over[place]) if place < len(over) else 0
        at_the_end = history.is_last(track) and not track.pending[-1]
        if number and (_is_symmetric(history.operation(group, rank, number)) or (at_the_end and number == track.last)):
            found[rank] = number
        elif at_the_end and (track.last == odd or is_incomplete):
            found[rank] = track.last
    return found


def _lowest(history: History, group: KnownGroup, last: Mapping[int, int]) -> Callable[[int], int]:
    """Return a function that takes a rank and gives the lowest last call of the members when that rank was recorded.

    A member that was recorded before, and was free to make calls on this group since, may have made any.
    """
    order = history.orders[group.family]
    blocked = {rank for rank in last if history.has(rank) and _is_blocked(history, rank, order)}
    fixed, free = [sys.maxsize], list[tuple[int, int]]()
    for rank, seen in last.items():
        if history.has(rank):
            recording = history.recordings[rank]
            if rank in blocked or recording.ended or not recording.written:
                fixed.append(seen)
            else:
                free.append((recording.written, seen))
    free.sort(reverse=True)
    times, lowest = [-time for time, _ in free], list(accumulate((seen for _, seen in free), min, initial=min(fixed)))

    def lowest_of(rank: int) -> int:
        return lowest[bisect_right(times, -history.recordings[rank].written)]

    return lowest_of


def _is_blocked(history: History, rank: int, order: Hashable) -> bool:
    """Return whether a rank was in an unfinished call of an order that has not ended since."""
    recording = history.recordings[rank]
    for row in np.flatnonzero(recording.pending)[:_FIRST].tolist():
        group = history.group_of[rank, int(recording.group[row])]
        if history.orders[group.family] == order:
            return not _is_over(history, group, int(recording.number[row]), (rank,))
    return False


def _made_otherwise(tracks: Mapping[int, Track]) -> int | None:
    """Return the number of the last call if all tracks end with that number, but with different calls; else None."""
    numbers = {track.last for track in tracks.values()}
    calls = {int(track.signatures[-1]) for track in tracks.values()}
    return numbers.pop() if len(numbers) == 1 and len(calls) > 1 else None


def _broken(history: History) -> dict[int, tuple[PendingCall, int]]:
    """Return ranks whose device still has calls that peers have left: the first of these calls, and such a peer."""
    found = list[tuple[int, tuple[int, PendingCall, int]]]()
    for group, tracks in history.tracks.items():
        # If a member is gone, the others left because the communicator was aborted.
        if not history.on_device(group) or not all(map(history.has, group.members)):
            continue
        over = {rank: (known.queued or (0,))[0] - 1 for rank, known in history.known_as[group].items()}
        over |= {rank: (track.first_pending or track.last + 1) - 1 for rank, track in tracks.items()}
        ahead = max(over, key=lambda rank: over[rank])
        for rank, track in tracks.items():
            first = track.first_pending
            if first is None or over[ahead] < first or not _has_come_out(history, group, track, over[ahead]):
                continue
            call = PendingCall(group, first, history.operation(group, rank, first), (rank,), ())
            found.append((rank, (int(track.rows[track.at(first) or 0]), call, ahead)))
    return {rank: min(calls, key=itemgetter(0))[1:] for rank, calls in grouped(found).items()}


def _has_come_out(history: History, group: KnownGroup, track: Track, over: int) -> bool:
    """Return whether a rank must have left a call that its recording shows under way: a peer has left a later one."""
    recording = history.recordings[track.rank]
    if recording.is_running:
        return False
    behind = track.numbers[track.pending & (track.numbers <= over)]
    if recording.written and recording.written - history.created(group, track.rank, int(behind[0])) < _REPORTED:
        return False
    return any(_is_symmetric(history.operation(group, track.rank, number)) for number in behind.tolist())


# -- calls between two members, and calls that no recording has -----------------------------------------------------

_PAIRS = {"send": "recv", "recv": "send"}
_ROUNDS = ("monitored_barrier", "connect", "warm_up", "new_group")
_FIRST_CALLS = frozenset(
    ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier")
)


def _exchanges(history: History, broken: Collection[int]) -> Iterator[PendingCall]:
    """Yield sends and receives that are not over: each waits for its partner, unless that is there."""
    for rank, recording in history.recordings.items():
        if rank in broken:
            continue
        for row in np.flatnonzero(recording.exchanges["pending"]).tolist():
            one = {name: int(column[row]) for name, column in recording.exchanges.items()}
            group = history.group_of[rank, one["group"]]
            peer = group.members[one["peer"]] if one["peer"] < len(group.members) else one["peer"]
            there = peer not in broken and _has_partner(history, rank, peer, group, one, row)
            site = recording.sites[one["site"]] if one["site"] >= 0 else ""
            operation = "send" if one["sends"] else "recv"
            missing = () if there or not history.knows(peer) else (peer,)
            yield PendingCall(group, row + 1, operation, (rank,), missing, numbered=False, site=site)


def _has_partner(history: History, rank: int, peer: int, group: KnownGroup, one: dict[str, int], row: int) -> bool:
    """Return whether the peer has posted the other half; where nothing was dropped, halves are counted."""
    recording, ours = history.recordings.get(peer), history.recordings[rank]
    if recording is None or not recording.from_rank:
        return False
    theirs = _posted(history, peer, group, 1 - one["sends"], one["peer"], one["me"])
    if recording.dropped or ours.dropped:
        return bool(recording.exchanges["pending"][theirs].any())
    earlier = _posted(history, rank, group, one["sends"], one["me"], one["peer"])[:row]
    return int(theirs.sum()) > int(earlier.sum())


def _posted(history: History, rank: int, group: KnownGroup, sends: int, me: int, peer: int) -> Bools:
    """Return a mask of a rank's exchanges: those in this group, between these positions, in this direction."""
    made, groups = history.recordings[rank].exchanges, range(len(history.recordings[rank].groups))
    is_in = np.isin(made["group"], [index for index in groups if history.group_of[rank, index] is group])
    found: Bools = is_in & (made["sends"] == bool(sends)) & (made["me"] == me) & (made["peer"] == peer)
    return found


def _unrecorded(history: History) -> Iterator[PendingCall]:
    """Yield calls that only the stacks show: gloo records neither what two members exchange nor monitored barriers.

    Ranks that connect their groups agree through the store; those whose warm-up ran out have no call any more. A group
    that is created waits for its members, on NCCL its first call does, before anything is recorded.
    """
    rounds: dict[tuple[KnownGroup, str], list[int]] = {}
    for rank, recording in history.recordings.items():
        about = recording.in_call
        group = history.named(about.group, rank) if about is not None else None
        if about is None or group is None:
            continue
        if about.operation in _PAIRS and not recording.exchanges["pending"].any():
            yield _exchange_in_stacks(history, rank, about, group)
        elif about.operation in _ROUNDS or _is_first(history, rank, group, about.operation):
            rounds.setdefault((group, about.operation), []).append(rank)
    for (group, operation), ranks in rounds.items():
        missing = tuple(rank for rank in group.members if rank not in ranks and history.knows(rank))
        number = 1 + max(history.last(group, rank) or 0 for rank in ranks)
        yield PendingCall(group, number, operation, tuple(ranks), missing, numbered=False)


def _of_unknown_groups(history: History, waiting: Collection[int]) -> Iterator[PendingCall]:
    """Yield calls for which lines name neither group nor number; each may wait for any rank known to be in none.

    Counts of a group with sends, which have numbers of their own, do not show that.
    """
    inside = grouped(
        (recording.in_call, rank)
        for rank, recording in history.recordings.items()
        if recording.source and recording.in_call and recording.in_call.operation and rank not in waiting
    )
    missing = set(range(history.world_size)) - {*waiting, *(rank for ranks in inside.values() for rank in ranks)}
    absent = tuple(rank for rank in sorted(missing) if history.knows(rank) and not _is_unclear(history, rank))
    for about, ranks in inside.items():
        world = next(group for group in history.tracks if group.kind == "world")
        yield PendingCall(world, 0, about.operation, tuple(ranks), absent, numbered=False, site=about.site)


def _is_unclear(history: History, rank: int) -> bool:
    """Return whether lines of a rank show neither that its program runs nor that it is gone."""
    recording = history.recordings.get(rank)
    return recording is not None and bool(recording.source) and recording.from_rank and not recording.is_running


def _is_first(history: History, rank: int, group: KnownGroup, operation: str) -> bool:
    """Return whether a rank is in the first collective of a group, of which nothing is recorded yet."""
    return operation in _FIRST_CALLS and history.last(group, rank) == 0


def _exchange_in_stacks(history: History, rank: int, about: InCall, group: KnownGroup) -> PendingCall:
    other = history.recordings.get(-1 if about.peer is None else about.peer)
    theirs = other.in_call if other is not None and other.from_rank else None
    is_there = theirs is not None and (theirs.operation, theirs.peer) == (_PAIRS[about.operation], rank)
    missing = () if about.peer is None or is_there or not history.knows(about.peer) else (about.peer,)
    number = 1 + (history.last(group, rank) or 0)
    return PendingCall(group, number, about.operation, (rank,), missing, numbered=False, site=about.site)
