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

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from rankmesh.errors import AgreementError, ConnectError
from rankmesh.layout.span import Span

__all__ = ["Claim", "Store", "agree"]

# A TCPStore takes no more under one key.
_LARGEST = 8 * 2**20
_SHOWN = 8
# How long a rank waits for what another one is about to write.
_PATIENCE = timedelta(seconds=5)


class Store(Protocol):
    """What agreement needs of a torch store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; its new value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys are there; raise when they are not within the timeout."""


@dataclass(frozen=True)
class Claim:
    """What one rank brings: its fields as plain data, and the ranks that its plan covers."""

    rank: int
    world_size: int
    span: Span
    fields: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The hash of the fields: equal claims have equal digests."""
        return hashlib.sha256(self.document.encode()).hexdigest()[:32]

    @property
    def document(self) -> str:
        """The fields as canonical JSON."""
        return json.dumps(self.fields, sort_keys=True, separators=(",", ":"))


def agree(store: Store, claim: Claim, timeout: timedelta) -> int:
    """Wait until every rank of the claim's span has made the same claim; the generation of this meeting.

    Raises ``AgreementError`` on every waiting rank when the ranks differ, and on the ranks that wait when some rank
    has not arrived within ``timeout``.
    """
    board = _Board(store)
    try:
        return _meet(board, claim, timeout)
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, AgreementError):
            raise
        raise ConnectError(
            f"rank {claim.rank}: the store of the world does not answer ({_first_line(error)}); the process that "
            "serves it is gone or unreachable; look at the log of the rank that serves it (usually rank 0) and restart",
            rank=claim.rank,
        ) from error


def _meet(board: _Board, claim: Claim, timeout: timedelta) -> int:
    digest = claim.digest
    generation = board.count(f"{digest}/generation", 0)
    meeting = f"{digest}/{generation}"
    board.record(claim, meeting)
    arrived = board.count(f"{meeting}/arrived", 1)
    if arrived == 1:
        # What a store does not take is not shown: whether ranks agree, the hash says.
        board.write(f"{digest}/fields", claim.document if len(claim.document) < _LARGEST else "{}")
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
            board.withdraw(meeting)
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


def _complete(board: _Board, claim: Claim, meeting: str) -> bool:
    """Whether all have come by now: of two that arrive at once, the last to be counted may not be the last to wait."""
    return board.count(f"{meeting}/arrived", 0) == claim.span.size


def _waiting(board: _Board, claim: Claim, amount: int) -> tuple[int, int]:
    """How many ranks wait now: for a plan over the same ranks, and in the whole world."""
    span = f"waiting/{claim.span.offset}-{claim.span.stop}"
    return board.count(span, amount), board.count("waiting", amount)


def _verdict(board: _Board, claim: Claim, meeting: str, timeout: timedelta) -> dict[str, Any]:
    key = f"{meeting}/verdict"
    if not board.wait(key, timeout):
        if board.closes(meeting):
            board.decide({meeting: _missing(board, claim, meeting, timeout)})
        elif not board.wait(key, _PATIENCE):
            raise AgreementError(
                f"rank {claim.rank}: waited {timeout.total_seconds():g} s for the other ranks, and the rank that was "
                "to say who is missing is gone too; look at the logs of all ranks for the one that failed first",
                rank=claim.rank,
            )
    verdict = _checked(board.read(key), key, go=bool)
    return verdict if verdict["go"] else _checked(verdict, key, message=str, ranks=list, missing=list, fields=list)


class _Board:
    """The keys of the meeting place, under the identity of the job."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._prefix = f"rankmesh/{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}"

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def count(self, key: str, amount: int) -> int:
        return self._store.add(self._key(key), amount)

    def write(self, key: str, text: str) -> None:
        self._store.set(self._key(key), text)

    def has(self, key: str) -> bool:
        return self._store.check([self._key(key)])

    def read(self, key: str) -> dict[str, Any]:
        text = self._store.get(self._key(key))
        if len(text) > _LARGEST:
            raise _foreign(key, f"{len(text)} bytes; at most {_LARGEST} are read from the store")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise _foreign(key, f"{text[:60]!r}, which is no JSON object")
        return data

    def wait(self, key: str, timeout: timedelta) -> bool:
        try:
            self._store.wait([self._key(key)], timeout)
        except RuntimeError as error:
            if "timeout" in str(error).lower() or "timed out" in str(error).lower():
                return False
            raise
        return True

    def record(self, claim: Claim, meeting: str) -> None:
        span = [claim.span.offset, claim.span.stop]
        self.write(f"record/{claim.rank}", json.dumps({"meeting": meeting, "span": span}))

    def records(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        keys = {rank: f"record/{rank}" for rank in ranks}
        return {
            rank: _checked(self.read(key), key, meeting=str, span=list) for rank, key in keys.items() if self.has(key)
        }

    def fields(self, meeting: str) -> dict[str, Any]:
        """The claim of a meeting; empty when the rank that was to write it is gone."""
        key = f"{meeting.split('/')[0]}/fields"
        return self.read(key) if self.wait(key, _PATIENCE) else {}

    def closes(self, meeting: str) -> bool:
        """Whether it is for this rank to give the verdict: one rank is told so, once."""
        return self.count(f"{meeting}/closed", 1) == 1

    def decide(self, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the verdicts of meetings that this rank closes.

        First all of them get a next generation: a rank that hears its verdict and comes back with another plan meets
        nobody who is still to hear one.
        """
        for meeting in verdicts:
            self.count(f"{meeting.split('/')[0]}/generation", 1)
        for meeting, verdict in verdicts.items():
            self.write(f"{meeting}/verdict", json.dumps(verdict))

    def withdraw(self, meeting: str) -> None:
        self.count(f"{meeting}/arrived", -1)


def _checked(data: dict[str, Any], key: str, **kinds: type) -> dict[str, Any]:
    for name, kind in kinds.items():
        if not isinstance(data.get(name), kind):
            raise _foreign(key, f"an object whose {name!r} is {data.get(name)!r}")
    return data


def _foreign(key: str, what: str) -> AgreementError:
    return AgreementError(
        f"received under {key!r} {what}; another program writes under rankmesh's keys; give the job a store of its own",
        key=key,
    )


@dataclass
class _Meeting:
    """A meeting that has no verdict: the ranks that its plan covers, and those that wait there."""

    name: str
    span: range
    here: list[int]


def _meetings(board: _Board, ranks: Iterable[int]) -> dict[str, _Meeting]:
    """The meetings at which these ranks were last seen."""
    meetings: dict[str, _Meeting] = {}
    for rank, record in board.records(ranks).items():
        name = record["meeting"]
        meetings.setdefault(name, _Meeting(name, range(*record["span"]), [])).here.append(rank)
    return meetings


def _open_meetings(board: _Board, ranks: Iterable[int]) -> dict[str, _Meeting]:
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


def _judge(board: _Board, ranks: Iterable[int]) -> None:
    """Close the meetings that wait in vain; each learns who differs among the ranks that it waits for."""
    vain = _in_vain(_open_meetings(board, ranks))
    verdicts = {}
    for meeting in vain:
        rivals = [other for other in vain if any(rank in meeting.span for rank in other.here)]
        verdicts[meeting.name] = _difference_of(board, rivals)
    board.decide({name: verdict for name, verdict in verdicts.items() if board.closes(name)})


def _difference_of(board: _Board, meetings: Iterable[_Meeting]) -> dict[str, Any]:
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
        lines.append(f"{_ranks(ranks)}: {shown or 'a plan too large to be shown'}")
    return {
        "go": False,
        "ranks": sorted(odd),
        "missing": [],
        "fields": fields,
        "message": f"the ranks do not hold the same plan, so no group was created; {' | '.join(lines)} "
        f"(as on {_ranks(waiting[majority])}); give every rank the same plan",
    }


def differences(ours: object, theirs: object, path: str = "") -> list[tuple[str, str, str]]:
    """The fields in which two plain documents differ: (path, ours, theirs).

    >>> differences({"mesh": {"axes": [["tp", 2]]}}, {"mesh": {"axes": [["tp", 4]]}})
    [('mesh.axes.tp', '2', '4')]
    """
    if ours == theirs:
        return []
    left, right = _mapping(ours), _mapping(theirs)
    if left is None or right is None or (list(left) != list(right) and set(left) == set(right)):
        return [(path or "plan", _short(ours), _short(theirs))]
    found = []
    for key in dict.fromkeys([*left, *right]):
        here = f"{path}.{key}" if path else str(key)
        found += differences(left.get(key), right.get(key), here)
    return found


def _mapping(value: object) -> dict[str, Any] | None:
    """A mapping as it is; lists of named things (axes, groups) by their names; else None."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    if all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return dict(value)
    return None


def _short(value: object) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _missing(board: _Board, claim: Claim, meeting: str, timeout: timedelta) -> dict[str, Any]:
    """Why a meeting did not become complete in time: ranks that never came, ranks that came with another plan."""
    span = range(claim.span.offset, claim.span.stop)
    meetings = _meetings(board, span)
    here = meetings[meeting].here if meeting in meetings else [claim.rank]
    others = [other for name, other in meetings.items() if _differs(board, meeting, name)]
    wait = [rank for other in others if not board.has(f"{other.name}/verdict") for rank in other.here]
    absent = sorted(set(span) - set(here) - set(wait))
    message = (
        f"waited {timeout.total_seconds():g} s for {_ranks(absent)}, which did not arrive "
        f"({len(here)} of {claim.span.size} did); look at the logs of the missing ranks, "
        "or give connect() a longer timeout"
    )
    if not others:
        return {"go": False, "ranks": absent, "missing": absent, "fields": [], "message": message}
    verdict = _difference_of(board, [_Meeting(meeting, span, here), *others]) | {"missing": absent}
    return verdict | {"message": f"{verdict['message']}; {message}" if absent else verdict["message"]}


def _differs(board: _Board, meeting: str, other: str) -> bool:
    """Whether the ranks at another meeting came with another plan, and did not go on from there."""
    if meeting.split("/")[0] == other.split("/")[0]:
        return False
    key = f"{other}/verdict"
    return not board.has(key) or not _checked(board.read(key), key, go=bool)["go"]


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:_SHOWN]))
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}{more}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
