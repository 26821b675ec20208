"""Fitting: whether a live world can serve a plan, and which of its ranks the plan concerns."""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.protocol import Backend
from rankmesh.core.plan import Plan
from rankmesh.core.rank_range import RankRange
from rankmesh.errors import ConnectError
from rankmesh.runtime.schedule import kind_of

__all__ = ["check_kinds", "check_lazy", "check_world", "participants"]


def participants(plans: Iterable[Plan], world: DefaultGroup) -> RankRange:
    """Return the ranks that agree on these plans: all of the world, for a job and for a plan with a ``world_size``.

    A plan without one may be for a part of the world, whose ranks then agree without the others.
    """
    given = list(plans)
    covered = given[0].mesh.rank_range
    if len(given) > 1 or given[0].fixed_world or covered.stop > world.size:
        return RankRange(0, world.size)
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
