"""Agreement: before anything is created, the ranks make sure that they hold the same plan.

Each rank arrives under its *claim*: the hash of its plan, its version of rankmesh and its world size. Ranks with one
claim count each other; when the count is the number of ranks that the plan covers, the last one gives the verdict.

```
rank 0  ── record, count 1 ──────────────┐ wait
rank 1  ── record, count 2 ──────────────┤ wait        verdict: go, generation g
rank 2  ── record, count 3 = all ── verdict
```

That is a fixed number of store operations a rank. Only when as many ranks wait as the plan covers, or as the world has,
and no meeting is complete does the last one read the records. A meeting that waits for a rank which itself waits in
vain elsewhere is closed: its ranks learn who differs, and in which fields. A rank that waits in vain until the timeout
says who is missing. What is read from the store is JSON of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rankmesh.errors import AgreementError, in_words
from rankmesh.groups.board import LARGEST, PATIENCE, Board, Claim, Store, answering, checked
from rankmesh.groups.differences import differences

__all__ = ["agree"]

_SHOWN = 8


def agree(store: Store, claim: Claim, timeout: timedelta) -> int:
    """Wait until every rank of the claim's span has made the same claim; the generation of this meeting.

    Raises ``AgreementError`` on every waiting rank when the ranks differ, and on the ranks that wait when some rank
    has not arrived within ``timeout``.
    """
    with answering(claim.rank):
        return _meet(Board(store), claim, timeout)


def _meet(board: Board, claim: Claim, timeout: timedelta) -> int:
    digest = claim.digest
    generation = board.count(f"{digest}/generation", 0)
    meeting = claim.meeting(generation)
    board.record(claim, meeting)
    arrived = board.count(f"{meeting}/arrived", 1)
    if arrived == 1:
        # What a store does not take is not shown: whether ranks agree, the hash says.
        board.write(f"{digest}/fields", claim.document if len(claim.document) < LARGEST else "{}")
    here, everywhere = _waiting(board, claim, 1)
    if arrived == claim.span.size and board.closes(meeting):
        # First the numbers, then the verdict: a rank that goes on is no longer counted as waiting.
        _waiting(board, claim, -claim.span.size)
        board.decide({meeting: {"go": True}})
    elif (here >= claim.span.size or everywhere >= claim.world_size) and not _complete(board, claim, meeting):
        _judge(board, range(claim.world_size))
    try:
        verdict = _verdict(board, claim, meeting, timeout)
    except BaseException:
        # Whatever ends the wait, this rank no longer takes part.
        with suppress(RuntimeError):
            board.withdraw(claim, meeting)
            _waiting(board, claim, -1)
        raise
    if not verdict["go"]:
        _waiting(board, claim, -1)
        raise AgreementError(
            f"rank {claim.rank}: {verdict['message']}",
            rank=claim.rank,
            ranks=verdict["ranks"],
            missing=verdict["missing"],
            fields=verdict["fields"],
        )
    return generation


def _complete(board: Board, claim: Claim, meeting: str) -> bool:
    """Whether all have come by now: of two that arrive at once, the last to be counted may not be the last to wait."""
    return board.count(f"{meeting}/arrived", 0) == claim.span.size


def _waiting(board: Board, claim: Claim, amount: int) -> tuple[int, int]:
    """How many ranks wait now: for a plan over the same ranks, and in the whole world."""
    span = f"waiting/{claim.span.offset}-{claim.span.stop}"
    return board.count(span, amount), board.count("waiting", amount)


def _verdict(board: Board, claim: Claim, meeting: str, timeout: timedelta) -> dict[str, Any]:
    key = f"{meeting}/verdict"
    if not board.wait(key, timeout):
        if board.closes(meeting):
            board.decide({meeting: _missing(board, claim, meeting, timeout)})
        elif not board.wait(key, PATIENCE):
            raise AgreementError(
                f"rank {claim.rank}: waited {timeout.total_seconds():g} s for the other ranks, and the rank that was "
                "to say who is missing is gone too; look at the logs of all ranks for the one that failed first",
                rank=claim.rank,
            )
    verdict = checked(board.read(key), key, go=bool)
    return verdict if verdict["go"] else checked(verdict, key, message=str, ranks=list, missing=list, fields=list)


@dataclass
class _Meeting:
    """A meeting that has no verdict: the ranks that its plan covers, and those that wait there."""

    name: str
    span: range
    here: list[int]


def _meetings(board: Board, ranks: Iterable[int]) -> dict[str, _Meeting]:
    """The meetings at which these ranks were last seen."""
    meetings: dict[str, _Meeting] = {}
    for rank, record in board.records(ranks).items():
        name = record["meeting"]
        meetings.setdefault(name, _Meeting(name, range(*record["span"]), [])).here.append(rank)
    return meetings


def _open_meetings(board: Board, ranks: Iterable[int]) -> dict[str, _Meeting]:
    meetings = _meetings(board, ranks)
    return {name: meeting for name, meeting in meetings.items() if not board.has(f"{name}/verdict")}


def _in_vain(meetings: Mapping[str, _Meeting]) -> list[_Meeting]:
    """The meetings that cannot become complete: each waits for a rank that waits at another one of them.

    A rank that waits nowhere may still come; one that waits at a meeting that can become complete may come then.
    """
    place = {rank: meeting.name for meeting in meetings.values() for rank in meeting.here}
    vain = dict(meetings)
    while True:
        hopeful = [name for name in vain if not any(place.get(rank) in vain for rank in _absent(vain[name]))]
        if not hopeful:
            return list(vain.values())
        for name in hopeful:
            del vain[name]


def _absent(meeting: _Meeting) -> list[int]:
    here = set(meeting.here)
    return [rank for rank in meeting.span if rank not in here]


def _judge(board: Board, ranks: Iterable[int]) -> None:
    """Close the meetings that wait in vain; each learns who differs among the ranks that it waits for."""
    vain = _in_vain(_open_meetings(board, ranks))
    verdicts = {}
    for meeting in vain:
        rivals = [other for other in vain if any(rank in meeting.span for rank in other.here)]
        verdicts[meeting.name] = _difference_of(board, rivals)
    board.decide({name: verdict for name, verdict in verdicts.items() if board.closes(name)})


def _difference_of(board: Board, meetings: Iterable[_Meeting]) -> dict[str, Any]:
    waiting = {meeting.name: meeting.here for meeting in meetings}
    return _difference(waiting, {name: board.fields(name) for name in waiting})


def _difference(waiting: Mapping[str, list[int]], documents: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Name the ranks that differ from the majority, and the fields with both values."""
    majority = max(waiting, key=lambda meeting: (len(waiting[meeting]), -min(waiting[meeting])))
    lines, fields, odd = [], [], []
    for meeting, ranks in waiting.items():
        if meeting == majority:
            continue
        odd += ranks
        changes = differences(documents[majority], documents[meeting])
        fields += [field for field, _, _ in changes if field not in fields]
        shown = "; ".join(f"{field} is {theirs}, not {ours}" for field, ours, theirs in changes[:_SHOWN])
        lines.append(f"{in_words(ranks)}: {shown or 'a plan too large to be shown'}")
    return {
        "go": False,
        "ranks": sorted(odd),
        "missing": [],
        "fields": fields,
        "message": f"the ranks do not hold the same plan, so no group was created; {' | '.join(lines)} "
        f"(as on {in_words(waiting[majority])}); give every rank the same plan",
    }


