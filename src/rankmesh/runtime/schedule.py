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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.protocol import Backend, GroupRequest, Kind
from rankmesh.core.local import LocalGroup, LocalGroups
from rankmesh.core.plan import Plan
from rankmesh.core.rank_range import RankRange
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import ConnectError
from rankmesh.runtime.naming import described, process_group_name

__all__ = [
    "Step",
    "check_kinds",
    "check_lazy",
    "check_world",
    "kind_of",
    "participants",
    "requested",
    "schedule",
]


@dataclass(frozen=True)
class Step:
    """An entry of this rank's schedule for the plan ``key``: make its group of a kind, or decline the whole kind."""

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


# -- whether a world can serve a plan, and which of its ranks the plan concerns ---------------------------------------


def participants(plans: Iterable[Plan], world: DefaultGroup) -> RankRange:
    """Return the ranks that agree on these plans: the world for several, none, and a plan with a ``world_size``.

    A plan without one may be for a part of the world, whose ranks then agree without the others.
    """
    given = list(plans)
    if len(given) != 1 or given[0].fixed_world or given[0].mesh.rank_range.stop > world.size:
        return RankRange(0, world.size)
    covered = given[0].mesh.rank_range
    return RankRange(covered.offset, covered.size)


def check_world(plan: Plan, world: DefaultGroup, *, collective: bool = False) -> None:
    """Refuse a world of another size, a mesh outside it, and a rank that the plan leaves out without saying so.

    A part of the world cannot connect alone where every rank takes part in making each group.
    """
    together = world.splits or collective
    covered = plan.mesh.rank_range
    if plan.fixed_world and plan.world_size != world.size:
        raise ConnectError(
            f"the plan is for {plan.world_size} ranks, but the world has {world.size}; "
            f"start {plan.world_size} ranks, or make the plan with world_size={world.size}",
            plan_world_size=plan.world_size,
            world_size=world.size,
        )
    if covered.stop > world.size:
        raise ConnectError(
            f"the mesh covers {covered}, but the last rank of this world of {world.size} is {world.size - 1}; start "
            f"{covered.stop} ranks, or make a smaller mesh",
            stop=covered.stop,
            world_size=world.size,
        )
    if not plan.fixed_world and (
        world.rank not in covered or not covered.consecutive or (together and covered.size < world.size)
    ):
        raise ConnectError(
            f"the plan covers {covered} and leaves out others of this world of {world.size} (this is rank "
            f"{world.rank}); enlarge the mesh, or say Plan(..., world_size={world.size}) if it is meant to",
            rank=world.rank,
            world_size=world.size,
        )


def check_lazy(plan: Plan, world: DefaultGroup) -> None:
    """In a world bound to a device every rank takes part in every split, so no group can wait for its members."""
    lazy = next((spec for spec in plan.specs if spec.options.lazy and world.splits_for(spec.options.backend)), None)
    if lazy is not None:
        raise ConnectError(
            f"group {lazy.name!r} is lazy, but the world is bound to {world.bound_device}: all ranks together split "
            "its NCCL groups from the world; remove lazy, or call init_process_group() without device_id",
            group=lazy.name,
        )


def check_kinds(plan: Plan, world: DefaultGroup, backend: Backend) -> None:
    """Refuse what the backend cannot make: every kind of the plan is checked, also one of other ranks' groups."""
    for spec in plan.specs:
        if plan.groups(spec.name).size > 1 and not world.dry:
            backend.check(kind_of(plan, spec, world))
