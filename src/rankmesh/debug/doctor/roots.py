"""Roots: from who waits for whom to the ranks that everyone waits for.

```
rank 0 ─> call 7 of tp@dp0 ─> rank 1 ─> call 3 of dp@tp1 ─> rank 3, which is in no call       late: rank 3
rank 0 ─> call 7 of tp@dp0 ─> rank 1 ─> call 3 of dp@tp1 ─> rank 0                            crosswise, or absent
```

A rank that waits itself is a consequence. In a cycle, ranks of the same kinds of group tell who left the usual order:
where others made the call that is missed before the call in which the missing rank is, that rank is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rankmesh.debug.doctor.causes import Cause
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History
from rankmesh.debug.doctor.waits import Turn, Waits
from rankmesh.errors import in_words

__all__ = ["roots"]

_ASKED, _SHOWN = 64, 8
# They have a root, which torch's flight recorder does not keep.
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def roots(history: History, waits: Waits, diverged: Mapping[KnownGroup, int]) -> Iterator[Cause]:
    """The causes in these waits, but for what a divergence explains: ``diverged`` is its call, by group."""
    yield from _never_came(history, waits)
    for cycle in cycles(waits):
        yield from _crossed(history, waits, cycle)
    yield from _stuck(history, waits, diverged)


# -- ranks that do not wait ----------------------------------------------------------------------------------------


def _never_came(history: History, waits: Waits) -> Iterator[Cause]:
    """Dead, absent and late ranks: each is told at the call in which most wait for it, or first did."""
    worst: dict[int, Turn] = {}
    for turn in waits.turns:
        for rank in turn.missing:
            if not waits.of_rank.get(rank):
                known = worst.get(rank)
                if known is None or _before(turn, known):
                    worst[rank] = turn
    together: dict[tuple[str, Turn], list[int]] = {}
    for rank, turn in sorted(worst.items()):
        together.setdefault((_why(history, rank, turn), turn), []).append(rank)
    for (why, turn), ranks in together.items():
        yield _cause(history, why, ranks, turn, _EVIDENCE[why](history, ranks, turn))


def _before(turn: Turn, known: Turn) -> bool:
    """Whether more ranks wait in a turn than in another one, or for longer."""
    return (-len(turn.waiting), turn.since) < (-len(known.waiting), known.since)


def _why(history: History, rank: int, turn: Turn) -> str:
    if not history.has(rank):
        return "dead"
    return "absent" if history.recordings[rank].ended or _went_past(history, rank, turn) else "late"


def _went_past(history: History, rank: int, turn: Turn) -> bool:
    """Whether others came to this rank's last call by way of the call that it did not make."""
    recording = history.recordings[rank]
    if not len(recording):
        return False
    group = history.group_of[rank, int(recording.group[-1])]
    if group is turn.group:
        return False
    return _votes(history, turn, group.kind, int(recording.number[-1]), rank) > 0


def _no_recording(history: History, ranks: Sequence[int], turn: Turn) -> str:
    states = sorted({history.recordings[rank].state for rank in ranks if rank in history.recordings})
    said = f"{in_words(ranks)} left no recording" + (f" ({', '.join(states)})" if states else "")
    return f"{said}; {_in(turn)}"


def _elsewhere(history: History, ranks: Sequence[int], turn: Turn) -> str:
    return f"{in_words(ranks)} never came to {turn.words}: {_doing(history, ranks[0])}; {_in(turn)}"


def _behind(history: History, ranks: Sequence[int], turn: Turn) -> str:
    most = max((track.last for track in history.tracks[turn.group].values()), default=turn.number)
    by = {most - (history.last(turn.group, rank) or 0) for rank in ranks} if turn.numbered else {1}
    calls = f"{min(by)}" if len(by) == 1 else f"{min(by)} to {max(by)}"
    plural = "call" if by == {1} else "calls"
    return f"{in_words(ranks)} behind by {calls} {plural} of {turn.group}: {_doing(history, ranks[0])}; {_in(turn)}"


_EVIDENCE = {"dead": _no_recording, "absent": _elsewhere, "late": _behind}


