"""Connect: from a plan to live groups, in a world that torch.distributed has initialised.

```
check the world  ->  agree  ->  create own groups, in plan order  ->  complete  ->  LiveGroups
                     (all hold one plan)                           (all have their groups)
```
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from rankmesh.errors import ConnectError, PlanError
from rankmesh.groups import torch_private
from rankmesh.groups.agree import agree
from rankmesh.groups.board import Claim
from rankmesh.groups.complete import complete, give_up
from rankmesh.groups.limits import time_limit
from rankmesh.groups.live import LiveGroups
from rankmesh.groups.naming import process_group_name
from rankmesh.plan.plan import Plan
from rankmesh.plan.saved import contents

__all__ = ["DEFAULT_TIMEOUT", "connect"]

DEFAULT_TIMEOUT = 300.0

_Result = TypeVar("_Result")

# How many meetings of one plan may have failed since it was connected.
_REMEMBERED = 16


def connect(plan: Plan, *, timeout: float | timedelta = DEFAULT_TIMEOUT) -> LiveGroups:
    """The live groups of this rank: a mapping by name and a context manager.

    Called by every rank that the plan's mesh covers, in a world that ``init_process_group`` made. The ranks first
    agree on the plan; then each creates the groups that it is in, and waits until all have done so. Each of these
    steps may take ``timeout`` (seconds, or a timedelta). A world of ``backend="fake"`` is a dry run, in which nobody
    is there to agree.

    Raises ``PlanError`` for what is no plan or no time limit; ``ConnectError`` for a world that cannot serve the plan,
    and on every rank when one could not make its groups; ``AgreementError`` on every rank when the ranks hold different
    plans or one never arrives. A failed connect leaves nothing behind.
    """
    started = time.perf_counter()
    _check_plan(plan)
    limit = time_limit(timeout)
    world = torch_private.world()
    _check_world(plan, world)
    _check_lazy(plan, world)
    phases = {"check": time.perf_counter() - started}
    claim = _claim(plan, world)
    generation = _timed(phases, "agree", lambda: agree(world.store, claim, limit)) if claim else 0
    try:
        live = _timed(phases, "create", lambda: _made(LiveGroups(plan, world, generation, phases, limit)))
    except BaseException as error:
        if claim:
            give_up(world.store, claim, generation, error)
        raise
    if claim:
        try:
            _timed(phases, "complete", lambda: complete(world.store, claim, generation, limit))
        except BaseException as error:
            live.close()
            # Interrupted, or without an answer: the others need not wait for a rank that goes away.
            give_up(world.store, claim, generation, error)
            raise
    phases["all"] = time.perf_counter() - started
    return live


def _claim(plan: Plan, world: torch_private.World) -> Claim | None:
    """What this rank brings to the meeting; None where nobody meets: in a dry run, and outside the mesh."""
    if world.dry or world.rank not in plan.mesh:
        return None
    if world.store is None:
        raise ConnectError(
            f"received a world of backend {world.backend!r}, which keeps no store; the ranks agree through the store; "
            "initialise the world with a store (gloo or nccl), and give groups backend='mpi' where they need it",
            backend=world.backend,
        )
    fields = {**contents(plan), "version": _version(), "live_world_size": world.size}
    return Claim(world.rank, world.size, plan.mesh.span, fields)


def _made(live: LiveGroups) -> LiveGroups:
    """The same with its process groups; without any, when one of them cannot be made."""
    _refuse_second(live)
    try:
        live.create_all()
    except BaseException:
        live.close()
        raise
    return live


def _timed(phases: dict[str, float], phase: str, work: Callable[[], _Result]) -> _Result:
    started = time.perf_counter()
    result = work()
    phases[phase] = time.perf_counter() - started
    return result


def _refuse_second(live: LiveGroups) -> None:
    """A plan whose groups are still alive is not connected again: two owners would destroy one set of groups."""
    plan, generation = live.plan, live.generation
    own = next((group for group in live.own.values() if not group.options.lazy), None)
    if own is None:
        return
    for earlier in range(max(0, generation - _REMEMBERED), generation + 1):
        if torch_private.is_registered(process_group_name(plan.digest, earlier, own.name, own.ranks)):
            raise ConnectError(
                f"received a plan that is connected already (generation {earlier}); its groups have one owner; use "
                "them, or close() them first, or give the second plan a name of its own: Plan(..., name='second')",
                generation=earlier,
            )


def _version() -> str:
    from rankmesh import __version__

    return __version__


def _check_lazy(plan: Plan, world: torch_private.World) -> None:
    """In a world bound to a device every rank takes part in every split, so no group can wait for its members."""
    lazy = next((spec for spec in plan.specs if spec.options.lazy and world.splits_for(spec.options.backend)), None)
    if lazy is not None:
        raise ConnectError(
            f"received lazy group {lazy.name!r} in a world that is bound to {world.bound_device}; its NCCL groups are "
            "split from the world by all ranks together, so none can be made at its members' first use; remove lazy, "
            "or call init_process_group() without device_id",
            group=lazy.name,
        )


def _check_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(
            f"received {type(plan).__name__} to connect; it must be a plan, which says which groups are wanted; "
            "use Plan(mesh, [GroupSpec('tp'), ...]) or one of rankmesh.recipes",
            received=plan,
        )


def _check_world(plan: Plan, world: torch_private.World) -> None:
    span = plan.mesh.span
    if plan.fixed_world and plan.world_size != world.size:
        raise ConnectError(
            f"received a plan for a world of {plan.world_size} ranks in a world of {world.size}; they must be equal; "
            f"start {plan.world_size} ranks, or make the plan with world_size={world.size}",
            plan_world_size=plan.world_size,
            world_size=world.size,
        )
    if span.stop > world.size:
        raise ConnectError(
            f"received a mesh over ranks {span.offset} to {span.stop - 1} in a world of {world.size}, whose last rank "
            f"is {world.size - 1}; start {span.stop} ranks, or make a smaller mesh",
            stop=span.stop,
            world_size=world.size,
        )
    if not plan.fixed_world and (world.rank not in span or (world.splits and span.size < world.size)):
        raise ConnectError(
            f"received a plan over ranks {span.offset} to {span.stop - 1} on rank {world.rank} of {world.size}; the "
            f"plan leaves ranks out; enlarge the mesh, or say Plan(..., world_size={world.size}) if it is meant to",
            rank=world.rank,
            world_size=world.size,
        )
