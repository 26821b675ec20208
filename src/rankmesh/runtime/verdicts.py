"""Verdicts: what a meeting tells every rank of it; go on, or which ranks are missing, lost or different.

```
{"go": true}
{"go": false, "ranks": [2], "missing": [], "fields": ["mesh.axes.tp"], "message": "..."}
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankmesh.errors import in_words
from rankmesh.runtime.differences import differences

__all__ = ["GO", "Verdict", "different", "failed", "lost"]

Verdict = dict[str, Any]

_SHOWN = 8

GO: Verdict = {"go": True, "ranks": [], "missing": [], "fields": [], "message": ""}


def failed(message: str, ranks: Sequence[int], *, missing: Sequence[int] = (), fields: Sequence[str] = ()) -> Verdict:
    """The end of a meeting: the ranks to look at, those of them that are not there, the fields that differ."""
    return {"go": False, "ranks": list(ranks), "missing": list(missing), "fields": list(fields), "message": message}


def lost(ranks: Sequence[int], after: str = "had arrived") -> Verdict:
    """Ranks that came to the meeting and are gone."""
    was = "was" if len(ranks) == 1 else "were"
    message = f"{in_words(ranks)} {was} not heard of again, which {after}; look at the logs of the missing ranks"
    return failed(message, ranks, missing=ranks)


def different(waiting: Mapping[str, Sequence[int]], documents: Mapping[str, dict[str, Any]]) -> Verdict:
    """Name the ranks that differ from the majority, and the fields with both values.

    ``waiting`` has the ranks by what they claim, ``documents`` the fields of each claim.
    """
    majority = max(waiting, key=lambda claim: (len(waiting[claim]), -min(waiting[claim])))
    lines: list[str] = []
    fields: list[str] = []
    odd: list[int] = []
    for claim, ranks in waiting.items():
        if claim == majority:
            continue
        odd += ranks
        changes = _changes(documents[majority], documents[claim])
        fields += [field for field, _, _ in changes if field not in fields]
        shown = "; ".join(f"{field} is {theirs}, not {ours}" for field, ours, theirs in changes[:_SHOWN])
        lines.append(f"{in_words(ranks)}: {shown or 'a plan too large to be shown'}")
    message = (
        f"the ranks do not hold the same plan, so no group was created; {' | '.join(lines)} "
        f"(as on {in_words(waiting[majority])}); give every rank the same plan"
    )
    return failed(message, sorted(odd), fields=fields)


def _changes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The fields that differ; of a rank that cannot serve its plan only why, as that is all it tells."""
    changes = differences(ours, theirs)
    return [change for change in changes if change[0] == "refused"] or changes
