"""Cycles: ranks that wait for each other, and which of them left the order of calls that their peers keep.

```
rank 0 ─> call 7 of tp@dp0 ─> rank 1 ─> call 3 of dp@tp1 ─> rank 0        deadlock, or one of them left the order
```

Ranks of the same kinds of group decide: where others made the call that is missed before the call in which the missing
rank is, that rank is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankmesh.debug.doctor.causes import Cause, cause_of, wait_in
from rankmesh.debug.doctor.history import History, PendingCall
from rankmesh.debug.doctor.order import votes
from rankmesh.debug.doctor.waits import Waits
from rankmesh.errors import in_words

__all__ = ["crossed", "cycles"]

_SHOWN = 8


def cycles(waits: Waits) -> list[list[int]]:
    """The sets of ranks that wait for each other: Tarjan's strongly connected components, without recursion."""
    index: dict[object, int] = {}
    low: dict[object, int] = {}
    stack: list[object] = []
    on_stack: set[object] = set()
    found: list[list[int]] = []

    def after(node: object) -> Sequence[object]:
        return node.missing if isinstance(node, PendingCall) else waits.of_rank.get(node, ())  # type: ignore[call-overload]

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


def crossed(history: History, waits: Waits, ranks: list[int]) -> Iterator[Cause]:
    """The cause of one cycle: the ranks that left the order of the others, else all of its ranks."""
    inside = set(ranks)
    missed = [(call, rank) for call in _calls(waits, ranks) for rank in call.missing if rank in inside]
    odd: dict[int, PendingCall] = {}
    for call, rank in missed:
        if rank not in odd and _left_the_order(history, waits, call, rank):
            odd[rank] = call
    if not odd or len(odd) == len(inside):
        odd = _alone(waits, missed, inside)
    if odd:
        for rank, call in sorted(odd.items()):
            there = waits.of_rank[rank][0]
            evidence = f"{in_words([rank])} never came to {call.name}: it is in {there.name}; {wait_in(call)}"
            yield cause_of(history, "absent", [rank], call, evidence)
    else:
        yield _cycle(history, waits, ranks)


def _calls(waits: Waits, ranks: Sequence[int]) -> list[PendingCall]:
    return list({id(call): call for rank in ranks for call in waits.of_rank[rank]}.values())


def _left_the_order(history: History, waits: Waits, call: PendingCall, rank: int) -> bool:
    """Whether others say that a rank should have come to a call before the call in which it is."""
    return any(
        votes(history, call, there.group.family, there.number, rank) > 0
        for there in waits.of_rank[rank]
        if there.group is not call.group and there.numbered and call.numbered
    )


def _alone(waits: Waits, missed: list[tuple[PendingCall, int]], inside: set[int]) -> dict[int, PendingCall]:
    """The one rank of a cycle that is alone in its call while several wait for it in one; nobody if there are more."""
    found = {
        rank: call
        for call, rank in missed
        if len(call.waiting) > 1 and all(len(there.waiting) == 1 for there in waits.of_rank[rank])
    }
    return found if len(found) == 1 else {}


def _cycle(history: History, waits: Waits, ranks: list[int]) -> Cause:
    """The cycle spelled out: each rank of it, its call, and the next one."""
    path = _path(waits, ranks)
    steps = [f"{in_words([rank])} in {call.name} for {in_words([after])}" for rank, call, after in path]
    return cause_of(
        history,
        "crosswise",
        sorted(rank for rank, _, _ in path),
        path[0][1],
        f"ranks wait for each other: {', '.join(steps[:_SHOWN])}{' ...' if len(steps) > _SHOWN else ''}",
    )


def _path(waits: Waits, ranks: list[int]) -> list[tuple[int, PendingCall, int]]:
    """One closed way through the cycle: from each rank by its call to a rank that is missing there."""
    inside = set(ranks)
    way: list[tuple[int, PendingCall, int]] = []
    seen: dict[int, int] = {}
    rank = ranks[0]
    while rank not in seen:
        seen[rank] = len(way)
        call, after = next(
            (call, missing) for call in waits.of_rank[rank] for missing in call.missing if missing in inside
        )
        way.append((rank, call, after))
        rank = after
    return way[seen[rank] :]
