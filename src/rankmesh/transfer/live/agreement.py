"""Agreement of the ranks before and after a transfer, through the store of the world.

```
start   rank 0  ── digest, arrive ─────────┐ wait          agreed: one transfer, and the tensors of it on all
        rank 1  ── digest, arrive: complete ── conclude
end     rank 0  ── arrive ─────────────────┐ wait          agreed: all have sent and received everything
        rank 1  ── failure: conclude now ──┘               failed: which ranks and why, equal on every rank
```

A rank that waits at the end gives up when no other makes progress for the timeout. Of ranks that accuse each other, the
unresponsive one has failed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from torch.distributed import Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import AgreementError, TransferError, first_line, in_words
from rankmesh.rendezvous import Arrivals, Outcome, Proposal, Round, StoreChannel, WaitPolicy, WhileProgress, by_rank

__all__ = ["ExchangeError", "TransferAgreement", "in_one_line"]

# How long a rank that lost another waits for the reports of other ranks, seconds; less where the timeout is short.
_SETTLE = 1.0


class ExchangeError(Exception):
    """Raised when a rank cannot do its part: it failed itself, or it ``lost`` other ranks."""

    def __init__(self, message: str, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.message, self.lost = message, tuple(lost)


class TransferAgreement:
    """The round of one transfer's ``ranks``; ``rank`` is this one, ``serves`` is set in the process of the store.

    ``call`` is what every rank calls, for messages.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        serves: bool = False,
        call: str = "run()",
    ) -> None:
        self._rank, self._seconds, self._call = rank, timeout.total_seconds(), call
        self._round = Round(StoreChannel(store), f"transfer/{name}", tuple(ranks), rank, serves)
        self._advanced = time.monotonic()

    # -- start --------------------------------------------------------------------------------------------------

    def start(
        self,
        what: Mapping[str, object],
        problem: str = "",
        text: str = "",
        value: Callable[[dict[int, str]], object] | None = None,
        more: float = 0.0,
        *,
        last: bool = False,
    ) -> Outcome:
        """Wait until all ranks are there for one transfer, and none has a problem.

        Where all agree, one rank makes the ``value`` of the outcome from the texts of all, in ``more`` seconds. With
        ``last`` no call of ``end`` follows.

        Raises ``AgreementError`` on every rank when they differ or some stay away, ``TransferError`` on every rank when
        one has a problem.
        """
        document = json.dumps(what, sort_keys=True)
        digest = hashlib.sha256(document.encode()).hexdigest()[:16]
        given = json.dumps([problem, text]) if problem or text else ""
        outcome = self._round.step(
            "start",
            Proposal(digest, lambda: document, given),
            partial(self._start, value),
            WaitPolicy(self._seconds + more),
        )
        if not outcome.agreed:
            self._round.leave(outcome)
            kind = TransferError if outcome.reason == "failed" else AgreementError
            raise kind(
                f"nothing was moved, since {outcome.message}",
                rank=self._rank,
                ranks=outcome.ranks,
                fields=outcome.fields,
            )
        if last:
            self._round.leave(outcome, stay=True)
        return outcome

    def _start(self, value: Callable[[dict[int, str]], object] | None, arrivals: Arrivals) -> Outcome:
        """Conclude that a rank has a problem, that ranks are missing or plan another transfer, or that all agree."""
        given = {rank: json.loads(texts[-1]) for rank, texts in arrivals.texts.items()}
        problems = {rank: problem for rank, (problem, _) in given.items() if problem}
        if problems:
            return Outcome("failed", tuple(problems), message=by_rank(problems))
        settled = arrivals.settled(self._missing)
        if settled is None:
            return self._difference(arrivals)
        if not settled.agreed or value is None:
            return settled
        return Outcome(value=value({rank: text for rank, (_, text) in given.items()}))

    def _missing(self, absent: Sequence[int]) -> Outcome:
        message = (
            f"{in_words(absent)} did not come within {self._seconds:g} s; every rank of the group calls "
            f"{self._call}, those without a part too; look at the logs of the missing ranks"
        )
        return Outcome("missing", tuple(absent), tuple(absent), message=message)

    def _difference(self, arrivals: Arrivals) -> Outcome:
        proposals = sorted(arrivals.proposals.items(), key=lambda item: -len(item[1]))
        usual, other = (arrivals.document(digest) for digest, _ in proposals[:2])
        odd = sorted(rank for _, ranks in proposals[1:] for rank in ranks)
        fields = tuple(name for name, value in usual.items() if other.get(name) != value)
        message = (
            f"{in_words(odd)} came with another {' and '.join(fields)} than the other ranks; every rank plans one "
            "transfer, from the same shardings, cluster and budget"
        )
        return Outcome("different", tuple(odd), fields=fields, message=message)

    # -- between ------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Report that this rank makes progress, at most four times in each timeout."""
        now = time.monotonic()
        if now - self._advanced > self._seconds / 4:
            self._advanced = now
            self._round.advance()

    # -- end ----------------------------------------------------------------------------------------------------

    def end(self, failure: ExchangeError | None) -> Outcome:
        """Wait until all ranks have finished, or one has failed."""
        if failure is None:
            proposal = Proposal()
            policy: WaitPolicy = WhileProgress(self._seconds)
        else:
            proposal = Proposal(text=json.dumps({"message": failure.message, "lost": list(failure.lost)}))
            policy = WaitPolicy(min(_SETTLE, self._seconds / 4) if failure.lost else 0.0)
        outcome = self._round.step("end", proposal, self._end, policy)
        self._round.leave(outcome, stay=True)
        return outcome

    def _end(self, arrivals: Arrivals) -> Outcome:
        """Conclude which ranks failed: those that report it or lost one that finished; else lost; else absent ranks."""
        reports = {rank: json.loads(texts[-1]) for rank, texts in arrivals.texts.items()}
        if not reports and arrivals.complete:
            return Outcome()
        absent = arrivals.absent
        finished = set(self._round.participants).difference(absent, reports)
        failures = {
            rank: failure["message"] for rank, failure in reports.items() if finished.issuperset(failure["lost"])
        }
        away = {other: (rank, failure) for rank, failure in reports.items() for other in failure["lost"]}
        unresponsive = {other: by for other, by in away.items() if other in absent} or away
        if failures:
            return Outcome("failed", tuple(failures), message=by_rank(failures))
        if unresponsive:
            by, failure = next(iter(unresponsive.values()))
            message = f"{in_words(unresponsive)} was lost ({in_words([by])}: {failure['message']})"
            return Outcome("failed", tuple(unresponsive), tuple(unresponsive), message=message)
        message = f"{in_words(absent)} made no progress for {self._seconds:g} s"
        return Outcome("missing", tuple(absent), tuple(absent), message=message)


def in_one_line(error: BaseException) -> str:
    """Return an error in one line, with its type."""
    return f"{type(error).__name__}: {first_line(error)}"
