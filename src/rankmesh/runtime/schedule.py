"""The schedule: what one rank does to make the groups of all plans of a job, in the one order of all ranks.

```
plan       kind     rank 0   rank 1   rank 2   rank 3      in a world bound to a device
encoder    dp       create   create   decline  decline     every rank takes part in every split,
llm        tp       decline  decline  create   create      ranks in no mesh too
llm        dp_cp    decline  decline  create   create
llm        embd     create   create   create   create      a group of one rank has no communicator
```

Elsewhere only the members of a group make it, in the same order, and nobody declines. A schedule is plain data, and the
same function of plans, rank and world wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.protocol import GroupRequest, Kind
from rankmesh.core.local import LocalGroup, LocalGroups
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.runtime.naming import described, process_group_name

__all__ = ["Step", "kind_of", "requested", "schedule"]


@dataclass(frozen=True)
class Step:
    """What this rank does for one kind of the plan ``key``: make the group that it is in, or decline the whole kind."""

    key: str
    name: str
    action: GroupRequest | Kind


def schedule(
    plans: Mapping[str, Plan],
    local: Mapping[str, LocalGroups],
    world: DefaultGroup,
    epoch: int = 0,
    *,
    collective: bool = False,
) -> list[Step]:
    """Return the steps of this rank; ``local`` has its part of each plan. Lazy kinds are left out.

    With a ``collective`` backend every rank takes part in every kind, lazy ones too.
    """
    steps = []
    for key, plan in plans.items():
        for spec in plan.specs:
            if plan.canonical[spec.name] != spec.name or (spec.options.lazy and not collective):
                continue
            group = local[key].get(spec.name)
            if group is not None:
                steps.append(Step(key, spec.name, requested(plan, key, group, world, epoch)))
            elif collective or (world.splits_for(spec.options.backend) and plan.groups(spec.name).size > 1):
                steps.append(Step(key, spec.name, kind_of(plan, spec, world)))
    return steps


def requested(plan: Plan, key: str, group: LocalGroup, world: DefaultGroup, epoch: int) -> GroupRequest:
    """Return the request for one of this rank's groups."""
    return GroupRequest(
        kind_of(plan, group.spec, world),
        process_group_name(plan.digest, epoch, group.name, str(group), key),
        described(plan, key, group),
        group.group,
        group.rank,
        bool(group.options.lazy),
    )


def kind_of(plan: Plan, spec: GroupSpec, world: DefaultGroup) -> Kind:
    """Return one kind of the plan as a backend makes it in this world."""
    # In a dry run nobody else is there: torch's fake backend stands for each one that the plan asks for.
    options = spec.options
    return Kind(
        spec.name,
        plan.groups(spec.name),
        world.backend if world.dry else options.backend or world.backend,
        world.timeout if options.timeout is None else timedelta(seconds=options.timeout),
        options,
    )
