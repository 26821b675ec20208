"""The parting of orders: the first call that a rank made at another line, or in another group, than the others.

```
call        3       4       5
rank 0      step    save    close           made 1 call more: its call 5 is at the line of the others' call 4
others      step    close
```

Equal calls at different lines are no mistake by themselves: a root broadcasts at another line than those that receive.
The orders part only where, some calls further on, both sides are at the same lines again.

Threads of a rank have orders of their own: calls are compared in the groups that one thread uses (``History.orders``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import numpy as np

from rankmesh.core.grouped import grouped
from rankmesh.debug.doctor.calls import Signature
from rankmesh.debug.doctor.columns import Ints
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall
from rankmesh.errors import in_words

__all__ = ["Parting", "calls_at", "departure", "earlier_place", "parted", "went_past", "who_made", "with_same_calls"]

# How many groups of a kind and how many recordings are asked, and with how many peers a rank is compared.
_OF_A_KIND, _ASKED, _PEERS = 64, 256, 16
# How many calls before one have to be equal for those of the other groups of its kind to count, and at most for an
# earlier place to be like it.
_BEFORE, _CONTEXT = 8, 32
# How many calls a rank may have made more or less than others, and how many calls at different lines are looked at.
_SHIFT, _DIFFERENT = 64, 64
# How many different calls a sentence lists.
_SHOWN = 8


@dataclass(frozen=True)
class Parting:
    """A call that these ranks made at other lines than the others; ``more``: their extra calls, negative if fewer."""

    group: KnownGroup
    number: int
    ranks: tuple[int, ...]
    more: Mapping[int, int]


def parted(history: History, group: KnownGroup, different: int | None) -> Parting | None:
    """Return the first call at which some members made calls more, or less, than the others; None if lines show none.

    ``different`` is the first number at which the calls themselves are not equal, None for none.
    """
    tracks = {rank: track for rank, track in history.tracks[group].items() if len(track.numbers)}
    waits = any(track.pending[-1] for track in tracks.values())
    is_even = len({track.last for track in tracks.values()}) == 1
    if len(tracks) < 2 or (different is None and is_even and not waits):
        return None
    begin = max(int(track.numbers[0]) for track in tracks.values())
    lines = {rank: _lines(history, group, rank, begin) for rank, track in tracks.items()}
    common = min(map(len, lines.values()))
    table = np.array([line[:common] for line in lines.values()])
    columns = np.flatnonzero((table != table[0]).any(axis=0) & (table > 0).all(axis=0)).tolist()
    for place in columns[:_DIFFERENT]:
        parts = grouped((int(line[place]), rank) for rank, line in lines.items())
        usual = _usual(history, group, begin + place, parts)
        peers = [rank for line, ranks in parts.items() for rank in ranks if line == usual] or list(lines)
        peer = max(peers, key=lambda rank: len(lines[rank]))
        more: dict[int, int] = {}
        for ranks in parts.values():
            if peer not in ranks:
                one = max(ranks, key=lambda rank: len(lines[rank]))
                if shift := _shift(lines[one], lines[peer], place):
                    ahead = (len(lines[one]) - len(lines[peer])) * shift
                    longer, shorter = (one, peer) if shift > 0 else (peer, one)
                    # Ranks that made the same number of calls wait in other groups for each other.
                    is_foreign = waits and lines[longer][place] not in lines[shorter]
                    if different is not None or ahead > 0 or (ahead == 0 and is_foreign):
                        more |= dict.fromkeys(ranks, shift)
        if more:
            return Parting(group, begin + place, tuple(sorted(more if usual else lines)), more)
    return None


def _lines(history: History, group: KnownGroup, rank: int, begin: int) -> Ints:
    """Return the line of each call of a rank from a number on, 0 where it is unknown."""
    track = history.tracks[group][rank]
    made = _made(history, rank, group)
    lines = made.line[np.searchsorted(made.rows, np.sort(track.rows))][np.argsort(np.argsort(track.rows))]
    if track.pending[-1] and not lines[-1] and (site := history.site(group, rank, track.last)):
        lines[-1] = _line(history, site, history.operation(group, rank, track.last))
    return lines[track.numbers >= begin]


def _usual(history: History, group: KnownGroup, number: int, parts: Mapping[int, Sequence[int]]) -> int | None:
    """Return the line at which the majority of a group, or of the groups of its kind, made a call; None without one."""
    votes = Counter({line: len(ranks) for line, ranks in parts.items()})
    if 2 * max(votes.values()) <= votes.total():
        for other in with_same_calls(history, group, number):
            for rank in history.tracks[other]:
                if site := history.site(other, rank, number):
                    votes[_line(history, site, history.operation(other, rank, number))] += 1
    line, count = votes.most_common(1)[0]
    return line if 2 * count > votes.total() and line in parts else None


def _shift(ours: Ints, theirs: Ints, place: int) -> int:
    """Return the number of calls that a rank made more at a place, by the lines that follow; 0 if they fit no number.

    >>> step, save, close = 1, 2, 3
    >>> _shift(np.array([step, save, close]), np.array([step, close]), 1)
    1
    """
    foreign = set(ours.tolist()) ^ set(theirs.tolist())

    def follows(one: Ints, other: Ints) -> bool:
        pairs = list(zip(one.tolist(), other.tolist(), strict=False))
        # Of a call that each side makes at a line of its own nothing can be told.
        equal = all(a == b or not (a and b) or {a, b} <= foreign for a, b in pairs)
        return equal and any(a == b != 0 for a, b in pairs)

    for count in range(1, _SHIFT + 1):
        more, less = follows(ours[place + count :], theirs[place:]), follows(ours[place:], theirs[place + count :])
        if more or less:
            return 0 if more and less else count if more else -count
    return 0


def earlier_place(made: Sequence[Hashable]) -> int | None:
    """Return the place of the call that followed on the longest stretch like the last calls; None without one.

    >>> earlier_place(["a", "b", "c", "a", "b"])
    2
    """
    best, longest = None, 0
    for place in range(len(made) - 1, 0, -1):
        count = 0
        while count < min(_CONTEXT, place) and made[place - 1 - count] == made[-1 - count]:
            count += 1
        if count > longest:
            best, longest = place, count
    return best


def who_made(history: History, group: KnownGroup, number: int, calls: Mapping[int, object]) -> str:
    """Describe which ranks made which call, at which line: ``rank 0 made barrier at a.py:9 in save, rank 1 ...``."""
    parts = grouped(((str(call), history.site(group, rank, number)), rank) for rank, call in sorted(calls.items()))
    shown = sorted(parts.items(), key=itemgetter(1))
    made = [f"{in_words(ranks)} made {call}{f' at {site}' if site else ''}" for (call, site), ranks in shown[:_SHOWN]]
    return ", ".join(made) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def calls_at(history: History, group: KnownGroup, number: int) -> dict[int, Signature]:
    """Return the call of each member at a number, where its recording has it."""
    found = {rank: history.signature(group, rank, number) for rank in history.tracks[group]}
    return {rank: call for rank, call in found.items() if call is not None}


def with_same_calls(history: History, group: KnownGroup, number: int) -> list[KnownGroup]:
    """Return the groups of a kind that made equal calls before this one; groups of another stage need not."""

    def before(one: KnownGroup) -> list[set[Signature]]:
        return [set(calls_at(history, one, earlier).values()) for earlier in range(max(1, number - _BEFORE), number)]

    if any(history.recordings[rank].source for rank in history.tracks[group]):
        return []  # of lines nobody knows the calls before
    others = [other for other in history.families[group.family][:_OF_A_KIND] if other is not group]
    return [other for other in others if before(other) == before(group)]


# -- the order of a rank's calls -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Calls:
    """Collectives of a rank, oldest first, as numbers that are the same on all ranks.

    ``rows`` are their places in its recording, ``key`` the kind and the number of each, ``line`` its operation and
    line, 0 without one, ``facts`` its signature. ``is_cut``: the ring buffer has lost older calls.
    """

    rows: Ints
    key: Ints
    line: Ints
    facts: Ints
    is_cut: bool

    def part(self, begin: int, end: int | None) -> _Calls:
        """Return a stretch of these calls."""
        rows, key, line, facts = (each[begin:end] for each in (self.rows, self.key, self.line, self.facts))
        return _Calls(rows, key, line, facts, self.is_cut)


def _number(history: History, value: Hashable) -> int:
    return history.numbers.setdefault(value, len(history.numbers) + 1)


def _line(history: History, site: str, operation: str) -> int:
    """Return the number of an operation at a line."""
    return _number(history, site) << 32 | _number(history, operation)


def _made(history: History, rank: int, group: KnownGroup) -> _Calls:
    """Return the collectives of a rank that are in one order with the calls of a group."""
    recording = history.recordings[rank]

    def table(values: Iterable[Hashable]) -> Ints:
        return np.array([_number(history, value) for value in values], dtype=np.int64)

    families = [history.group_of[rank, index].family for index in range(len(recording.groups))]
    rows = history.rows(rank).get(history.orders[group.family], np.arange(0))
    kinds = table(families)
    operations = table(signature.operation for signature in recording.signatures)
    sites = np.append(table(recording.sites), 0)  # the last is that of -1, a call without a line
    site = sites[recording.site]
    line = np.where(site > 0, site << 32 | operations[recording.signature], 0)
    facts = table(recording.signatures)[recording.signature]
    key = kinds[recording.group] << 32 | recording.number
    return _Calls(rows, key[rows], line[rows], facts[rows], recording.dropped)


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
    if there is not None and history.orders[there.group.family] != history.orders[call.group.family]:
        return False  # another thread waits there
    # What two members exchange has no place among the collectives.
    row = None if there is None or not there.numbered else history.row(there.group, rank, there.number)
    ours = _made(history, rank, call.group)
    ours = ours.part(0, None if row is None else int(np.searchsorted(ours.rows, row)) + 1)
    peers = [_made(history, peer, call.group) for peer in call.waiting[:_PEERS]]
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
        made = _made(history, other, call.group)
        (with_rank, _), (with_peer, _) = _parting(ours, made), _parting(peers[number], made)
        if with_rank == place and with_peer > at:
            votes += is_known or bool((made.key == key).any())
        elif with_rank > place and with_peer == at:
            votes -= 1
    return votes > 0


def _key(calls: _Calls, place: int) -> int | None:
    """Return the kind and the number of a call; None behind the last."""
    return int(calls.key[place]) if place < len(calls.key) else None


def departure(history: History, rank: int, group: KnownGroup) -> tuple[KnownGroup, int, str] | None:
    """Return the first call in which a rank differs from the member that it agrees with longest, and a description.

    None if the rank made no other call.
    """
    if not history.has(rank):
        return None
    others = islice((peer for peer in group.members if peer != rank and history.has(peer)), _PEERS)
    made = {one: _made(history, one, group) for one in (*others, rank)}
    place, at, peer = max(
        ((*_parting(made[rank], made[peer]), peer) for peer in made if peer != rank), default=(0, 0, rank)
    )
    if not place or None in (_key(made[rank], place), _key(made[peer], at)):
        return None
    where, number, theirs = _call_at(history, peer, int(made[peer].rows[at]))
    there, count, ours = _call_at(history, rank, int(made[rank].rows[place]))
    other = "" if (there, count) == (where, number) else f", call {count} of {there},"
    ours = ours.replace(" at ", f"{other} at ", 1) if " at " in ours else f"{ours}{other.rstrip(',')}"
    return where, number, f"the orders part at call {number} of {where}: rank {peer} made {theirs}, rank {rank} {ours}"


def _call_at(history: History, rank: int, row: int) -> tuple[KnownGroup, int, str]:
    """Return the group, the number, and the operation and line of a call of a rank."""
    recording = history.recordings[rank]
    group, number = history.group_of[rank, int(recording.group[row])], int(recording.number[row])
    site, operation = history.site(group, rank, number), history.operation(group, rank, number)
    return group, number, f"{operation} at {site}" if site else operation