def _in(turn: Turn) -> str:
    waits = "waits" if len(turn.waiting) == 1 else "wait"
    return f"{in_words(turn.waiting)} {waits} in {turn.words}"


def _doing(history: History, rank: int) -> str:
    """What a rank that waits in no call is at."""
    recording = history.recordings[rank]
    about = recording.in_call
    if recording.ended:
        return "its program has ended"
    if about is not None and about.operation:
        return f"it is in {about.operation}" + (f", {about.site}" if about.site else "")
    where = f" at {about.site}" if about is not None and about.site else ""
    if not len(recording):
        return f"it is in no call{where} and has made none"
    group = history.group_of[rank, int(recording.group[-1])]
    last = f"{recording.signatures[recording.signature[-1]].operation}, call {recording.number[-1]} of {group}"
    return f"it is in no call{where}; its last was {last}"


# -- cycles --------------------------------------------------------------------------------------------------------


def cycles(waits: Waits) -> list[list[int]]:
    """The sets of ranks that wait for each other: Tarjan's strongly connected components, without recursion."""
    index: dict[object, int] = {}
    low: dict[object, int] = {}
    stack: list[object] = []
    on_stack: set[object] = set()
    found: list[list[int]] = []

    def after(node: object) -> Sequence[object]:
        return node.missing if isinstance(node, Turn) else waits.of_rank.get(node, ())  # type: ignore[call-overload]

    for start in waits.of_rank:
        work: list[tuple[object, Iterator[object]]] = [(start, iter(after(start)))] if start not in index else []
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            step = next(rest, None)
            if step is not None:
                if step not in index:
                    work.append((step, iter(after(step))))
                elif step in on_stack:
                    low[node] = min(low[node], index[step])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                component: list[object] = []
                while not component or (component[-1] is not node and component[-1] != node):
                    component.append(stack.pop())
                    on_stack.discard(component[-1])
                ranks = sorted(part for part in component if isinstance(part, int))
                if len(ranks) > 1:
                    found.append(ranks)
    return found


def _crossed(history: History, waits: Waits, ranks: list[int]) -> Iterator[Cause]:
    """The cause of one cycle: the ranks that left the order of the others, else all of its ranks."""
    inside = set(ranks)
    missed = [(turn, rank) for turn in _turns(waits, ranks) for rank in turn.missing if rank in inside]
    odd: dict[int, Turn] = {}
    for turn, rank in missed:
        if rank not in odd and _left_the_order(history, waits, turn, rank):
            odd[rank] = turn
    if not odd or len(odd) == len(inside):
        odd = _alone(waits, missed, inside)
    if odd:
        for rank, turn in sorted(odd.items()):
            there = waits.of_rank[rank][0]
            evidence = f"{in_words([rank])} never came to {turn.words}: it is in {there.words}; {_in(turn)}"
            yield _cause(history, "absent", [rank], turn, evidence)
    else:
        yield _cycle(history, waits, ranks)


def _turns(waits: Waits, ranks: Sequence[int]) -> list[Turn]:
    return list({id(turn): turn for rank in ranks for turn in waits.of_rank[rank]}.values())


def _left_the_order(history: History, waits: Waits, turn: Turn, rank: int) -> bool:
    """Whether others say that a rank should have come to a turn before the call in which it is."""
    return any(
        _votes(history, turn, there.group.kind, there.number, rank) > 0
        for there in waits.of_rank[rank]
        if there.group is not turn.group and there.numbered and turn.numbered
    )


def _votes(history: History, turn: Turn, kind: str, number: int, rank: int) -> int:
    """How many more ranks made the turn's call before that call of a kind than after it or not at all."""
    votes = 0
    for other, recording in list(history.recordings.items())[: 4 * _ASKED]:
        if other == rank or not len(recording):
            continue
        there = _row(history, other, kind, number)
        here = _row(history, other, turn.group.kind, turn.number)
        if there is not None and here is not None:
            votes += 1 if here < there else -1
        elif there is not None and not recording.dropped:
            votes -= 1
    return votes


