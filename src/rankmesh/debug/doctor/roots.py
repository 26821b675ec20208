"""Roots: follow the waits to the ranks that everyone waits for.

```
rank 0 ─> call 7 of tp@dp0 ─> rank 1 ─> call 3 of dp@tp1 ─> rank 3, which is in no call       late: rank 3
rank 0 ─> call 7 of tp@dp0 ─> rank 1, whose device reports no call as over                    stuck: rank 1
rank 0 ─> call 7 of tp@dp0 ─> rank 1 ─> call 3 of dp@tp1 ─> rank 0                            a cycle
```

A rank that waits itself is a consequence. In a cycle of ranks that wait for each other, the ranks in the same kinds of
group decide who left the order of calls: where others made the missed call before the call in which the missing rank
is, that rank is the cause. Else the cycle is a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankmesh.core.grouped import grouped
from rankmesh.debug.doctor.causes import Cause, cause_of, wait_in
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall
from rankmesh.debug.doctor.parting import went_past
from rankmesh.debug.doctor.waits import Waits
from rankmesh.errors import in_words

__all__ = ["roots"]

_SHOWN = 8
# Nanoseconds that ranks wait at least for one that is late, where others have died: they are asked as soon as one has.
_EARLY = 5 * 10**9
# They have a root, which torch's flight recorder does not keep.
_ROOTED = ("broadcast", "reduce", "gather", "scatter")

# Who waits, and what for.
_Node = int | PendingCall


def roots(history: History, waits: Waits, diverged: Mapping[KnownGroup, int]) -> Iterator[Cause]:
    """Yield the causes of these waits, without those that a divergence explains; ``diverged``: its call, by group."""
    yield from _broken(history, waits)
    yield from _never_came(history, waits)
    yield from _gone(history, waits)
    for cycle in _cycles(waits):
        yield from _crossed(history, waits, cycle)
    yield from _stuck(history, waits, diverged)


# -- ranks that do not wait ----------------------------------------------------------------------------------------


def _never_came(history: History, waits: Waits) -> Iterator[Cause]:
    """Yield dead, absent and late ranks, each at the call in which most ranks wait for it, or waited first."""
    absent = (rank for rank in sorted(waits.for_whom) if not waits.of_rank.get(rank) and rank not in waits.broken)
    worst = {rank: min(waits.for_whom[rank], key=lambda call: (-len(call.waiting), call.since)) for rank in absent}
    together = grouped(
        ((_why(history, rank, call), call), rank) for rank, call in worst.items() if not _is_early(history, call, rank)
    )
    for (why, call), ranks in together.items():
        yield cause_of(history, why, ranks, call, _EVIDENCE[why](history, ranks, call))


def _is_early(history: History, call: PendingCall, rank: int) -> bool:
    """Return whether a rank may still enter a call: other members are gone, and the wait was short."""
    if not history.has(rank) or history.recordings[rank].ended or all(map(history.has, call.missing)):
        return False
    written = max(history.recordings[one].written for one in call.waiting)
    return 0 < written - call.since < _EARLY


def _why(history: History, rank: int, call: PendingCall) -> str:
    if not history.has(rank):
        return "dead"
    return "absent" if history.recordings[rank].ended or went_past(history, call, rank) else "late"


def _no_recording(history: History, ranks: Sequence[int], call: PendingCall) -> str:
    known = [history.recordings[rank] for rank in ranks if rank in history.recordings]
    states = ", ".join(sorted({one.state for one in known if one.state}))
    if any(history.recordings[rank].source for rank in call.waiting):
        if known and all(one.failure for one in known):
            return wait_in(call)
        problem = f"{in_words(ranks)} {states}" if states else f"no line is of {in_words(ranks)}"
    else:
        problem = f"{in_words(ranks)} {'did not respond' if history.are_alive(ranks) else 'left no recording'}"
        problem += f" ({states})" if states else ""
    return f"{problem}; {wait_in(call)}"


def _elsewhere(history: History, ranks: Sequence[int], call: PendingCall) -> str:
    return f"{in_words(ranks)} never reached {call.name}: {_doing(history, ranks[0], call.group)}; {wait_in(call)}"


def _behind(history: History, ranks: Sequence[int], call: PendingCall) -> str:
    furthest = max((track.last for track in history.tracks[call.group].values()), default=call.number)
    by = {furthest - (history.last(call.group, rank) or 0) for rank in ranks} if call.numbered else {1}
    calls = f"{min(by)}" if len(by) == 1 else f"{min(by)} to {max(by)}"
    plural = "call" if by == {1} else "calls"
    if not call.number:
        is_in = "is" if len(ranks) == 1 else "are"
        return f"{in_words(ranks)} {is_in} in no call{_at(history, ranks[0])}; {wait_in(call)}"
    doing = _doing(history, ranks[0], call.group)
    return f"{in_words(ranks)} behind by {calls} {plural} of {call.group}: {doing}; {wait_in(call)}"


_EVIDENCE = {"dead": _no_recording, "absent": _elsewhere, "late": _behind}


def _doing(history: History, rank: int, group: KnownGroup) -> str:
    """Describe the activity of a rank that waits in no call of a group, by its last call in the same order."""
    recording = history.recordings[rank]
    about = recording.in_call
    if recording.ended:
        return "its program has ended"
    if recording.late_by:
        return f"it came {recording.late_by:.0f} s after the first, when that had given up"
    if about is not None and about.operation:
        return f"it is in {about.operation}" + (f", {about.site}" if about.site else "")
    where = _at(history, rank)
    if recording.source:
        return f"it is{where}" if where else "nothing shows where it is"
    if not len(recording):
        listed = any(group.enqueued for group in recording.groups)
        return f"it is in no call{where} and has {'none under way' if listed else 'made none'}"
    row = history.last_row(rank, group)
    there = history.group_of[rank, int(recording.group[row])]
    last = f"{recording.signatures[recording.signature[row]].operation}, call {recording.number[row]} of {there}"
    return f"it is in no call{where}; its last was {last}"


def _at(history: History, rank: int) -> str:
    """Return the line of the program at which a rank is, in words; "" if it is unknown."""
    about = history.recordings[rank].in_call
    return f" at {about.site}" if about is not None and about.site else ""


def _gone(history: History, waits: Waits) -> Iterator[Cause]:
    """Yield ranks of which lines state that they failed or do not respond, where no call is known to wait for them."""
    gone = grouped(
        ((recording.state, recording.alive), rank)
        for rank, recording in history.recordings.items()
        if recording.source and not recording.from_rank and not waits.for_whom.get(rank)
    )
    world = next((group for group in history.tracks if group.kind == "world"), None)
    for (state, _), ranks in gone.items():
        group = world or next(group for group in history.tracks if ranks[0] in group.members)
        call = PendingCall(group, 0, "", (), tuple(ranks), numbered=False)
        yield cause_of(history, "dead", ranks, call, f"{in_words(ranks)} {state}" if state else "")


def _broken(history: History, waits: Waits) -> Iterator[Cause]:
    """Yield ranks that did not leave a call that another member has left."""
    for rank, (call, other) in waits.broken.items():
        reports = "its device reports no call as over"
        evidence = f"{in_words([other])} came out of {call.name}, and {in_words([rank])} did not: {reports}"
        yield cause_of(history, "stuck", [rank], call, evidence)


# -- ranks that wait for each other ----------------------------------------------------------------------------------


def _cycles(waits: Waits) -> list[list[int]]:
    """Return the sets of ranks that wait for each other: Kosaraju's strongly connected components."""
    after: dict[Any, Sequence[_Node]] = {**waits.of_rank, **{call: call.missing for call in waits.calls}}
    before = grouped((step, node) for node, steps in after.items() for step in steps)
    seen = set[_Node]()
    order = [node for start in after for node in _reached(start, after, seen)]
    seen.clear()
    parts = [_reached(node, before, seen) for node in reversed(order)]
    cycles = (sorted(node for node in part if isinstance(node, int)) for part in reversed(parts))
    return [ranks for ranks in cycles if len(ranks) > 1]


