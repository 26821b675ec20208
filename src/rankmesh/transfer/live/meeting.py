"""Meetings: before and after a transfer its ranks tell each other, through the store of the world, how things stand.

```
begin   rank 0  ── claim, arrive 1 ───────┐ wait           go: all claim one transfer and have the tensors of it
        rank 1  ── claim, arrive 2 = all ── verdict
end     rank 0  ── done 1 ────────────────┐ wait           go: all have sent and received everything
        rank 1  ── fault ── verdict ──────┘                no: who failed, and why; the same on every rank
```

A rank that waits at the end hears the others' progress: it gives up when none of them makes any for the timeout. Of
ranks that accuse each other, the one that says nothing has failed: who noticed it only lost it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rankmesh.errors import AgreementError, TransferError, first_line, in_words
from rankmesh.rendezvous.store import JobStore

__all__ = ["Fault", "TransferMeeting", "told"]

# How long a rank that lost another waits for what others have to say of it, seconds; less where the timeout is short.
_SETTLE = 1.0
# What a verdict that some rank is about to write may take.
_PATIENCE = timedelta(seconds=5)


class Fault(Exception):
    """Why a rank could not do its part: by its own failure, or since it ``lost`` other ranks."""

    def __init__(self, message: str, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.message, self.lost = message, tuple(lost)


class TransferMeeting:
    """One transfer's meeting of the ``ranks`` of one group; ``rank`` is this one."""

    def __init__(self, store: Any, name: str, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self._store, self._rank, self._ranks, self._timeout = JobStore(store), rank, tuple(ranks), timeout
        self._generation = f"transfer/{name}/generation"
        self._base = f"transfer/{name}/{self._store.count(self._generation, 0)}"
        self._beaten = time.monotonic()

    # -- its keys ---------------------------------------------------------------------------------------------------

    def _count(self, what: str, amount: int) -> int:
        return self._store.count(f"{self._base}/{what}", amount)

    def _write(self, what: str, data: Mapping[str, Any]) -> None:
        self._store.write(f"{self._base}/{what}", data)

    def _read(self, what: str) -> dict[str, Any]:
        return self._store.read(f"{self._base}/{what}")

    def _has(self, what: str) -> bool:
        return self._store.has(f"{self._base}/{what}")

    def _wait(self, what: str, limit: timedelta) -> bool:
        """Whether there is something under the key within the limit."""
        return self._store.wait(f"{self._base}/{what}", limit.total_seconds())

    def _forget(self, *keys: str) -> None:
        for key in keys:
            with suppress(RuntimeError):
                self._store.delete(f"{self._base}/{key}")

    # -- the beginning ----------------------------------------------------------------------------------------------

    def begin(self, claim: Mapping[str, Any], problem: str) -> None:
        """Wait until all ranks are there with one claim and no problem.

        Raises ``AgreementError`` on every rank when claims differ or ranks stay away, ``TransferError`` on every rank
        when one has a problem.
        """
        self._write(f"here/{self._rank}", {**claim, "problem": problem})
        self._alike = hashlib.sha256(json.dumps(claim, sort_keys=True).encode()).hexdigest()[:16]
        if not problem:
            self._count(f"same/{self._alike}", 1)
        if self._count("arrived", 1) == len(self._ranks):
            same = not problem and self._count(f"same/{self._alike}", 0) == len(self._ranks)
            self._decide("start", lambda: {"go": True} if same else self._differences(self._ranks, ()))
        if not self._wait("start", self._timeout):
            self._decide("start", self._absent)
        verdict = self._verdict("start")
        self._forget(f"here/{self._rank}")
        if not verdict["go"]:
            kind = TransferError if verdict["problem"] else AgreementError
            raise kind(f"rank {self._rank}: {verdict['message']}", rank=self._rank, ranks=tuple(verdict["ranks"]))

    def _absent(self) -> dict[str, Any]:
        here = [rank for rank in self._ranks if self._has(f"here/{rank}")]
        return self._differences(here, [rank for rank in self._ranks if rank not in here])

    def _differences(self, here: Sequence[int], absent: Sequence[int]) -> dict[str, Any]:
        """What keeps the ranks that are here from going on: a problem of one, another claim, or ranks that are not."""
        claims = {rank: self._read(f"here/{rank}") for rank in here}
        problems = {rank: claim.pop("problem") for rank, claim in claims.items()}
        failed = {rank: problem for rank, problem in problems.items() if problem}
        claims = {rank: claim for rank, claim in claims.items() if rank not in failed}
        if failed:
            told = "; ".join(f"{in_words([rank])}: {failed[rank]}" for rank in list(failed)[:4])
            return {"go": False, "ranks": list(failed), "problem": True, "message": f"nothing was moved, since {told}"}
        usual = Counter(json.dumps(claim, sort_keys=True) for claim in claims.values()).most_common(1)[0][0]
        others = [rank for rank, claim in claims.items() if json.dumps(claim, sort_keys=True) != usual]
        if others:
            fields = [name for name, value in json.loads(usual).items() if claims[others[0]].get(name) != value]
            message = (
                f"nothing was moved, since {in_words(others)} came with another {' and '.join(fields)} than the other "
                "ranks; every rank plans one transfer, from the same shardings, cluster and budget"
            )
            return {"go": False, "ranks": others, "problem": False, "message": message}
        message = (
            f"nothing was moved, since {in_words(absent)} did not come within {self._timeout.total_seconds():g} s; "
            "every rank of the group calls run(), those without a part too; look at the logs of the missing ranks"
        )
        return {"go": False, "ranks": list(absent), "problem": False, "message": message}

    # -- between ----------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Say that this rank makes progress, now and then."""
        now = time.monotonic()
        if now - self._beaten > self._timeout.total_seconds() / 4:
            self._beaten = now
            self._count("beats", 1)

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self, fault: Fault | None) -> dict[str, Any] | None:
        """Wait until all ranks are through, or one has failed: None, or the ranks that failed and why."""
        if fault is None:
            self._write(f"done/{self._rank}", {})
            if self._count("done", 1) == len(self._ranks):
                self._decide("end", lambda: {"go": True})
        else:
            self._write(f"fault/{self._rank}", {"message": fault.message, "lost": list(fault.lost)})
            if fault.lost:
                time.sleep(min(_SETTLE, self._timeout.total_seconds() / 4))
            self._decide("end", self._culprits)
        self._listen()
        verdict = self._verdict("end")
        self._leave()
        return None if verdict["go"] else verdict

    def _listen(self) -> None:
        """Wait for the verdict while anybody makes progress."""
        heard = -1
        while not self._wait("end", self._timeout):
            beats = self._count("beats", 0)
            if beats == heard:
                self._decide("end", self._culprits)
                return
            heard = beats

    def _culprits(self) -> dict[str, Any]:
        """Who failed: those who say so of themselves, else those who were lost and say nothing, else who is silent."""
        faults = {rank: self._read(f"fault/{rank}") for rank in self._ranks if self._has(f"fault/{rank}")}
        own = {rank: fault["message"] for rank, fault in faults.items() if not fault["lost"]}
        lost = {other: (rank, fault) for rank, fault in faults.items() for other in fault["lost"]}
        silent = {other: by for other, by in lost.items() if other not in faults} or lost
        if own:
            told, ranks = "; ".join(f"{in_words([rank])}: {own[rank]}" for rank in list(own)[:4]), list(own)
        elif silent:
            by, fault = next(iter(silent.values()))
            told, ranks = f"{in_words(silent)} was lost ({in_words([by])}: {fault['message']})", list(silent)
        else:
            ranks = [rank for rank in self._ranks if not self._has(f"done/{rank}")]
            told = f"{in_words(ranks)} made no progress for {self._timeout.total_seconds():g} s"
        return {"go": False, "ranks": ranks, "message": told}

    # -- verdicts ---------------------------------------------------------------------------------------------------

    def _decide(self, what: str, decision: Callable[[], Mapping[str, Any]]) -> None:
        """Make and give this verdict, if it is the first: until it is given no rank takes back what it wrote."""
        if self._count(f"{what}ed", 1) == 1:
            verdict = decision()
            if what == "end" or not verdict["go"]:  # the next transfer then meets elsewhere
                self._store.count(self._generation, 1)
            self._write(what, verdict)

    def _verdict(self, what: str) -> dict[str, Any]:
        if self._wait(what, _PATIENCE):
            return self._read(what)
        return {"go": False, "ranks": [], "problem": True, "message": "the rank that was to say how it ended is gone"}

    def _leave(self) -> None:
        """The last to leave takes everything along; a rank that was lost never leaves."""
        self._forget(f"done/{self._rank}")
        if self._count("left", 1) == len(self._ranks):
            shared = ("start", "started", "end", "ended", "arrived", "beats", "done", "left")
            self._forget(*shared, f"same/{self._alike}")


def told(error: BaseException) -> str:
    """An error in one line, with its kind."""
    return f"{type(error).__name__}: {first_line(error)}"
