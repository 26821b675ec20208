"""Names of process groups: pure functions of the plan's digest, the epoch, the kind and the place of the group.

```
tp/3/0f1e2d3c4b5a6978     the name:          kind, epoch, hash of plan and members
llm:tp@pp1,dp0            the description:   plan of the job, kind, coordinate
```

torch's own hashed names count the groups that a rank already has, so two ranks that own different numbers of groups
wait for each other under two names. Here nothing local enters the name. The plan and the members' places
distinguish a group from every other group of the plan: a name costs as much for two members as for a million.

>>> process_group_name("ab" * 32, 0, "tp", "tp@pp1")
'tp/0/b39e4b61ac27105e'
"""

from __future__ import annotations

import hashlib

from rankmesh.core.local import LocalGroup
from rankmesh.core.plan import Plan

__all__ = ["described", "process_group_name"]


def process_group_name(digest: str, epoch: int, kind: str, place: str, key: str = "") -> str:
    """Return the name under which all members register one process group: kind, epoch, 16 hexadecimal digits.

    ``place`` is the group in words, its kind and the coordinate of its members; ``key`` tells the plans of one job
    apart, which may be equal.
    """
    text = f"{digest}/{epoch}/{key}{'/' if key else ''}{place}"
    return f"{kind}/{epoch}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def described(plan: Plan, key: str, local: LocalGroup) -> str:
    """Kind and coordinate, after the name of the plan where a job has several: ``llm:tp@pp1,dp0``."""
    owner = plan.name or key
    return f"{owner}:{local}" if owner else str(local)
