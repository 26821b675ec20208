"""Order: members of a group that made different calls under one number, and where a rank left the order of its peers.

```
call        1           2            3
rank 0      all_reduce  all_reduce   broadcast       order: rank 3 made at call 2 what the others make at call 3
rank 3      all_reduce  broadcast                    different: nobody else makes that call near by
```

Who is odd is decided by the most, among two by what the other groups of the kind did at this call. A rank that leaves
out one of many equal calls diverges later, or only waits elsewhere: lines of code show its first departure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter

import numpy as np

from rankmesh.debug.doctor.calls import Signature, difference, odd_ones
from rankmesh.debug.doctor.causes import Cause
from rankmesh.debug.doctor.columns import Ints
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall, Track
from rankmesh.errors import in_words

__all__ = ["departure", "divergences", "went_past"]

# How many calls later another rank's call is looked for, how many groups of a kind and how many recordings are asked,
# and with how many peers a rank is compared.
_AHEAD, _OF_A_KIND, _ASKED, _PEERS = 8, 64, 256, 16
_NEVER = 2**62


def divergences(history: History) -> Iterator[Cause]:
    """Yield the first divergence of each group that has one."""
    for group, tracks in history.tracks.items():
        number = _first_difference(tracks.values()) if len(tracks) > 1 else None
        if number is not None:
            yield _divergence(history, group, number, _calls(history, group, number))
        elif any(not history.has(rank) for rank in group.members):
            yield from _aborted(history, group)
        else:
            yield from _hidden(history, group)


def _first_difference(tracks: Iterable[Track]) -> int | None:
    """Return the lowest number at which two tracks differ."""
    listed = [track for track in tracks if len(track.numbers)]
    low, high = min(int(t.numbers[0]) for t in listed), max(t.last for t in listed)
    if high - low > 2**24:
        return None
    seen = np.full(high - low + 1, -1, dtype=np.int32)
    differs = np.zeros(high - low + 1, dtype=bool)
    for track in listed:
        place = track.numbers - low
        known = seen[place]
        differs[place] |= (known >= 0) & (known != track.signatures)
        seen[place] = track.signatures
    first = np.flatnonzero(differs)
    return int(first[0]) + low if len(first) else None


def _calls(history: History, group: KnownGroup, number: int) -> dict[int, Signature]:
    found = {rank: history.signature(group, rank, number) for rank in history.tracks[group]}
    return {rank: call for rank, call in found.items() if call is not None}


def _aborted(history: History, group: KnownGroup) -> Iterator[Cause]:
    """Yield a last call that no other group of the kind made, if all made the same calls before and a member is gone.

    Gloo ends the process of a member that gets more bytes than it expects; the one that sent them is left.
    """
    tracks = history.tracks[group]
    number = max((track.last for track in tracks.values()), default=0)
    calls = _calls(history, group, number)
    others = [
        made
        for other in _with_same_calls(history, group, number)
        if (made := set(_calls(history, other, number).values()))
    ]
    usual = {call for made in others for call in made}
    if len(others) > 1 and len(usual) == 1 and number > 1 and calls and not usual & set(calls.values()):
        expected = usual.pop()
        what = difference([expected, *calls.values()])
        shown = ", ".join(f"{in_words([rank])} made {call}" for rank, call in calls.items())
        evidence = f"{what} at call {number} of {group}: {shown}, the other groups of {group.kind} {expected}"
        sites = {rank: site for rank in calls if (site := history.site(group, rank, number))}
        yield Cause("different", tuple(calls), group, number, expected.operation, evidence, sites)


def _hidden(history: History, group: KnownGroup) -> Iterator[Cause]:
    """Yield roots and reductions that differ: stacks of waiting ranks contain them, the flight recorder does not."""
    calls: dict[int, dict[int, Signature]] = {}
    for rank, track in history.tracks[group].items():
        about = history.recordings[rank].in_call
        if about is None or about.group != group.name or not track.pending[-1]:
            continue
        operation = history.signatures[track.signatures[-1]].operation
        if operation == about.operation and (about.root is not None or about.reduction):
            facts = {"root": about.root, "reduction": about.reduction}
            shown = f"root {about.root}" if about.root is not None else about.reduction
            calls.setdefault(track.last, {})[rank] = Signature.of(operation, shown, **facts)
    for number, made in sorted(calls.items()):
        if difference(list(made.values())) is not None:
            yield _divergence(history, group, number, made)


def _divergence(history: History, group: KnownGroup, number: int, calls: dict[int, Signature]) -> Cause:
    odd = _odd(history, group, number, calls)
    usual = sorted(set(calls) - set(odd))
    what = difference([calls[rank] for rank in sorted(calls)])
    ordered = _in_another_order(history, group, number, odd, usual, calls)
    groups: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(str(call), []).append(rank)
    made = ", ".join(f"{in_words(ranks)} made {text}" for text, ranks in sorted(groups.items(), key=lambda g: g[1]))
    more = f"; {ordered}" if ordered else ""
    return Cause(
        "order" if ordered else "different",
        tuple(odd),
        group,
        number,
        calls[(usual or odd)[0]].operation,
        f"{what} at call {number} of {group}: {made}{more}",
        {rank: site for rank in sorted(calls)[:_OF_A_KIND] if (site := history.site(group, rank, number))},
    )


def _odd(history: History, group: KnownGroup, number: int, calls: dict[int, Signature]) -> list[int]:
    """Return the ranks with the unusual call; among equals, those that differ from other groups of the kind."""
    odd = odd_ones(calls)
    if len(odd) < len(calls):
        return odd
    others: Counter[Signature] = Counter()
    for other in _with_same_calls(history, group, number):
        others.update(set(_calls(history, other, number).values()))
    usual = {call for call, count in others.items() if count == max(others.values())}
    kept = [rank for rank, call in calls.items() if call not in usual]
    return kept if 0 < len(kept) < len(calls) else odd


def _same_family(history: History, group: KnownGroup) -> list[KnownGroup]:
    return [other for other in history.families[group.family][: _OF_A_KIND + 1] if other is not group][:_OF_A_KIND]


def _with_same_calls(history: History, group: KnownGroup, number: int) -> list[KnownGroup]:
    """Return the groups of a kind that made the same calls before this one; those of another stage need not."""

    def before(one: KnownGroup) -> list[set[Signature]]:
        return [set(_calls(history, one, earlier).values()) for earlier in range(max(1, number - _AHEAD), number)]

    return [other for other in _same_family(history, group) if before(other) == before(group)]


def _in_another_order(
    history: History,
    group: KnownGroup,
    number: int,
    odd: list[int],
    usual: list[int],
    calls: dict[int, Signature],
) -> str:
    """Describe how the odd ranks made what the others make later, or the reverse; "" if one of them did not.

    Where no call is the usual one, one rank that makes later what another made now is enough.
    """
    peers = [(group, rank) for rank in usual[:4]]
    if usual:
        family = _same_family(history, group)[:4]
        peers += [(other, rank) for other in family for rank in list(history.tracks[other])[:2]]
    expected = {calls[rank] for rank in usual or odd}
    later = {}
    for rank in odd:
        made = (_found(history, [(group, rank)], number, call) for call in expected if call != calls[rank])
        if position := _found(history, peers, number, calls[rank]) or next(filter(None, made), None):
            later[rank] = position
    if usual and len(later) == len(odd):
        return (
            f"{in_words(odd)} took another order: the call of one at {number} is that of the other at {later[odd[0]]}"
        )
    if later and not usual:
        rank = min(later)
        return f"the order differs: {in_words([rank])} made at call {later[rank]} what another made at {number}"
    return ""


def _found(history: History, ranks: list[tuple[KnownGroup, int]], number: int, call: Signature) -> int | None:
    """Return the next number at which one of these ranks made this call."""
    for later in range(number + 1, number + 1 + _AHEAD):
        if any(history.signature(group, rank, later) == call for group, rank in ranks):
            return later
    return None


# -- the order of a rank's calls -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Order:
    """The order of a rank's calls of two kinds: how many of the second it had made ``before`` each of the first.

    ``first`` is the number of the first call in ``before``, ``total`` how many of the second kind count.
    """

    first: int
    before: Ints
    total: int

    def at(self, number: int) -> int:
        """Return how many calls of the second kind came before this one of the first."""
        return int(self.before[number - self.first])

    def parting(self, other: _Order) -> int:
        """Return the first call of the first kind that another rank made at another place; ``_NEVER`` for none."""
        low = max(self.first, other.first)
        end = min(self.first + len(self.before), other.first + len(other.before))
        if end <= low:
            return _NEVER
        theirs = np.minimum(other.before[low - other.first : end - other.first], self.total)
        differs = np.flatnonzero(self.before[low - self.first : end - self.first] != theirs)
        return low + int(differs[0]) if len(differs) else _NEVER


def went_past(history: History, call: PendingCall, rank: int, there: tuple[KnownGroup, int] | None = None) -> bool:
    """Return whether a rank, which is missing in a call, has left the order of its peers in the kinds of two calls.

    They are the kinds of the missed call and of ``there``, where the rank is: without it, its last call.

    ```
    rank     dp tp dp tp tp           made tp where the peer made dp: one of them has left the order
    peer     dp tp dp tp dp           waits in dp
    others   dp tp dp tp dp tp        came along with both, and made what the peer made before what the rank made
    ```

    The others decide that came along with both up to there. Ranks of other stages make other calls and part earlier.
    """
    recording = history.recordings[rank]
    if there is None and len(recording):
        there = history.group_of[rank, int(recording.group[-1])], int(recording.number[-1])
    if there is None or not call.numbered or call.group.family == there[0].family:
        return False
    groups = call.group, there[0]
    made = _order(history, rank, *groups)
    if made is None:
        return False
    # The missed call comes after the one where the rank is.
    ours = replace(made, before=np.append(made.before, there[1]), total=there[1])
    peers = {peer: found for peer in call.waiting[:_PEERS] if (found := _order(history, peer, *groups)) is not None}
    place, peer = max(((ours.parting(theirs), peer) for peer, theirs in peers.items()), default=(_NEVER, rank))
    if place == _NEVER or peers[peer].at(place) > ours.at(place):
        return False
    where = peers[peer].at(place)
    is_known = _has_made_before(history, rank, there[0], where + 1)
    votes = 0
    for other in islice(history.recordings, _ASKED):
        theirs = _order(history, other, *groups) if other not in (rank, peer) else None
        if theirs is None:
            continue
        parting = ours.parting(theirs)
        if parting == place and theirs.at(place) == where:
            came_along = all(
                _is_same(history, group, number - back, peer, other)
                for group, number in zip(groups, (place, where), strict=True)
                for back in range(_AHEAD)
            )
            votes += came_along and (is_known or where < theirs.total)
        elif parting > place and theirs.total >= ours.at(place):
            votes -= 1
    return votes > 0


def _is_same(history: History, group: KnownGroup, number: int, rank: int, other: int) -> bool:
    """Return whether two ranks may have made the same call of the program: by its line, else by what it sends."""
    (call, line), (another, there) = (
        (history.signature(local, one, number), history.site(local, one, number))
        for one in (rank, other)
        for local in [group if one in history.tracks[group] else history.member_of[group.family, one]]
    )
    if call is None or another is None:
        return True
    if not line or not there:
        return call == another
    return (call.operation, line) == (another.operation, there)


def _has_made_before(history: History, rank: int, group: KnownGroup, number: int) -> bool:
    """Return whether a rank made a call like this one, at the same line, before it."""
    row = history.row(group, rank, number)
    if row is None:
        return False
    recording = history.recordings[rank]
    columns = (recording.group, recording.signature, recording.site)
    return any(all(column[earlier] == column[row] for column in columns) for earlier in range(row))


def _order(history: History, rank: int, *of: KnownGroup) -> _Order | None:
    """Return the order of a rank's calls of the kinds of two groups, of these groups where it has calls of them.

    None if it has no group of one kind, or has lost all calls of one.
    """
    groups = [group if rank in history.tracks[group] else history.member_of.get((group.family, rank)) for group in of]
    tracks = [None if group is None else history.tracks[group].get(rank) for group in groups]
    if None in groups or (None in tracks and history.recordings[rank].dropped):
        return None
    (first, rows), (begin, others) = (
        (1, np.empty(0, dtype=np.int64)) if track is None else (int(track.numbers[0]), track.rows) for track in tracks
    )
    return _Order(first, np.searchsorted(others, rows) + begin - 1, begin - 1 + len(others))


def departure(history: History, rank: int, peers: Sequence[int]) -> tuple[KnownGroup, int, str] | None:
    """Return where a rank first made another call than the peer that it followed longest: that call, and words.

    Calls are the same by group, operation and line, where both have one: sizes may be a rank's own. None if the rank
    made no other call, or a ring buffer has lost calls.
    """
    if not _is_whole(history, rank):
        return None
    calls = _made(history, rank)
    whole = (peer for peer in peers if peer != rank and _is_whole(history, peer))
    followed = [
        (_in_common(calls, made), peer, len(made)) for peer in islice(whole, _PEERS) if (made := _made(history, peer))
    ]
    row, peer, length = max(followed, key=itemgetter(0), default=(0, rank, 0))
    if not 0 < row < min(len(calls), length):
        return None
    group, number, theirs = _call_at(history, peer, row)
    ours = _call_at(history, rank, row)[2]
    return group, number, f"rank {rank} first left the order of rank {peer} where that made {theirs}: it made {ours}"


def _is_whole(history: History, rank: int) -> bool:
    return history.has(rank) and not history.recordings[rank].dropped


_Made = list[tuple[tuple[Hashable, str], str]]


def _in_common(calls: _Made, others: _Made) -> int:
    """Return how many of the first calls are the same."""
    for row, ((call, site), (other, there)) in enumerate(zip(calls, others, strict=False)):
        if call != other or (site != there and site and there):
            return row
    return min(len(calls), len(others))


def _made(history: History, rank: int) -> _Made:
    """Return the kind, the operation and the line of each collective of a rank, oldest first."""
    recording = history.recordings[rank]
    operations = [signature.operation for signature in recording.signatures]
    sites = [*recording.sites, ""]  # the last is that of -1, a call without frames
    columns = (column.tolist() for column in (recording.group, recording.signature, recording.site))
    return [
        ((history.group_of[rank, group].family, operations[signature]), sites[site])
        for group, signature, site in zip(*columns, strict=True)
    ]


def _call_at(history: History, rank: int, row: int) -> tuple[KnownGroup, int, str]:
    """Return the group, the number and the words of a call of a rank."""
    recording = history.recordings[rank]
    group, number = history.group_of[rank, int(recording.group[row])], int(recording.number[row])
    site = history.site(group, rank, number)
    name = f"{history.operation(group, rank, number)}, call {number} of {group}"
    return group, number, f"{name} at {site}" if site else name