def _reached(start: _Node, after: Mapping[_Node, Sequence[_Node]], seen: set[_Node]) -> list[_Node]:
    """Return the nodes reached from a node that were not seen before, in postorder."""
    found, work = list[_Node](), [start] if start not in seen else []
    rest = {start: iter(after.get(start, ()))}
    seen.add(start)
    while work:
        step = next((node for node in rest[work[-1]] if node not in seen), None)
        if step is None:
            found.append(work.pop())
        else:
            seen.add(step)
            rest[step] = iter(after.get(step, ()))
            work.append(step)
    return found


def _crossed(history: History, waits: Waits, ranks: list[int]) -> Iterator[Cause]:
    """Yield the cause of one cycle: the ranks that left the order of the others, else all of its ranks."""
    inside = set(ranks)
    odd: dict[int, PendingCall] = {}
    for call in dict.fromkeys(call for rank in ranks for call in waits.of_rank[rank]):
        for rank in inside.intersection(call.missing).difference(odd):
            if any(
                went_past(history, call, rank, there) or _is_isolated(there, rank, call)
                for there in waits.of_rank[rank]
            ):
                odd[rank] = call
    if 0 < len(odd) < len(inside):
        for rank, call in sorted(odd.items()):
            there = waits.of_rank[rank][0]
            evidence = f"{in_words([rank])} never reached {call.name}: it is in {there.name}; {wait_in(call)}"
            yield cause_of(history, "absent", [rank], call, evidence)
    else:
        yield _deadlock(history, waits, ranks)


