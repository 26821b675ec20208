"""Order: members of a group that made different calls under one number.

```
call        1           2            3
rank 0      all_reduce  all_reduce   broadcast       order: rank 3 made at call 2 what the others make at call 3
rank 3      all_reduce  broadcast                    different: nobody else makes that call near by
```

The minority diverged. In a group of two, compare with what the other groups of this kind did. A rank that makes one of
many equal calls more, or less, diverges later: lines of code show where the orders part (``parting``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rankmesh.core.grouped import grouped
from rankmesh.debug.doctor.calls import Signature, difference, odd_ones
from rankmesh.debug.doctor.causes import Cause
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, Track
from rankmesh.debug.doctor.parting import Parting, calls_at, earlier_place, parted, who_made, with_same_calls
from rankmesh.errors import in_words

__all__ = ["divergences"]

# How many calls later another rank's call is looked for, how many ranks have their lines in a cause, and how many calls
# a rank may have left out.
_AHEAD, _OF_A_KIND, _LEFT_OUT = 8, 64, 64
# How many ranks of a group a sentence lists.
_SHOWN = 8


def divergences(history: History) -> Iterator[Cause]:
    """Yield the first divergence of each group that has one."""
    yield from _misnamed(history)
    for group, tracks in history.tracks.items():
        number = _first_difference(tracks.values()) if len(tracks) > 1 else None
        diverged = None if number is None else _divergence(history, group, number, calls_at(history, group, number))
        there = parted(history, group, number)
        # Calls in another order are at other lines, too.
        if diverged is not None and (there is None or (diverged.cause, diverged.call) == ("order", there.number)):
            yield diverged
        elif there is not None:
            yield _at_lines(history, there, diverged)
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


def _aborted(history: History, group: KnownGroup) -> Iterator[Cause]:
    """Yield a last call that no other group of the kind made, if all made the same calls before and a member is gone.

    Gloo ends the process of a member that gets more bytes than it expects; the one that sent them is left.
    """
    tracks = history.tracks[group]
    number = max((track.last for track in tracks.values()), default=0)
    calls = calls_at(history, group, number)
    others = [
        made
        for other in with_same_calls(history, group, number)
        if (made := set(calls_at(history, other, number).values()))
    ]
    usual = {call for made in others for call in made}
    if len(others) > 1 and len(usual) == 1 and number > 1 and calls and not usual & set(calls.values()):
        expected = usual.pop()
        what = difference([expected, *calls.values()])
        made_by = who_made(history, group, number, calls)
        evidence = f"{what} at call {number} of {group}: {made_by}, the other groups of {group.kind} {expected}"
        sites = _sites(history, group, number, calls)
        yield Cause("different", tuple(calls), group, number, expected.operation, evidence, sites)


def _misnamed(history: History) -> Iterator[Cause]:
    """Yield groups that their members know under different names: torch counts earlier groups in the name of a new one.

    ```
    rank 0   new_group([0, 3])  new_group([0, 1]) -> its second group      each waits for the other under a name
    rank 1                      new_group([0, 1]) -> its first group       that the other does not know
    ```
    """
    found = set[frozenset[int]]()
    for group in _in_use(history):
        members = frozenset(group.members)
        if members in found or members <= history.known_as[group].keys():
            continue
        found.add(members)
        named = [
            other for other in history.tracks if len(other.members) == len(members) == len(members & {*other.members})
        ]
        known = {rank: {other for other in named if rank in history.known_as[other]} for rank in members}
        common = set.intersection(*known.values())
        unshared = {rank: groups - common for rank, groups in known.items()}
        if all(unshared.values()):
            ranks = sorted(members)
            calls = {rank: about for rank in ranks[:_SHOWN] if (about := history.recordings[rank].in_call) is not None}
            had = [f"{call.earlier} on rank {rank}" for rank, call in calls.items() if call.earlier is not None]
            operation = next((call.operation for call in calls.values() if call.operation), "new_group")
            group = min(unshared[ranks[0]], key=str)
            evidence = (
                f"{in_words(ranks)} wait for each other in {operation}: their {group} has different names, "
                f"since torch's name counts the groups that a rank had before" + (f": {', '.join(had)}" if had else "")
            )
            sites = {rank: call.site for rank, call in calls.items() if call.site}
            yield Cause("order", tuple(ranks), group, 1, operation, evidence, sites)


def _in_use(history: History) -> Iterator[KnownGroup]:
    """Yield each group that a rank is in a call of, once; others may never be used."""
    calls = ((rank, recording.in_call) for rank, recording in history.recordings.items())
    groups = (history.named(call.group, rank) for rank, call in calls if call is not None)
    return iter(dict.fromkeys(group for group in groups if group is not None))


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
    more = f"; {ordered}" if ordered else _left_out(history, group, number, odd, usual)
    return Cause(
        "order" if ordered else "different",
        tuple(odd),
        group,
        number,
        calls[(usual or odd)[0]].operation,
        f"{what} at call {number} of {group}: {who_made(history, group, number, calls)}{more}",
        _sites(history, group, number, calls),
    )


def _at_lines(history: History, there: Parting, diverged: Cause | None) -> Cause:
    """Return the cause for equal calls at different lines; ``diverged`` is the cause of a later difference."""
    group, number = there.group, there.number
    calls = calls_at(history, group, number)
    made = who_made(history, group, number, {rank: call.operation for rank, call in calls.items()})
    counts = grouped((count, rank) for rank, count in there.more.items())
    counted = ", ".join(
        f"{in_words(ranks)} made {_number(abs(count))} {'more' if count > 0 else 'less'}"
        for count, ranks in counts.items()
    )
    later = f"; {diverged.evidence}" if diverged is not None else ""
    is_skipped = diverged is None and all(count < 0 for count in there.more.values())
    return Cause(
        "absent" if is_skipped else "different",
        there.ranks,
        group,
        number,
        calls[min(set(calls) - set(there.ranks) or calls)].operation,
        f"the orders part at call {number} of {group}: {made}; {counted}{later}",
        _sites(history, group, number, calls),
    )


def _number(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"


def _sites(history: History, group: KnownGroup, number: int, ranks: Iterable[int]) -> dict[int, str]:
    """Return the line of each of these ranks at a call."""
    return {rank: site for rank in sorted(ranks)[:_OF_A_KIND] if (site := history.site(group, rank, number))}


def _left_out(history: History, group: KnownGroup, number: int, odd: Sequence[int], usual: Sequence[int]) -> str:
    """Describe how many calls ranks left out, by an earlier repetition of the calls before; "" if unknown."""
    tracks, found = history.tracks[group], dict[int, int]()
    for rank in odd:
        place = tracks[rank].at(number)
        for other in (rank, *usual[:1]):
            track = tracks[other]
            made = track.signatures[track.numbers < number].tolist()
            before = earlier_place(made)
            later = made[before : before + _LEFT_OUT] if before is not None else []
            if place is not None and (call := int(tracks[rank].signatures[place])) in later[1:] and call != later[0]:
                found[rank] = later.index(call)
                break
    if len(found) == 1 or (found and usual):
        parts = grouped((count, rank) for rank, count in found.items())
        left = ", ".join(f"{in_words(ranks)} left out {_number(count)}" for count, ranks in parts.items())
        return f"; by the calls before, {left}"
    return ""


def _odd(history: History, group: KnownGroup, number: int, calls: dict[int, Signature]) -> list[int]:
    """Return the ranks with the unusual call; among equals, those that differ from other groups of the kind."""
    by_lines = any(history.recordings[rank].source for rank in calls)
    odd = odd_ones(calls, len(group.members) if by_lines else 0)
    if len(odd) < len(calls):
        return odd
    others: Counter[Signature] = Counter()
    for other in with_same_calls(history, group, number):
        others.update(set(calls_at(history, other, number).values()))
    usual = {call for call, count in others.items() if count == max(others.values())}
    kept = [rank for rank, call in calls.items() if call not in usual]
    return kept if 0 < len(kept) < len(calls) else odd


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
        family = with_same_calls(history, group, number)[:4]
        peers += [(other, rank) for other in family for rank in list(history.tracks[other])[:2]]
    expected = {calls[rank] for rank in usual or odd}
    later = {}
    for rank in odd:
        made = (_found(history, [(group, rank)], number, call) for call in expected if call != calls[rank])
        if position := _found(history, peers, number, calls[rank]) or next(filter(None, made), None):
            later[rank] = position
    if usual and len(later) == len(odd):
        return f"{in_words(odd)} took another order: call {number} of one is call {later[odd[0]]} of the other"
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
