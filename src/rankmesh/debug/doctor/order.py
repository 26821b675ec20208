"""Order: members of a group that made different calls under one number, and where a rank left the order of its peers.

```
call        1           2            3
rank 0      all_reduce  all_reduce   broadcast       order: rank 3 made at call 2 what the others make at call 3
rank 3      all_reduce  broadcast                    different: nobody else makes that call near by
```

The minority diverged. In a group of two, compare with what the other groups of this kind did at this call. A rank that
leaves out one of many equal calls diverges later, or only waits elsewhere: lines of code show its first departure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rankmesh.core.grouped import grouped
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
# How many ranks of a group a sentence lists.
_SHOWN = 8


def divergences(history: History) -> Iterator[Cause]:
    """Yield the first divergence of each group that has one."""
    yield from _misnamed(history)
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
    groups = grouped((str(call), rank) for rank, call in sorted(calls.items()))
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


def _with_same_calls(history: History, group: KnownGroup, number: int) -> list[KnownGroup]:
    """Return the groups of a kind that made equal calls before this one; groups of another stage need not."""

    def before(one: KnownGroup) -> list[set[Signature]]:
        return [set(_calls(history, one, earlier).values()) for earlier in range(max(1, number - _AHEAD), number)]

    others = [other for other in history.families[group.family][:_OF_A_KIND] if other is not group]
    return [other for other in others if before(other) == before(group)]


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
        family = _with_same_calls(history, group, number)[:4]
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


# -- the order of a rank's calls -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Calls:
    """The collectives of a rank, oldest first, as numbers that are the same on all ranks.

    ``key`` is the kind and the number of each, ``line`` its operation and line, 0 without one, ``facts`` its signature.
    ``is_cut``: the ring buffer has lost older calls.
    """

    key: Ints
    line: Ints
    facts: Ints
    is_cut: bool

    def part(self, begin: int, end: int | None) -> _Calls:
        """Return a stretch of these calls."""
        return _Calls(self.key[begin:end], self.line[begin:end], self.facts[begin:end], self.is_cut)


def _made(history: History, rank: int) -> _Calls:
    """Return the collectives of a rank."""
    recording, numbers = history.recordings[rank], history.numbers

    def table(values: Iterable[Hashable]) -> Ints:
        return np.array([numbers.setdefault(value, len(numbers) + 1) for value in values], dtype=np.int64)

    kinds = table(history.group_of[rank, index].family for index in range(len(recording.groups)))
    operations = table(signature.operation for signature in recording.signatures)
    sites = np.append(table(recording.sites), 0)  # the last is that of -1, a call without a line
    site = sites[recording.site]
    return _Calls(
        kinds[recording.group] << 32 | recording.number,
        np.where(site > 0, site << 32 | operations[recording.signature], 0),
        table(recording.signatures)[recording.signature],
        recording.dropped,
    )


def _parting(ours: _Calls, theirs: _Calls) -> tuple[int, int]:
    """Return the places up to which two ranks made the same calls, from the first call that both have.

    Calls are the same by kind, number and line, where a line is missing by what they send.
    """
    place = at = 0
    if len(ours.key) and len(theirs.key) and ours.is_cut | theirs.is_cut:
        places = np.flatnonzero(np.isin(ours.key, theirs.key))
        place = int(places[0]) if len(places) else len(ours.key)
        at = int(np.flatnonzero(theirs.key == ours.key[place])[0]) if len(places) else len(theirs.key)
    count = min(len(ours.key) - place, len(theirs.key) - at)
    here, there = ours.part(place, place + count), theirs.part(at, at + count)
    same = np.where((here.line > 0) & (there.line > 0), here.line == there.line, here.facts == there.facts)
    differs = np.flatnonzero((here.key != there.key) | ~same)
    count = int(differs[0]) if len(differs) else count
    return place + count, at + count


def went_past(history: History, call: PendingCall, rank: int, there: PendingCall | None = None) -> bool:
    """Return whether a rank, which is missing in a call, has left the order of its peers before it, or at it.

    ``there`` is the call in which the rank waits.

    ```
    rank     dp tp dp tp tp           made tp where the peer made dp: one of them has left the order
    peer     dp tp dp tp dp           waits in dp
    others   dp tp dp tp dp tp        came along with both, and made what the peer made before what the rank made
    ```

    The others that came along with both decide. Ranks of other stages make other calls and part earlier. Others that
    went no further than the peer count if the rank has made its call before, which is then no call of its stage alone.
    """
    # What two members exchange has no place among the collectives.
    row = None if there is None or not there.numbered else history.row(there.group, rank, there.number)
    ours = _made(history, rank).part(0, None if row is None else row + 1)
    peers = [_made(history, peer) for peer in call.waiting[:_PEERS]]
    parted = [(*_parting(ours, theirs), number) for number, theirs in enumerate(peers)]
    # Ranks of other stages may part at the same place: they make another call under the same number.
    place, at, _, number = max((place, at, _key(ours, place) != _key(peers[n], at), n) for place, at, n in parted)
    key, peer = _key(ours, place), call.waiting[number]
    if not call.numbered or key in (None, _key(peers[number], at)):
        return False
    like = (ours.line == ours.line[place]) if ours.line[place] else (ours.facts == ours.facts[place])
    is_known = bool((like & (ours.key >> 32 == ours.key[place] >> 32))[:place].any())
    votes = 0
    for other in set(islice(history.recordings, _ASKED)) - {rank, peer}:
        made = _made(history, other)
        (with_rank, _), (with_peer, _) = _parting(ours, made), _parting(peers[number], made)
        if with_rank == place and with_peer > at:
            votes += is_known or bool((made.key == key).any())
        elif with_rank > place and with_peer == at:
            votes -= 1
    return votes > 0


def _key(calls: _Calls, place: int) -> int | None:
    """Return the kind and the number of a call; None behind the last."""
    return int(calls.key[place]) if place < len(calls.key) else None


def departure(history: History, rank: int, peers: Sequence[int]) -> tuple[KnownGroup, int, str] | None:
    """Return where a rank first made another call than the peer that it followed longest: that call, and words.

    None if the rank made no other call.
    """
    if not history.has(rank):
        return None
    others = islice((peer for peer in peers if peer != rank and history.has(peer)), _PEERS)
    made = {one: _made(history, one) for one in (*others, rank)}
    place, at, peer = max(
        ((*_parting(made[rank], made[peer]), peer) for peer in made if peer != rank), default=(0, 0, rank)
    )
    if not place or None in (_key(made[rank], place), _key(made[peer], at)):
        return None
    group, number, theirs = _call_at(history, peer, at)
    ours = _call_at(history, rank, place)[2]
    return group, number, f"rank {rank} first left the order of rank {peer} where that made {theirs}: it made {ours}"


def _call_at(history: History, rank: int, row: int) -> tuple[KnownGroup, int, str]:
    """Return the group, the number and the words of a call of a rank."""
    recording = history.recordings[rank]
    group, number = history.group_of[rank, int(recording.group[row])], int(recording.number[row])
    site = history.site(group, rank, number)
    name = f"{history.operation(group, rank, number)}, call {number} of {group}"
    return group, number, f"{name} at {site}" if site else name
