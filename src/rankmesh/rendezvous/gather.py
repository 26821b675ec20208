"""Gather: every participant gives data, one concludes from all of it, all get the conclusion.

```
rank 0  ── {"host": "a"} ──┐
rank 1  ── {"host": "b"} ──┤ conclude([{"host": "a"}, {"host": "b"}])  ──>  the same on every rank
```
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rankmesh.errors import AgreementError, in_words
from rankmesh.rendezvous.arrivals import Arrivals, Conclude, lost
from rankmesh.rendezvous.round import Round
from rankmesh.rendezvous.step import Outcome, Patience, Proposal

__all__ = ["gather", "or_missing"]


def gather(among: Round, data: object, conclude: Callable[[list[Any]], object], seconds: float, what: str) -> Any:
    """What ``conclude`` makes of the data of all participants, in their order, as JSON data on each of them.

    ``what`` names the call for messages. Raises ``AgreementError`` on every rank, naming those that do not arrive
    within ``seconds``, and ``StoreLost`` when the store does not answer.
    """

    def all_arrived(arrivals: Arrivals) -> Outcome:
        texts = arrivals.texts
        return Outcome(value=conclude([json.loads(texts[rank][-1]) for rank in among.participants]))

    outcome = among.step(
        "gather", Proposal(text=json.dumps(data)), or_missing(all_arrived, seconds, what), Patience(seconds)
    )
    among.leave(outcome, stay=True)
    if not outcome.agreed:
        raise AgreementError(
            f"rank {among.rank}: {outcome.message}", rank=among.rank, ranks=outcome.ranks, missing=outcome.missing
        )
    return outcome.value


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
