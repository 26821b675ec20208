"""Agreement: before anything is created, the ranks make sure that they hold the same plan.

Each rank arrives under its *claim*: the hash of its plan, its version of rankmesh and its world size. Ranks with one
claim count each other; when the count is the number of ranks that the plan covers, the last one gives the verdict.

```
rank 0  ── record, count 1 ──────────────┐ wait
rank 1  ── record, count 2 ──────────────┤ wait        verdict: go, generation g
rank 2  ── record, count 3 = all ── verdict
```

That is a fixed number of store operations a rank. Only when every rank of the world has arrived and some claim is
short of ranks does the last one read the records and tell every waiting rank who differs, and in which fields. A rank
that waits in vain until the timeout says who is missing. What is read from the store is JSON of bounded size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from rankmesh.errors import AgreementError, ConnectError
from rankmesh.layout.span import Span

__all__ = ["Claim", "Store", "agree"]

_LARGEST = 16 * 2**20
_SHOWN = 8


class Store(Protocol):
    """What agreement needs of a torch store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


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
        board.write(f"{digest}/fields", claim.document)
    total = board.count("arrivals", 1)
    complete = arrived == claim.span.size
    if complete:
        board.close(meeting, digest, {"go": True})
    if total % claim.world_size == 0:
        met = board.count("met", claim.span.size if complete else 0)
        if met < total:
            _judge(board, claim.world_size)
    elif complete:
        board.count("met", claim.span.size)
    verdict = _verdict(board, claim, meeting, digest, timeout)
    if not verdict.get("go"):
        raise AgreementError(
            f"rank {claim.rank}: {verdict['message']}",
            rank=claim.rank,
            ranks=verdict.get("ranks", []),
            missing=verdict.get("missing", []),
            fields=verdict.get("fields", []),
        )
    return generation


def _verdict(board: _Board, claim: Claim, meeting: str, digest: str, timeout: timedelta) -> dict[str, Any]:
    if not board.wait(f"{meeting}/verdict", timeout):
        board.close(meeting, digest, _missing(board, claim, meeting, timeout))
        # Another rank may have closed the meeting in the meantime: what is written counts for all.
        board.wait(f"{meeting}/verdict", timedelta(seconds=5))
    return board.read(f"{meeting}/verdict")


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
            raise AgreementError(
                f"received {len(text)} bytes under {key!r}; at most {_LARGEST} are read from the store; "
                "another program writes under rankmesh's keys; give the job a store of its own"
            )
        data = json.loads(text)
        return data if isinstance(data, dict) else {}

    def wait(self, key: str, timeout: timedelta) -> bool:
        try:
            self._store.wait([self._key(key)], timeout)
        except RuntimeError as error:
            if "timeout" in str(error).lower() or "timed out" in str(error).lower():
                return False
            raise
        return True

    def record(self, claim: Claim, meeting: str) -> None:
        self.write(f"record/{claim.rank}", json.dumps({"claim": claim.digest, "meeting": meeting}))

    def records(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        return {rank: self.read(f"record/{rank}") for rank in ranks if self.has(f"record/{rank}")}

    def close(self, meeting: str, digest: str, verdict: Mapping[str, Any]) -> None:
        """Give the verdict of a meeting, unless it has one; later arrivals find the next generation."""
        if self.count(f"{meeting}/closed", 1) == 1:
            self.count(f"{digest}/generation", 1)
            self.write(f"{meeting}/verdict", json.dumps(verdict))


def _judge(board: _Board, world_size: int) -> None:
    """Every rank of the world has arrived: meetings that still wait can only be short because ranks differ."""
    records = board.records(range(world_size))
    waiting: dict[str, list[int]] = {}
    for rank, record in records.items():
        if not board.has(f"{record['meeting']}/verdict"):
            waiting.setdefault(record["meeting"], []).append(rank)
    if len(waiting) < 2 and len(records) < world_size:
        return
    documents = {meeting: board.read(f"{meeting.split('/')[0]}/fields") for meeting in waiting}
    verdict = _difference(waiting, documents)
    for meeting in waiting:
        board.close(meeting, meeting.split("/")[0], verdict)
    board.count("met", sum(map(len, waiting.values())))


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
        lines.append(f"{_ranks(ranks)}: {shown or 'covers other ranks'}")
    if not lines:
        lines.append(f"the plan of {_ranks(waiting[majority])} covers ranks that hold none")
    return {
        "go": False,
        "ranks": sorted(odd),
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
        return {name: content for name, content in value}
    return None


def _short(value: object) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _missing(board: _Board, claim: Claim, meeting: str, timeout: timedelta) -> dict[str, Any]:
    span = range(claim.span.offset, claim.span.stop)
    records = board.records(span)
    here = {rank for rank, record in records.items() if record.get("meeting") == meeting}
    absent = [rank for rank in span if rank not in here]
    elsewhere = [rank for rank in absent if rank in records and not _done(board, records[rank])]
    if elsewhere:
        waiting = {meeting: sorted(here)}
        for rank in elsewhere:
            waiting.setdefault(records[rank]["meeting"], []).append(rank)
        documents = {place: board.read(f"{place.split('/')[0]}/fields") for place in waiting}
        verdict = _difference(waiting, documents)
        silent = [rank for rank in absent if rank not in elsewhere]
        return verdict | {"missing": silent}
    return {
        "go": False,
        "ranks": absent,
        "missing": absent,
        "message": f"waited {timeout.total_seconds():g} s for {_ranks(absent)}, which did not arrive "
        f"({len(here)} of {claim.span.size} did); look at the logs of the missing ranks, "
        "or give connect() a longer timeout",
    }


def _done(board: _Board, record: Mapping[str, Any]) -> bool:
    return board.has(f"{record['meeting']}/verdict")


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:_SHOWN]))
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}{more}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