def _missing(board: Board, claim: Claim, meeting: str, timeout: timedelta) -> dict[str, Any]:
    """Why a meeting did not become complete in time: ranks that never came, ranks that came with another plan."""
    span = range(claim.span.offset, claim.span.stop)
    meetings = _meetings(board, span)
    here = meetings[meeting].here if meeting in meetings else [claim.rank]
    others = [other for name, other in meetings.items() if _differs(board, meeting, name)]
    wait = [rank for other in others if not board.has(f"{other.name}/verdict") for rank in other.here]
    absent = sorted(set(span) - set(here) - set(wait))
    message = (
        f"waited {timeout.total_seconds():g} s for {in_words(absent)}, which did not arrive "
        f"({len(here)} of {claim.span.size} did); look at the logs of the missing ranks, "
        "or give connect() a longer timeout"
    )
    if not others:
        return {"go": False, "ranks": absent, "missing": absent, "fields": [], "message": message}
    verdict = _difference_of(board, [_Meeting(meeting, span, here), *others]) | {"missing": absent}
    return verdict | {"message": f"{verdict['message']}; {message}" if absent else verdict["message"]}


def _differs(board: Board, meeting: str, other: str) -> bool:
    """Whether the ranks at another meeting came with another plan, and did not go on from there."""
    if meeting.split("/")[0] == other.split("/")[0]:
        return False
    key = f"{other}/verdict"
    return not board.has(key) or not checked(board.read(key), key, go=bool)["go"]
