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
from itertools import islice
from operator import itemgetter

import numpy as np

from rankmesh.debug.doctor.calls import Signature, difference, odd_ones
from rankmesh.debug.doctor.causes import Cause
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall, Track
from rankmesh.errors import in_words

__all__ = ["departure", "divergences", "votes"]

# How many calls later another rank's call is looked for, how many groups of a kind and how many recordings are asked,
# and with how many peers a rank is compared.
_AHEAD, _OF_A_KIND, _ASKED, _PEERS = 8, 64, 256, 16


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
    others = [made for other in _same_family(history, group) if (made := set(_calls(history, other, number).values()))]
    usual = {call for made in others for call in made}
    if len(others) < 2 or len(usual) != 1 or not calls or usual & set(calls.values()):
        return
    known = [(other, rank) for other in _same_family(history, group) for rank in list(history.tracks[other])[:1]]
    for earlier in range(max(1, number - _AHEAD), number):
        if {history.signature(*one, earlier) for one in known} != set(_calls(history, group, earlier).values()):
            return
    if number > 1:
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
    for other in _same_family(history, group):
        others.update(set(_calls(history, other, number).values()))
    usual = {call for call, count in others.items() if count == max(others.values())}
    kept = [rank for rank, call in calls.items() if call not in usual]
    return kept if 0 < len(kept) < len(calls) else odd


def _same_family(history: History, group: KnownGroup) -> list[KnownGroup]:
    return [other for other in history.families[group.family][: _OF_A_KIND + 1] if other is not group][:_OF_A_KIND]


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


def votes(history: History, call: PendingCall, family: Hashable, number: int, rank: int) -> int:
    """Return how many more ranks made the call's call before that call of a kind than after it or not at all."""
    votes = 0
    for other, recording in list(history.recordings.items())[:_ASKED]:
        if other == rank or not len(recording):
            continue
        there = _row(history, other, family, number)
        here = _row(history, other, call.group.family, call.number)
        if there is not None and here is not None:
            votes += 1 if here < there else -1
        elif there is not None and not recording.dropped:
            votes -= 1
    return votes


def _row(history: History, rank: int, family: Hashable, number: int) -> int | None:
    """Return the place of a call of a kind in a rank's recording."""
    for index in range(len(history.recordings[rank].groups)):
        group = history.group_of[rank, index]
        row = history.row(group, rank, number) if group.family == family else None
        if row is not None:
            return row
    return None


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
