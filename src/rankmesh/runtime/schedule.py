"""The schedule: what one rank does to make the groups of all plans of a job, in the one order of all ranks.

```
plan       kind     rank 0   rank 1   rank 2   rank 3      in a world bound to a device
encoder    dp       Split    Split    Decline  Decline     every rank takes part in every split,
llm        tp       Decline  Decline  Split    Split       ranks in no mesh too
llm        dp_cp    Decline  Decline  Split    Split
llm        embd     Local    Local    Local    Local       a group of one rank has no communicator
```

Elsewhere only the members of a group make it (``Create``), in the same order. A schedule is plain data, and the same
function of plans, rank and world wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.protocol import Backend, GroupRequest, Kind
from rankmesh.core.local import LocalGroup, LocalGroups
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.runtime.naming import described, process_group_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Create", "Decline", "Local", "Making", "Split", "Step", "execute", "kind_of", "making", "schedule"]


@dataclass(frozen=True)
class Create:
    """A group that its members make."""

    request: GroupRequest


@dataclass(frozen=True)
class Split:
    """A group that every rank of the world takes part in making."""

    request: GroupRequest


@dataclass(frozen=True)
class Local:
    """A group of this rank alone."""

    request: GroupRequest


@dataclass(frozen=True)
class Decline:
    """The part of a rank that is in no group of this kind."""

    kind: Kind


Making = Create | Split | Local


@dataclass(frozen=True)
class Step:
    """What this rank does for one kind of the plan ``key``."""

    key: str
    name: str
    action: Making | Decline


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
                steps.append(Step(key, spec.name, making(plan, key, group, world, epoch, collective=collective)))
            elif collective or (world.splits_for(spec.options.backend) and plan.groups(spec.name).size > 1):
                steps.append(Step(key, spec.name, Decline(kind_of(plan, spec, world))))
    return steps


def making(
    plan: Plan, key: str, group: LocalGroup, world: DefaultGroup, epoch: int, *, collective: bool = False
) -> Making:
    """How this rank makes one of its groups."""
    kind = kind_of(plan, group.spec, world)
    request = GroupRequest(
        kind,
        process_group_name(plan.digest, epoch, group.name, str(group), key),
        described(plan, key, group),
        group.group,
        group.rank,
        bool(group.options.lazy),
    )
    if collective:
        return Split(request)
    if group.size == 1:
        return Local(request)
    return Split(request) if world.splits_for(group.options.backend) else Create(request)


def execute(action: Making, backend: Backend, deadline: float) -> ProcessGroup:
    """Have the backend make a group."""
    if isinstance(action, Local):
        return backend.local(action.request)
    make = backend.split if isinstance(action, Split) else backend.create
    return make(action.request, deadline)


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
