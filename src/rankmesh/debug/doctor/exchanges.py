"""Calls between two members, and calls that no recording has.

```
rank 0   send 0->1  pending      rank 1   recv 1<-0  pending      both halves are there: the network, or a device
rank 2   recv 2<-1  pending      rank 1   -                       rank 2 waits for rank 1
```
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from rankmesh.debug.doctor.columns import Bools, Ints
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall

__all__ = ["exchanges", "unrecorded"]

_PAIRS = {"send": "recv", "recv": "send"}
_ROUNDS = ("monitored_barrier", "connect", "warm_up")
_FIRST_CALLS = frozenset(
    ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier")
)


def exchanges(history: History, broken: Collection[int]) -> Iterator[PendingCall]:
    """Sends and receives that are not over: each waits for its partner, unless that is there."""
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
            missing = () if there else (peer,)
            yield PendingCall(group, row + 1, operation, (rank,), missing, numbered=False, site=site)


def _has_partner(history: History, rank: int, peer: int, group: KnownGroup, one: dict[str, int], row: int) -> bool:
    """Whether the peer has posted the other half; where nothing was dropped, halves are counted."""
    recording, ours = history.recordings.get(peer), history.recordings[rank]
    if recording is None or not recording.is_own:
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


def _between(exchanges: Mapping[str, Ints | Bools], sends: int, me: int, peer: int) -> list[tuple[int, bool]]:
    """Of what these two exchanged in one direction: the group, and whether it is not over."""
    same = (exchanges["sends"] == bool(sends)) & (exchanges["me"] == me) & (exchanges["peer"] == peer)
    return list(zip(exchanges["group"][same].tolist(), exchanges["pending"][same].tolist(), strict=True))


def unrecorded(history: History) -> Iterator[PendingCall]:
    """Calls that only the stacks show: gloo records neither what two members exchange nor monitored barriers.

    Ranks that connect their groups agree through the store; those whose warm-up ran out have no call any more. The
    first call of a group on NCCL waits for all members before it is recorded.
    """
    rounds: dict[tuple[KnownGroup, str], list[int]] = {}
    for rank, recording in history.recordings.items():
        about = recording.in_call
        group = history.named(about.group, rank) if about is not None else None
        if about is None or group is None:
            continue
        if about.operation in _PAIRS and not recording.exchanges["pending"].any():
            yield _exchange_in_stacks(history, rank, group)
        elif about.operation in _ROUNDS or _is_first(history, rank, group, about.operation):
            rounds.setdefault((group, about.operation), []).append(rank)
    for (group, operation), ranks in rounds.items():
        missing = tuple(rank for rank in group.members if rank not in ranks)
        number = 1 + max(history.last(group, rank) or 0 for rank in ranks)
        yield PendingCall(group, number, operation, tuple(ranks), missing, numbered=False)


def _is_first(history: History, rank: int, group: KnownGroup, operation: str) -> bool:
    """Whether a rank is in the first collective of a group, of which nothing is recorded yet."""
    return operation in _FIRST_CALLS and history.last(group, rank) == 0


def _exchange_in_stacks(history: History, rank: int, group: KnownGroup) -> PendingCall:
    about = history.recordings[rank].in_call
    peer = about.peer if about is not None else None
    other = history.recordings.get(-1 if peer is None else peer)
    theirs = other.in_call if other is not None and other.is_own else None
    operation = about.operation if about is not None else ""
    is_there = theirs is not None and (theirs.operation, theirs.peer) == (_PAIRS[operation], rank)
    missing = () if peer is None or is_there else (peer,)
    number = 1 + (history.last(group, rank) or 0)
    site = about.site if about is not None else ""
    return PendingCall(group, number, operation, (rank,), missing, numbered=False, site=site)