def _is_isolated(there: PendingCall, rank: int, call: PendingCall) -> bool:
    """Return whether a rank waits for a whole group, all of which waits in one call for it: the minority diverged."""
    others = set(there.group.members) - {rank}
    return len(others) > 1 and there.numbered and call.numbered and others <= set(call.waiting)


def _deadlock(history: History, waits: Waits, ranks: list[int]) -> Cause:
    """Return the cause of a cycle: each rank of it, its call, and the rank that it waits for."""
    path = _way_round(waits, ranks)
    steps = [f"rank {rank} waits for {after} in {call.name}" for rank, call, after in path]
    return cause_of(
        history,
        "crosswise",
        sorted(rank for rank, _, _ in path),
        path[0][1],
        f"{len(path)} ranks wait in a cycle. {'; '.join(steps[:_SHOWN])}{'; ...' if len(steps) > _SHOWN else ''}",
    )


def _way_round(waits: Waits, ranks: list[int]) -> list[tuple[int, PendingCall, int]]:
    """Return one closed way through the cycle: from each rank by its call to a rank that is missing there."""
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


# -- calls that nobody leaves --------------------------------------------------------------------------------------


def _stuck(history: History, waits: Waits, diverged: Mapping[KnownGroup, int]) -> Iterator[Cause]:
    """Yield calls that all members entered and that are not over, where those who wait have nothing else to wait for.

    Only the first such call of a group: the others wait behind it.
    """
    seen: set[KnownGroup] = set()
    for call in waits.calls:
        if (
            call.missing
            or not call.number
            or not all(map(history.knows, call.group.members))
            or not history.is_listed(call.group)
            or (call.numbered and call.group in seen)
            or diverged.get(call.group, call.number + 1) <= call.number
            or _stands_elsewhere(history, waits, call)
        ):
            continue
        if any(other.missing for rank in call.waiting for other in waits.of_rank.get(rank, ())):
            continue
        seen.add(call.group)
        hosts = sorted({history.recordings[rank].host for rank in call.group.members if rank in history.recordings})
        yield cause_of(
            history,
            "stuck",
            list(call.waiting),
            call,
            f"{_entered(history, call)}: the network or a device"
            + _between(list(filter(None, hosts)))
            + (", or another root on some of them, which is not recorded" if call.operation in _ROOTED else ""),
        )


def _entered(history: History, call: PendingCall) -> str:
    """Describe the members that entered a call, as far as they are known."""
    unknown = [rank for rank in call.group.members if call.numbered and history.last(call.group, rank) is None]
    if not unknown:
        return f"all members entered {call.name}, and {in_words(call.waiting)} did not come out"
    recordings = "recording does" if len(unknown) == 1 else "recordings do"
    entered = f"{in_words(call.waiting)} entered {call.name} and did not come out"
    return f"{entered} (the {recordings} not reach back to it on {in_words(unknown)})"


def _stands_elsewhere(history: History, waits: Waits, call: PendingCall) -> bool:
    """Return whether a member that may not have entered waits in another call; a device runs one call at once."""
    return history.on_device(call.group) and any(
        waits.of_rank.get(rank) and history.last(call.group, rank) is None
        for rank in call.group.members
        if rank not in call.waiting
    )


def _between(hosts: list[str]) -> str:
    if not hosts:
        return ""
    shown = ", ".join(hosts[:_SHOWN]) + (" ..." if len(hosts) > _SHOWN else "")
    return f" of host {shown}" if len(hosts) == 1 else f" between the hosts {shown}"
