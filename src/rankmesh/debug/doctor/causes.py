"""Causes: why ranks wait, in the words of the report.

```
dead        left no recording, and is waited for: its process is gone, stopped, or does not respond
absent      did not enter a call: it is in another one, went past it, or its program has ended
late        is in no call, and behind by some calls: a straggler
different   made another operation, or other sizes, dtypes, root or reduction, at the same call
order       made at this call what the others make at another
crosswise   ranks wait for each other in several groups: a deadlock
stuck       entered a call and did not come out of it: the network or a device
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rankmesh.debug.doctor.groups import KnownGroup
from rankmesh.debug.doctor.history import History, PendingCall
from rankmesh.errors import in_words

__all__ = ["CAUSES", "Cause", "cause_of", "wait_in"]

_SHOWN = 8
CAUSES = ("different", "order", "dead", "absent", "late", "crosswise", "stuck")


@dataclass(frozen=True)
class Cause:
    """One cause: which ranks, at which call of which group, and the evidence in words.

    ``call`` counts the calls of the group, 0 if it is not known; ``sites`` are lines of code by rank; ``explains`` is
    how many ranks wait because of it. If it is known by lines of logs, reports, stacks or errors, ``source`` are their
    files, and ``confidence`` is "certain", "likely" or "possible".
    """

    cause: str
    ranks: tuple[int, ...]
    group: KnownGroup
    call: int
    operation: str
    evidence: str
    sites: Mapping[int, str] = field(default_factory=dict)
    explains: int = 0
    confidence: str = ""
    source: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the cause as plain data."""
        return {
            "cause": self.cause,
            "ranks": list(self.ranks),
            "kind": self.group.kind,
            "group": self.group.label,
            "call": self.call,
            "operation": self.operation,
            "members": list(self.group.members),
            "evidence": self.evidence,
            "sites": {str(rank): site for rank, site in sorted(self.sites.items())},
            "explains": self.explains,
            "confidence": self.confidence,
            "source": self.source,
        }


def cause_of(history: History, cause: str, ranks: Sequence[int], call: PendingCall, evidence: str) -> Cause:
    """Return a cause at a call, with the lines of those who wait in it and of its ranks."""
    sites = {rank: site for rank in call.waiting[:_SHOWN] if (site := _site(history, call, rank))}
    for rank in ranks[:_SHOWN]:
        about = history.recordings[rank].in_call if rank in history.recordings else None
        if about is not None and about.site:
            sites[rank] = about.site
    return Cause(cause, tuple(ranks), call.group, call.number, call.operation, evidence, sites)


def _site(history: History, call: PendingCall, rank: int) -> str:
    """Return the line of a call; where the rank waits if it has not yet recorded lines."""
    about = history.recordings[rank].in_call
    waits = about.site if about is not None and about.operation else ""
    return call.site or history.site(call.group, rank, call.number) or waits


def wait_in(call: PendingCall) -> str:
    """Describe the wait in a call: ``ranks 1, 2 wait in all_reduce, call 4 of dp@tp1``."""
    if call.failed:
        return f"{in_words(call.waiting)} made {call.name}, which failed"
    return f"{in_words(call.waiting)} {'waits' if len(call.waiting) == 1 else 'wait'} in {call.name}"
