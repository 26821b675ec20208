"""Identify: which group of which plan a name stands for that torch shows in a log, an error or a recording.

```
tp/3/0f1e2d3c4b5a6978     the name:          kind, turn of the meeting, hash of plan and members
llm:tp@pp1,dp0            the description:   plan of the job, kind, coordinate
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rankmesh.core.local import LocalGroup
from rankmesh.core.plan import Plan
from rankmesh.errors import ConnectError, quoted
from rankmesh.runtime.naming import process_group_name

__all__ = ["Identity", "described", "identified"]


@dataclass(frozen=True)
class Identity:
    """One group of a plan: the key of the plan in its job, its kind, what its members agree on, and the members."""

    plan: Plan
    key: str
    kind: str
    coordinate: dict[str, int]
    ranks: tuple[int, ...]


def described(plan: Plan, key: str, own: LocalGroup) -> str:
    """Kind and coordinate, after the name of the plan where a job has several: ``llm:tp@pp1,dp0``."""
    owner = plan.name or key
    return f"{owner}:{own}" if owner else str(own)


def identified(text: str, plans: Mapping[tuple[str, int], Plan]) -> Identity:
    """The group of these plans, by key and turn, that a process group's name or description stands for."""
    for (key, turn), plan in reversed(list(plans.items())):
        for own in _groups(plan, text):
            named = process_group_name(plan.digest, turn, own.name, str(own), key)
            if text in (named, described(plan, key, own)):
                return Identity(plan, key, own.name, dict(own.coordinate), own.ranks)
    raise ConnectError(
        f"{quoted(text)} is not the name or description of a process group of the plans that are connected here "
        f"({', '.join(key or plan.name or 'one plan' for (key, _), plan in plans.items()) or 'none'}); "
        "connect its plan first",
        received=text,
    )


def _groups(plan: Plan, text: str) -> Iterator[LocalGroup]:
    """Every group of the kinds that the text may begin with, as its first member sees it."""
    for name, groups in plan.kinds.items():
        if text.startswith(f"{name}/") or name in text.split("@")[0].rpartition(":")[2]:
            yield from (plan.of(group[0])[name] for group in groups)
