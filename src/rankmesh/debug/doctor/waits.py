"""Who waits for whom: the unfinished calls, and the members that have not entered them.

```
rank 0 ─┐                                            rank 3 has no recording, is in no call,
rank 1 ─┼─> all_reduce, call 42 of dp@tp1 ─> rank 3  or is in another call, which waits for others
rank 2 ─┘
```

A rank waits in its unfinished calls unless its own stack shows that its program runs. Two kinds of recordings say
something else than they seem to:

- Gloo marks a call that failed as over, like one that came through. A collective that is over for one member and that
  another has never made has failed.
- A device that is broken reports no call as over. A rank has taken part in whatever its peers came out of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from rankmesh.debug.doctor.exchanges import exchanges, unrecorded
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall, Track

__all__ = ["Waits", "waits_of"]

# Unfinished calls of a rank in a group that are looked at: those after the first wait for it.
_FIRST = 64
# No member comes out of one of these before all have entered it.
_SYMMETRIC = (
    *("all_reduce", "allreduce", "all_gather", "allgather", "_all_gather", "reduce_scatter", "_reduce_scatter"),
    *("all_to_all", "alltoall", "barrier"),
)
# Nanoseconds after which a call that others came out of counts as one that a device does not report.
_REPORTED = 10 * 10**9


@dataclass(frozen=True)
class Waits:
    """All unfinished calls, and those of each rank; ``broken`` are the ranks whose device reports no call as over.

    Of a broken rank it is known which call it seems to be in, and a rank that came out of that.
    """

    calls: tuple[PendingCall, ...]
    of_rank: Mapping[int, list[PendingCall]] = field(default_factory=dict)
    broken: Mapping[int, tuple[PendingCall, int]] = field(default_factory=dict)

    @property
    def waiting(self) -> list[int]:
        """Every rank that waits."""
        return sorted(rank for rank, calls in self.of_rank.items() if calls)


def waits_of(history: History) -> Waits:
    """The unfinished calls of a history, and those that failed."""
    broken = _broken(history)
    calls = [*_collectives(history, broken), *exchanges(history, broken), *unrecorded(history)]
    waits = _by_rank(history, calls, broken)
    return waits if waits.of_rank else _by_rank(history, list(_too_late(history)), broken)


def _by_rank(history: History, calls: list[PendingCall], broken: Mapping[int, tuple[PendingCall, int]]) -> Waits:
    of_rank: dict[int, list[PendingCall]] = {}
    for call in calls:
        for rank in call.waiting:
            about = history.recordings[rank].in_call
            if not (about is not None and about.running):
                of_rank.setdefault(rank, []).append(call)
    kept = tuple(call for call in calls if any(call in of_rank.get(rank, ()) for rank in call.waiting))
    labels = Counter(group.label for group in {call.group for call in kept})
    for call in kept:
        call.is_ambiguous = labels[call.group.label] > 1
    return Waits(kept, of_rank, broken)


# -- collectives ---------------------------------------------------------------------------------------------------


def _collectives(history: History, broken: Iterable[int]) -> Iterator[PendingCall]:
    for group, tracks in history.tracks.items():
        last = _last(history, group, broken)
        pending: dict[int, list[int]] = {}
        failed = {} if history.on_device(group) else _failed(history, group, last)
        for rank, track in tracks.items():
            if rank in broken:
                continue
            for number in track.numbers[track.pending][:_FIRST].tolist():
                pending.setdefault(number, []).append(rank)
        for rank, number in failed.items():
            pending.setdefault(number, []).append(rank)
        for number, ranks in sorted(pending.items()):
            missing = tuple(rank for rank, seen in last.items() if seen is not None and seen < number)
            yield PendingCall(
                group,
                number,
                _operation(history, group, ranks[0], number),
                tuple(sorted(ranks)),
                missing,
                since=min(_created(history, group, rank, number) for rank in ranks),
                failed=all(failed.get(rank) == number for rank in ranks),
            )


def _last(history: History, group: KnownGroup, broken: Iterable[int]) -> dict[int, int | None]:
    """The last call of each member, as far as it is known."""
    return {
        rank: (history.handed_over if rank in broken else history.last)(group, rank) if history.has(rank) else 0
        for rank in group.members
    }


def _operation(history: History, group: KnownGroup, rank: int, number: int) -> str:
    signature = history.signature(group, rank, number)
    return signature.operation if signature else ""


def _created(history: History, group: KnownGroup, rank: int, number: int) -> int:
    """When a rank made a call, in nanoseconds."""
    track = history.tracks[group][rank]
    place = track.at(number)
    return 0 if place is None else int(history.recordings[rank].created[track.rows[place]])


def _is_symmetric(operation: str) -> bool:
    return operation.startswith(_SYMMETRIC)


def _failed(history: History, group: KnownGroup, last: Mapping[int, int | None]) -> dict[int, int]:
    """The call of each rank that is over and cannot have come through: a member never made it, or made another one.

    A call that has a root may be over for members that need not wait: of those only the last of a rank counts. What a
    member without a recording made is not known: others wait for it in their last call.
    """
    tracks = history.tracks[group]
    lowest = min((seen for rank, seen in last.items() if seen is not None and history.has(rank)), default=0)
    odd, is_gone = _made_otherwise(tracks), not all(map(history.has, group.members))
    found = {}
    for rank, track in tracks.items():
        over = track.numbers[~track.pending] if track.last > lowest else track.numbers[:0]
        place = int(np.searchsorted(over, lowest, side="right"))
        number = int(over[place]) if place < len(over) else 0
        at_the_end = history.is_last(track) and not track.pending[-1]
        if number and (
            _is_symmetric(_operation(history, group, rank, number)) or (at_the_end and number == track.last)
        ):
            found[rank] = number
        elif at_the_end and (track.last == odd or is_gone):
            found[rank] = track.last
    return found


def _made_otherwise(tracks: Mapping[int, Track]) -> int | None:
    """The number of the last call of all, where not all made the same one."""
    numbers = {track.last for track in tracks.values()}
    calls = {int(track.signatures[-1]) for track in tracks.values()}
    return numbers.pop() if len(numbers) == 1 and len(calls) > 1 else None


def _too_late(history: History) -> Iterator[PendingCall]:
    """Calls that some members came to when the others had given up.

    Two clocks must agree: the time of the call by all ranks' clocks, and the pause before it by the rank's own.
    """
    for group, tracks in history.tracks.items():
        numbers = {track.last for track in tracks.values()}
        if len(numbers) != 1 or set(tracks) != set(group.members) or not all(map(history.is_last, tracks.values())):
            continue
        number = numbers.pop()
        limit = min(history.recordings[rank].limit for rank in tracks)
        pauses = {rank: _pause(history, rank) for rank in tracks}
        created = {rank: _created(history, group, rank, number) / 1e9 for rank in tracks}
        first, shortest = min(created.values()), min(pauses.values())
        late = {rank: min(created[rank] - first, pauses[rank] - shortest) for rank in tracks}
        missing = tuple(rank for rank in group.members if limit and late[rank] > limit)
        waiting = tuple(sorted(set(tracks) - set(missing)))
        if missing:
            operation = _operation(history, group, waiting[0], number)
            delay = min(late[rank] for rank in missing)
            yield PendingCall(group, number, operation, waiting, missing, failed=True, delay=delay)


def _pause(history: History, rank: int) -> float:
    """Seconds between the last two calls of a rank."""
    created = history.recordings[rank].created
    return float(created[-1] - created[-2]) / 1e9 if len(created) > 1 else 0.0


def _broken(history: History) -> dict[int, tuple[PendingCall, int]]:
    """The ranks of which a device still has calls that peers came out of: the first of these calls, and such a peer."""
    found: dict[int, tuple[int, PendingCall, int]] = {}
    for group, tracks in history.tracks.items():
        # Where a member is gone the others came out because the communicator was aborted.
        if not history.on_device(group) or not all(map(history.has, group.members)):
            continue
        over = {rank: (known.queued or (0,))[0] - 1 for rank, known in history.known_as[group].items()}
        over |= {rank: (track.first_pending or track.last + 1) - 1 for rank, track in tracks.items()}
        ahead = max(over, key=lambda rank: over[rank])
        for rank, track in tracks.items():
            first = track.first_pending
            if first is None or over[ahead] < first or not _is_left(history, group, track, over[ahead]):
                continue
            row = int(track.rows[track.at(first) or 0])
            if rank not in found or row < found[rank][0]:
                call = PendingCall(group, first, _operation(history, group, rank, first), (rank,), ())
                found[rank] = row, call, ahead
    return {rank: (call, other) for rank, (_, call, other) in found.items()}


def _is_left(history: History, group: KnownGroup, track: Track, over: int) -> bool:
    """Whether a rank must have come out of a call that it has under way, as a peer has come out of a later one."""
    recording = history.recordings[track.rank]
    if recording.in_call is not None and recording.in_call.running:
        return False
    late = track.numbers[track.pending & (track.numbers <= over)]
    if recording.written and recording.written - _created(history, group, track.rank, int(late[0])) < _REPORTED:
        return False
    return any(_is_symmetric(_operation(history, group, track.rank, number)) for number in late.tolist())
