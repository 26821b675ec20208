"""The schedule: one order of what the ranks of a world do to make the groups of all plans of a job.

```
plan       kind     rank 0   rank 1   rank 2   rank 3      in a world bound to a device
encoder    dp       split    split    decline  decline     every rank takes part in every split,
llm        tp       decline  decline  split    split       ranks in no mesh too
llm        dp_cp    decline  decline  split    split
```

Elsewhere only the members of a group make it, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankmesh.backend.torch_private import DefaultGroup
from rankmesh.core.plan import Plan

__all__ = ["Step", "schedule"]


@dataclass(frozen=True)
class Step:
    """One kind of one plan of the job; ``splits`` says that all ranks take part, members or not."""

    key: str
    kind: str
    splits: bool


def schedule(plans: Mapping[str, Plan], world: DefaultGroup) -> list[Step]:
    """The steps in which the groups of these plans are made: the same on every rank, lazy kinds left out."""
    return [
        Step(key, spec.name, spec.name in splits)
        for key, plan in plans.items()
        for splits in (_splits(plan, world),)
        for spec in plan.specs
        if not spec.options.lazy
    ]


def _splits(plan: Plan, world: DefaultGroup) -> frozenset[str]:
    """The kinds for which some rank splits the world's communicator, so that all others must decline the split."""
    if not world.splits:
        return frozenset()
    firsts = {names[0] for names in plan.sharing}
    return frozenset(
        spec.name
        for spec in plan.specs
        if spec.name in firsts and plan.groups(spec.name).size > 1 and world.splits_for(spec.options.backend)
    )
