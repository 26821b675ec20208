"""Causes: why ranks wait, in the words of the report.

```
dead        left no recording, and is waited for
absent      never came to a call: is elsewhere, went past it, or its program has ended
late        is in no call, and behind by some calls
different   made another operation, or other sizes, dtypes, root or reduction, at the same call
order       made at this call what the others make at another
crosswise   ranks wait for each other in several groups: a cycle
stuck       all members entered a call and none came out: the network or a device
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankmesh.debug.doctor.groups import KnownGroup

__all__ = ["CAUSES", "Cause"]

CAUSES = ("different", "order", "dead", "absent", "late", "crosswise", "stuck")


@dataclass(frozen=True)
class Cause:
    """One cause: which ranks, at which call of which group, and the evidence in words.

    ``call`` counts the calls of the group; ``sites`` are lines of code by rank; ``explains`` is how many ranks wait
    because of it.
    """

    cause: str
    ranks: tuple[int, ...]
    group: KnownGroup
    call: int
    operation: str
    evidence: str
    sites: Mapping[int, str] = field(default_factory=dict)
    explains: int = 0

    def to_dict(self) -> dict[str, object]:
        """The cause as plain data."""
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
        }
