"""Divergence: members of a group that made different calls at one turn, at the first turn where they did.

```
call        1           2            3
rank 0      all_reduce  all_reduce   broadcast       order: rank 3 made at call 2 what the others make at call 3
rank 3      all_reduce  broadcast                    different: nobody else makes that call near by
```

Who is odd is decided by the most, among two by what the other groups of the kind did at this call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from rankmesh.debug.doctor.calls import Signature, difference, odd_ones
from rankmesh.debug.doctor.causes import Cause
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, Track
from rankmesh.errors import in_words

__all__ = ["divergences"]

# How many calls later another rank's call is looked for, and how many of a kind's groups are asked.
_AHEAD, _ASKED = 8, 64


def divergences(history: History) -> Iterator[Cause]:
    """The first divergence of each group that has one."""
    for group, tracks in history.tracks.items():
        number = _first_difference(tracks.values()) if len(tracks) > 1 else None
        if number is not None:
            yield _cause(history, group, number, _calls(history, group, number))
        else:
            yield from _hidden(history, group)


def _first_difference(tracks: Iterable[Track]) -> int | None:
    """The lowest number at which two tracks differ."""
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


def _hidden(history: History, group: KnownGroup) -> Iterator[Cause]:
    """What the flight recorder does not keep and the stacks of waiting ranks tell: root and reduction."""
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
            yield _cause(history, group, number, made)


def _cause(history: History, group: KnownGroup, number: int, calls: dict[int, Signature]) -> Cause:
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
        {rank: site for rank in sorted(calls)[:_ASKED] if (site := history.site(group, rank, number))},
    )


def _odd(history: History, group: KnownGroup, number: int, calls: dict[int, Signature]) -> list[int]:
    """The ranks that made the unusual call; among equals, those that did not do as the other groups of the kind."""
    odd = odd_ones(calls)
    if len(odd) < len(calls):
        return odd
    others: Counter[Signature] = Counter()
    for other in _siblings(history, group):
        others.update(set(_calls(history, other, number).values()))
    usual = {call for call, count in others.items() if count == max(others.values())}
    kept = [rank for rank, call in calls.items() if call not in usual]
    return kept if 0 < len(kept) < len(calls) else odd


def _siblings(history: History, group: KnownGroup) -> list[KnownGroup]:
    return [other for other in history.tracks if other.kind == group.kind and other is not group][:_ASKED]


def _in_another_order(
    history: History,
    group: KnownGroup,
    number: int,
    odd: list[int],
    usual: list[int],
    calls: dict[int, Signature],
) -> str:
    """Whether each odd rank made what the others make a little later, or makes later what they made; in words."""
    if not usual:
        return _swapped(history, group, number, odd, calls)
    peers = [(group, rank) for rank in usual[:4]]
    peers += [(other, rank) for other in _siblings(history, group)[:4] for rank in list(history.tracks[other])[:2]]
    words = []
    for rank in odd:
        later = _found(history, peers, number, calls[rank]) or _found(history, [(group, rank)], number, calls[usual[0]])
        if not later:
            return ""
        words.append(later)
    return f"{in_words(odd)} took another order: the call of one at {number} is that of the other at {words[0]}"


def _swapped(history: History, group: KnownGroup, number: int, odd: list[int], calls: dict[int, Signature]) -> str:
    """The same where nobody is the usual one: each made later what another made now."""
    for rank in odd:
        others = [calls[other] for other in odd if calls[other] != calls[rank]]
        later = next(filter(None, (_found(history, [(group, rank)], number, call) for call in others)), None)
        if later:
            return f"the order differs: {in_words([rank])} made at call {later} what another made at {number}"
    return ""


def _found(history: History, ranks: list[tuple[KnownGroup, int]], number: int, call: Signature) -> int | None:
    """The next number at which one of these ranks made this call."""
    for later in range(number + 1, number + 1 + _AHEAD):
        if any(history.signature(group, rank, later) == call for group, rank in ranks):
            return later
    return None
