"""Roots: from who waits for whom to the ranks that everyone waits for.

```
rank 0 ─> call 7 of tp@dp0 ─> rank 1 ─> call 3 of dp@tp1 ─> rank 3, which is in no call       late: rank 3
rank 0 ─> call 7 of tp@dp0 ─> rank 1, whose device reports no call as over                    stuck: rank 1
rank 0 ─> call 7 of tp@dp0 ─> rank 1 ─> call 3 of dp@tp1 ─> rank 0                            a cycle (``cycles``)
```

A rank that waits itself is a consequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rankmesh.debug.doctor.causes import Cause, cause_of, wait_in
from rankmesh.debug.doctor.cycles import crossed, cycles
from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall
from rankmesh.debug.doctor.order import votes
from rankmesh.debug.doctor.waits import Waits
from rankmesh.errors import in_words

__all__ = ["roots"]

_SHOWN = 8
# They have a root, which torch's flight recorder does not keep.
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def roots(history: History, waits: Waits, diverged: Mapping[KnownGroup, int]) -> Iterator[Cause]:
    """The causes in these waits, but for what a divergence explains: ``diverged`` is its call, by group."""
    yield from _broken(history, waits)
    yield from _never_came(history, waits)
    for cycle in cycles(waits):
        yield from crossed(history, waits, cycle)
    yield from _stuck(history, waits, diverged)


# -- ranks that do not wait ----------------------------------------------------------------------------------------


def _never_came(history: History, waits: Waits) -> Iterator[Cause]:
    """Dead, absent and late ranks: each at the call in which most wait for it, or first did."""
    worst: dict[int, PendingCall] = {}
    for call in waits.calls:
        for rank in call.missing:
            if not waits.of_rank.get(rank) and rank not in waits.broken:
                known = worst.get(rank)
                if known is None or _before(call, known):
                    worst[rank] = call
    together: dict[tuple[str, PendingCall], list[int]] = {}
    for rank, call in sorted(worst.items()):
        together.setdefault((_why(history, rank, call), call), []).append(rank)
    for (why, call), ranks in together.items():
        yield cause_of(history, why, ranks, call, _EVIDENCE[why](history, ranks, call))


def _before(call: PendingCall, known: PendingCall) -> bool:
    """Whether more ranks wait in a call than in another one, or for longer."""
    return (-len(call.waiting), call.since) < (-len(known.waiting), known.since)


def _why(history: History, rank: int, call: PendingCall) -> str:
    if not history.has(rank):
        return "dead"
    if call.delay:
        return "late"
    return "absent" if history.recordings[rank].ended or _went_past(history, rank, call) else "late"


def _went_past(history: History, rank: int, call: PendingCall) -> bool:
    """Whether others came to this rank's last call by way of the call that it did not make."""
    recording = history.recordings[rank]
    if not len(recording):
        return False
    group = history.group_of[rank, int(recording.group[-1])]
    if group is call.group:
        return False
    return votes(history, call, group.family, int(recording.number[-1]), rank) > 0


def _no_recording(history: History, ranks: Sequence[int], call: PendingCall) -> str:
    states = sorted({history.recordings[rank].state for rank in ranks if rank in history.recordings})
    left = "did not respond" if history.are_alive(ranks) else "left no recording"
    said = f"{in_words(ranks)} {left}" + (f" ({', '.join(states)})" if states else "")
    return f"{said}; {wait_in(call)}"


def _elsewhere(history: History, ranks: Sequence[int], call: PendingCall) -> str:
    return f"{in_words(ranks)} never came to {call.name}: {_doing(history, ranks[0])}; {wait_in(call)}"


def _behind(history: History, ranks: Sequence[int], call: PendingCall) -> str:
    if call.delay:
        limit = history.recordings[call.waiting[0]].limit
        gave_up = f"who gave up after {limit:.0f} s"
        return f"{in_words(ranks)} came to {call.name} {call.delay:.0f} s after {in_words(call.waiting)}, {gave_up}"
    most = max((track.last for track in history.tracks[call.group].values()), default=call.number)
    by = {most - (history.last(call.group, rank) or 0) for rank in ranks} if call.numbered else {1}
    calls = f"{min(by)}" if len(by) == 1 else f"{min(by)} to {max(by)}"
    plural = "call" if by == {1} else "calls"
    return f"{in_words(ranks)} behind by {calls} {plural} of {call.group}: {_doing(history, ranks[0])}; {wait_in(call)}"


_EVIDENCE = {"dead": _no_recording, "absent": _elsewhere, "late": _behind}


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
        listed = any(group.enqueued for group in recording.groups)
        return f"it is in no call{where} and has {'none under way' if listed else 'made none'}"
    group = history.group_of[rank, int(recording.group[-1])]
    last = f"{recording.signatures[recording.signature[-1]].operation}, call {recording.number[-1]} of {group}"
    return f"it is in no call{where}; its last was {last}"


def _broken(history: History, waits: Waits) -> Iterator[Cause]:
    """Ranks that did not come out of a call that another member came out of."""
    for rank, (call, other) in waits.broken.items():
        reports = "its device reports no call as over"
        evidence = f"{in_words([other])} came out of {call.name}, and {in_words([rank])} did not: {reports}"
        yield cause_of(history, "stuck", [rank], call, evidence)


# -- calls that nobody leaves --------------------------------------------------------------------------------------


def _stuck(history: History, waits: Waits, diverged: Mapping[KnownGroup, int]) -> Iterator[Cause]:
    """Calls that all members entered and that are not over, where those who wait have nothing else to wait for.

    Of a group's calls the first one: the others are behind it.
    """
    seen: set[KnownGroup] = set()
    for call in waits.calls:
        if (
            call.missing
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
    """Who entered a call, as far as that is known."""
    unknown = [rank for rank in call.group.members if call.numbered and history.last(call.group, rank) is None]
    if not unknown:
        return f"all members entered {call.name}, and {in_words(call.waiting)} did not come out"
    gone = "recording does" if len(unknown) == 1 else "recordings do"
    entered = f"{in_words(call.waiting)} entered {call.name} and did not come out"
    return f"{entered} (the {gone} not reach back to it on {in_words(unknown)})"


def _stands_elsewhere(history: History, waits: Waits, call: PendingCall) -> bool:
    """Whether a member that may not have come waits in another call, on a device that takes one at a time."""
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
