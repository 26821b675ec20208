"""The report: the verdict first, then the evidence, cause by cause.

```
late: rank 3 behind by 1 call of dp@tp1: it is in no call at train.py:8 in load; rank 1 waits in all_reduce, ...

late       rank 3   all_reduce, call 5 of dp@tp1 of ranks 1, 3; 3 ranks wait because of it
           rank 1   train.py:31 in step
           rank 3   train.py:8 in load
waiting    ranks 0, 1, 2
```
"""

from __future__ import annotations

from collections.abc import Iterator

from rankmesh.debug.doctor.causes import Cause
from rankmesh.debug.doctor.diagnosis import Diagnosis
from rankmesh.errors import in_words

__all__ = ["report"]

_CAUSES, _SITES = 8, 8


def report(diagnosis: Diagnosis) -> str:
    """The diagnosis in words."""
    lines = [diagnosis.verdict]
    if diagnosis.causes:
        lines += ["", *(line for cause in diagnosis.causes[:_CAUSES] for line in _cause(cause))]
    if len(diagnosis.causes) > _CAUSES:
        lines.append(f"{'':10} and {len(diagnosis.causes) - _CAUSES} more")
    if unrecorded := diagnosis.unrecorded:
        lines.append(f"{'unknown':10} {in_words(unrecorded)} left no recording")
    if diagnosis.waiting:
        lines.append(f"{'waiting':10} {in_words(diagnosis.waiting)} of {diagnosis.world_size}")
    return "\n".join(lines)


def _cause(cause: Cause) -> Iterator[str]:
    waits = "1 rank waits" if cause.explains == 1 else f"{cause.explains} ranks wait"
    because = f"; {waits} because of it" if cause.explains else ""
    operation = f"{cause.operation}, " if cause.operation else ""
    members = in_words(cause.group.members)
    yield f"{cause.cause:10} {in_words(cause.ranks)}: {operation}call {cause.call} of {cause.group}, {members}{because}"
    yield f"{'':10} {cause.evidence}"
    for rank, site in sorted(cause.sites.items())[:_SITES]:
        yield f"{'':10} rank {rank}  {site}"
