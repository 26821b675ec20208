"""Completion: the ranks go on together, when each of them has made its groups.

```
rank 0  ── made, count 1 ──────────┐ wait
rank 1  ── made, count 2 ──────────┤ wait          verdict: go
rank 2  ── made, count 3 = all ── verdict
```

A rank that could not make its groups gives the verdict instead, so every rank learns which one failed, and why. Without
this, a rank could use its groups, or end, while another still connects to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rankmesh.errors import ConnectError, in_words
from rankmesh.groups.board import PATIENCE, Board, Claim, Store, answering, checked

__all__ = ["complete", "give_up"]


def complete(store: Store, claim: Claim, generation: int, timeout: timedelta) -> None:
    """Wait until every rank of the claim's span has made its groups; a fixed number of store operations.

    Raises ``ConnectError`` on every rank when one of them gave up, or is not through within ``timeout``.
    """
    with answering(claim.rank):
        board, meeting = Board(store), claim.meeting(generation)
        board.write(f"made/{claim.rank}", json.dumps({"meeting": meeting}))
        if board.count(f"{meeting}/made", 1) == claim.span.size:
            _decide(board, meeting, {"go": True})
        verdict = _verdict(board, claim, meeting, timeout)
    if not verdict["go"]:
        raise _destroyed(claim, verdict)


def give_up(store: Store, claim: Claim, generation: int, error: BaseException) -> None:
    """Tell the ranks that wait in ``complete`` that this one could not make its groups; as far as the store answers.

    Raises ``ConnectError`` when this rank waited for others in vain, and one of them gave up before: that is why.
    """
    board, meeting = Board(store), claim.meeting(generation)
    message = f"{in_words([claim.rank])} could not make its own: {str(error) or type(error).__name__}"
    earlier = None
    with suppress(RuntimeError):
        if not _decide(board, meeting, {"go": False, "ranks": [claim.rank], "message": message}):
            earlier = _announced(board, claim, meeting)
    if earlier is not None and not earlier["go"] and getattr(error, "missing", None):
        raise _destroyed(claim, earlier) from error


def _destroyed(claim: Claim, verdict: Mapping[str, Any]) -> ConnectError:
    return ConnectError(
        f"rank {claim.rank}: the groups were destroyed again, as {verdict['message']}",
        rank=claim.rank,
        ranks=verdict["ranks"],
    )


def _verdict(board: Board, claim: Claim, meeting: str, timeout: timedelta) -> dict[str, Any]:
    if board.wait(f"{meeting}/end", timeout):
        return _read(board, meeting)
    late = _late(board, claim, meeting)
    if late:
        message = f"{in_words(late)} did not make its own within {timeout.total_seconds():g} s; look at its log"
        _decide(board, meeting, {"go": False, "ranks": late, "message": message})
    return _announced(board, claim, meeting)


def _announced(board: Board, claim: Claim, meeting: str) -> dict[str, Any]:
    """The verdict that a rank is about to write; it may die before it has."""
    if board.wait(f"{meeting}/end", PATIENCE):
        return _read(board, meeting)
    raise ConnectError(
        f"rank {claim.rank}: the groups were destroyed again, as the rank that was to say whether all are through "
        "is gone; look at the logs of all ranks for the one that failed first",
        rank=claim.rank,
    )


def _read(board: Board, meeting: str) -> dict[str, Any]:
    key = f"{meeting}/end"
    verdict = checked(board.read(key), key, go=bool)
    return verdict if verdict["go"] else checked(verdict, key, message=str, ranks=list)


def _decide(board: Board, meeting: str, verdict: Mapping[str, Any]) -> bool:
    """Give this verdict, if it is the first; only the first counts."""
    first = board.count(f"{meeting}/ended", 1) == 1
    if first:
        board.write(f"{meeting}/end", json.dumps(verdict))
    return first


def _late(board: Board, claim: Claim, meeting: str) -> list[int]:
    return [rank for rank in range(claim.span.offset, claim.span.stop) if not _made(board, rank, meeting)]


def _made(board: Board, rank: int, meeting: str) -> bool:
    key = f"made/{rank}"
    return board.has(key) and checked(board.read(key), key, meeting=str)["meeting"] == meeting