def _row(history: History, rank: int, kind: str, number: int) -> int | None:
    """Where a call of a kind stands in a rank's recording."""
    for index in range(len(history.recordings[rank].groups)):
        group = history.group_of[rank, index]
        track = history.tracks[group].get(rank) if group.kind == kind else None
        place = None if track is None else track.at(number)
        if track is not None and place is not None:
            return int(track.rows[place])
    return None


def _alone(waits: Waits, missed: list[tuple[Turn, int]], inside: set[int]) -> dict[int, Turn]:
    """The one rank of a cycle that is alone in its call while several wait for it in one; nobody if there are more."""
    found = {
        rank: turn
        for turn, rank in missed
        if len(turn.waiting) > 1 and all(len(there.waiting) == 1 for there in waits.of_rank[rank])
    }
    return found if len(found) == 1 else {}


def _cycle(history: History, waits: Waits, ranks: list[int]) -> Cause:
    """The cycle spelled out: each rank of it, its call, and the next one."""
    path = _path(waits, ranks)
    steps = [f"{in_words([rank])} in {turn.words} for {in_words([after])}" for rank, turn, after in path]
    return _cause(
        history,
        "crosswise",
        sorted(rank for rank, _, _ in path),
        path[0][1],
        f"ranks wait for each other: {', '.join(steps[:_SHOWN])}{' ...' if len(steps) > _SHOWN else ''}",
    )


def _path(waits: Waits, ranks: list[int]) -> list[tuple[int, Turn, int]]:
    """One closed way through the cycle: from each rank by its call to a rank that is missing there."""
    inside = set(ranks)
    way: list[tuple[int, Turn, int]] = []
    seen: dict[int, int] = {}
    rank = ranks[0]
    while rank not in seen:
        seen[rank] = len(way)
        turn, after = next(
            (turn, missing) for turn in waits.of_rank[rank] for missing in turn.missing if missing in inside
        )
        way.append((rank, turn, after))
        rank = after
    return way[seen[rank] :]


# -- calls that nobody leaves --------------------------------------------------------------------------------------


def _stuck(history: History, waits: Waits, diverged: Mapping[KnownGroup, int]) -> Iterator[Cause]:
    """Calls that all members entered and that are not over, where those who wait have nothing else to wait for.

    Of a group's calls the first one: the others are behind it.
    """
    seen: set[KnownGroup] = set()
    for turn in waits.turns:
        if (
            turn.missing
            or (turn.numbered and turn.group in seen)
            or diverged.get(turn.group, turn.number + 1) <= turn.number
        ):
            continue
        if any(other.missing for rank in turn.waiting for other in waits.of_rank.get(rank, ())):
            continue
        seen.add(turn.group)
        hosts = sorted({history.recordings[rank].host for rank in turn.group.members if rank in history.recordings})
        yield _cause(
            history,
            "stuck",
            list(turn.waiting),
            turn,
            f"all members entered {turn.words}, and {in_words(turn.waiting)} did not come out: the network or a device"
            + _between(list(filter(None, hosts)))
            + (", or another root on some of them, which is not recorded" if turn.operation in _ROOTED else ""),
        )


def _between(hosts: list[str]) -> str:
    if not hosts:
        return ""
    shown = ", ".join(hosts[:_SHOWN]) + (" ..." if len(hosts) > _SHOWN else "")
    return f" of host {shown}" if len(hosts) == 1 else f" between the hosts {shown}"


def _cause(history: History, cause: str, ranks: Sequence[int], turn: Turn, evidence: str) -> Cause:
    sites = {rank: site for rank in turn.waiting[:_SHOWN] if (site := _site(history, turn, rank))}
    for rank in ranks[:_SHOWN]:
        about = history.recordings[rank].in_call if rank in history.recordings else None
        if about is not None and about.site:
            sites[rank] = about.site
    return Cause(cause, tuple(ranks), turn.group, turn.number, turn.operation, evidence, sites)


def _site(history: History, turn: Turn, rank: int) -> str:
    return turn.site or history.site(turn.group, rank, turn.number)
