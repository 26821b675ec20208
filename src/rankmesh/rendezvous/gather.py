"""Gather: every participant gives data, one concludes from all of it, all get the conclusion.

```
rank 0  ── {"host": "a"} ──┐
rank 1  ── {"host": "b"} ──┤ conclude([{"host": "a"}, {"host": "b"}])  ──>  the same on every rank
```

The data may come of work that all do at the same time, such as collectives: ``gather_results`` does it on a thread and
listens meanwhile, so that all learn at once when one of them has failed or is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import replace
from typing import Any

from rankmesh.errors import AgreementError, ConnectError, RankmeshError, first_line, in_words
from rankmesh.rendezvous.arrivals import Arrivals, Conclude, lost
from rankmesh.rendezvous.round import Round
from rankmesh.rendezvous.step import Outcome, Proposal, WaitPolicy
from rankmesh.rendezvous.waiting import submit

__all__ = ["by_rank", "gather", "gather_results", "gather_work", "or_missing"]

_STEP = "gather"
# A participant that works looks for an outcome so many times within the moment in which it is to answer.
_LOOKS = 4
# Ranks whose problems a message has.
_SHOWN = 4


def gather(among: Round, data: object, conclude: Callable[[list[Any]], object], seconds: float, what: str) -> Any:
    """Gather the data of all participants, and return ``conclude`` of it, as JSON data, on each of them.

    ``what`` names the call for messages. Raises ``AgreementError`` on every rank, naming those that do not arrive
    within ``seconds``, and ``StoreLost`` when the store does not answer.
    """
    return gather_work(among, lambda: data, conclude, seconds, what, AgreementError)


def gather_work(
    among: Round,
    work: Callable[[], object],
    conclude: Callable[[list[Any]], object],
    seconds: float,
    what: str,
    failure: type[RankmeshError],
) -> Any:
    """Call ``work`` on each participant, on this thread, and return what ``conclude`` makes of all results.

    When all have arrived, every rank raises if it failed on one: that rank its own error, the others ``failure``, with
    the ranks and their reasons. Raises ``AgreementError`` as ``gather`` does.
    """
    failed: Exception | None = None
    data: object = None
    try:
        data = work()
    except Exception as error:  # noqa: BLE001  - raised below
        failed = error
    except BaseException as error:  # an interrupted rank does not wait for the others
        among.arrive(_STEP, Proposal(text=json.dumps([None, first_line(error)])))
        raise
    outcome = _gathered(among, data, conclude, seconds, what, None if failed is None else first_line(failed))
    among.leave(outcome, stay=True, all_read=True)
    if failed is not None:
        raise failed
    if not outcome.agreed:
        kind = failure if outcome.reason == "failed" else AgreementError
        raise kind(outcome.message, rank=among.rank, ranks=outcome.ranks, missing=outcome.missing)
    return outcome.value


def gather_results(
    among: Round,
    work: Callable[[], object],
    conclude: Callable[[list[Any]], object],
    seconds: float,
    what: str,
    undo: Callable[[], object] = lambda: None,
) -> Any:
    """Call ``work`` on each participant, at the same time, and return what ``conclude`` makes of all results.

    Raises ``ConnectError`` with the same cause on every rank when work fails or takes longer than ``seconds``, or when
    a participant is lost. A collective never returns when a member is stopped, so a thread does the work and is left
    behind then; work that has succeeded, or does so later, is undone by ``undo``. Over a channel without a network, as
    in a simulation, this uses no thread.
    """
    if not among.channel.remote:
        return gather(among, work(), conclude, seconds, what)
    made = submit(work, "rankmesh-work")
    try:
        outcome = _listen(among, made, seconds)
        failed = made.exception() if made.done() else None
        if outcome is None and made.done() and failed is None:
            outcome = _gathered(among, made.result(), conclude, seconds, what)
        outcome = outcome or among.conclude(_STEP, lambda arrivals: _blamed(arrivals, seconds, what, failed))
        among.leave(outcome, stay=True, all_read=True)
        if not outcome.agreed:
            if outcome.ranks == (among.rank,) and isinstance(failed, RankmeshError):
                raise failed
            message = f"rank {among.rank}: {what} stopped, as {outcome.message}"
            values = {"ranks": list(outcome.ranks), "missing": list(outcome.missing)}
            raise ConnectError(message, rank=among.rank, **values) from failed
    except BaseException as error:
        made.add_done_callback(lambda done: None if done.exception() else undo())
        if not isinstance(error, RankmeshError):
            among.withdraw(_STEP, error)
        raise
    return outcome.value


def _gathered(
    among: Round,
    data: object,
    conclude: Callable[[list[Any]], object],
    seconds: float,
    what: str,
    problem: str | None = None,
) -> Outcome:
    def all_arrived(arrivals: Arrivals) -> Outcome:
        given = {rank: json.loads(texts[-1]) for rank, texts in arrivals.texts.items()}
        problems = {rank: why for rank, (_, why) in given.items() if why is not None}
        if problems:
            return Outcome("failed", tuple(problems), message=by_rank(problems))
        return Outcome(value=conclude([given[rank][0] for rank in among.participants]))

    every = or_missing(all_arrived, seconds, what)
    return among.step(_STEP, Proposal(text=json.dumps([data, problem])), every, WaitPolicy(seconds))


def by_rank(problems: Mapping[int, str]) -> str:
    """Return the problems of ranks in words, of a few ranks."""
    return "; ".join(f"{in_words([rank])}: {problem}" for rank, problem in list(problems.items())[:_SHOWN])


def _listen(among: Round, made: futures.Future[object], seconds: float) -> Outcome | None:
    """Wait until the work is done, or there is an outcome; None where neither comes within so many seconds."""
    end, look, outcome = time.monotonic() + seconds, among.moment / _LOOKS, None
    if not futures.wait([made], min(look, seconds)).done:
        # The work may wait for the store, and so hold the connection that both have.
        among.channel = among.ask(among.channel.again)
        outcome = among.listen(_STEP)
    while outcome is None and not made.done() and (left := end - time.monotonic()) > 0:
        if not futures.wait([made], min(look, left)).done:
            outcome = among.listen(_STEP)
    return outcome


def _blamed(arrivals: Arrivals, seconds: float, what: str, failed: BaseException | None) -> Outcome:
    """Return the unresponsive rank; else the rank whose work failed, or was unfinished when the time was over."""
    arrivals.probe()
    unresponsive = arrivals.unresponsive()
    if unresponsive:
        return lost(unresponsive, f"took part in {what}")
    rank = arrivals.round.rank
    why = f"failed ({first_line(failed) or type(failed).__name__})" if failed else f"took longer than {seconds:g} s"
    return Outcome("failed", (rank,), message=f"rank {rank} {why}; look at its log, or give a longer timeout")


def or_missing(all_arrived: Conclude, seconds: float, what: str) -> Conclude:
    """Conclude with all that arrived; else report who is missing, or that the last to arrive is lost."""

    def conclude(arrivals: Arrivals) -> Outcome:
        if arrivals.complete:
            return all_arrived(arrivals)
        absent = arrivals.absent
        if absent:
            size = len(arrivals.round.participants)
            message = (
                f"waited {round(seconds, 1):g} s for {in_words(absent)}, which did not call {what} "
                f"({size - len(absent)} of {size} did); look at the logs of the missing ranks"
            )
            return Outcome("missing", tuple(absent), tuple(absent), message=message)
        arrivals.probe()
        unresponsive = arrivals.unresponsive()
        return lost(unresponsive, f"called {what}") if unresponsive else all_arrived(replace(arrivals, complete=True))

    return conclude
