"""Groups by the functions that callers have: torch's own, or what a program puts in place of torch's.

Every rank of the world calls them with the same ranks, as for ``new_group``, and who makes a group destroys it. The
groups for gathers are made of a plan, and ``destroy_model_parallel`` ends them.

A program that replaces ``torch.distributed.new_group``, ``create_group`` or ``get_nccl_options`` of the parallel state
wants its own to be called: ``called_groups`` then makes every group as Megatron-Core does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rankmesh.core.mesh import Mesh
from rankmesh.core.nccl_config import with_nccl_config
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.dialects.megatron.nccl import section_of
from rankmesh.dialects.megatron.refusals import NotInitialized, refusals
from rankmesh.runtime.connect import connect
from rankmesh.runtime.live import LiveGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rankmesh.dialects.megatron.state import State

__all__ = ["CalledGroups", "all_gather", "called_groups", "hierarchical", "hybrid"]

Make = Callable[..., Any]
Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CalledGroup:
    """A process group that a caller's function gave, and its global ranks."""

    pg: ProcessGroup
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


class CalledGroups(dict[str, CalledGroup]):
    """The groups of this rank that a caller's functions made, by kind. They are the caller's to destroy."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.closed = False

    def __missing__(self, kind: str) -> CalledGroup:
        self.plan.of(dist.get_rank())[kind]  # raises NotAMember or UnknownGroup, with the members
        raise KeyError(kind)

    def close(self) -> None:
        """Forget the groups."""
        self.clear()
        self.closed = True


def called_groups(plan: Plan, sections: Sections, make: Make, options: Callable[..., Any]) -> CalledGroups:
    """Every group of a plan by ``make``: on every rank, all groups of each kind, in the plan's order.

    ``make`` is called as ``create_group``, ``options`` as ``get_nccl_options``, with the sections of the configuration.
    """
    rank, found = dist.get_rank(), CalledGroups(plan)
    for spec in plan.specs:
        section = section_of(spec.name)
        timeout = None if spec.options.timeout is None else timedelta(seconds=spec.options.timeout)
        for members in plan.groups(spec.name).tolist():
            pg = make(
                members,
                timeout=timeout,
                backend=spec.options.backend,
                pg_options=options(section, sections) if section and not spec.options.backend else None,
                use_local_synchronization=not plan.fixed_world,
                group_desc=spec.name.upper(),
            )
            if rank in members:
                found[spec.name] = CalledGroup(pg, tuple(members))
    return found


def hierarchical(
    make: Make,
    rank: int,
    ranks: Sequence[int],
    sizes: Sequence[int],
    with_gloo: bool,
    pg_options: Any,
    timeout: timedelta | None,
    group_desc: str | None,
) -> tuple[list[ProcessGroup], list[ProcessGroup | None]]:
    """The groups of each level of a hierarchy of these ranks, and their gloo twins: those of ``rank``."""
    own, twins = [], []
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(sizes)
    for level, members in _levels(ranks, sizes):
        name = f"HIERARCHICAL_{group_desc}"
        group = make(members, timeout=timeout, pg_options=options[level], group_desc=f"{name}_L{level}")
        twin = None
        if with_gloo:
            twin = make(members, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO_L{level}")
        if rank in members:
            own.append(group)
            twins.append(twin)
    return own, twins


def hybrid(make: Make, rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, ProcessGroup]:
    """The groups of 2, 4, 8, ... up to half of these ranks that ``rank`` is in, by size."""
    found = {}
    for exponent in range(1, len(ranks).bit_length() - 1):
        size = 2**exponent
        for _, members in _levels(ranks, (size, len(ranks) // size), only=0):
            group = make(members, pg_options=pg_options, group_desc=f"HYBRID_DP_CP_GROUP_{size}")
            if rank in members:
                found[size] = group
    return found


def _levels(ranks: Sequence[int], sizes: Sequence[int], only: int | None = None) -> Iterator[tuple[int, list[int]]]:
    """Level and members of each group of a hierarchy, level by level."""
    with refusals():
        groups = Mesh(position=len(ranks)).groups("position")
        levels = range(len(sizes)) if only is None else (only,)
        made = [(level, groups.level_of(tuple(sizes), level).tolist()) for level in levels]
    for level, listed in made:
        yield from ((level, [ranks[position] for position in members]) for members in listed)


def all_gather(
    state: State, experts: bool, timeout: timedelta | None, sections: Sections
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Communicators of their own over dp_cp and, for experts, over ep_dp; the state owns them."""
    if state.live is None:
        raise NotInitialized("this parallel state has no groups to add to; call initialize_model_parallel() first")
    base = state.live.plan
    specs = [GroupSpec("dp_cp_ag", "dp-cp", overlap="all_gather", timeout=timeout)]
    if experts:
        specs.append(GroupSpec("expt_dp_ag", "edp", view="expert", overlap="all_gather", timeout=timeout))
    world_size = base.world_size if base.fixed_world else None
    plan = Plan(base.mesh, specs, world_size=world_size, name=f"{base.name}/all_gather")
    live: LiveGroups | CalledGroups
    if isinstance(state.live, CalledGroups):
        names = vars(state.module)
        live = called_groups(plan, sections, names["create_group"], names["get_nccl_options"])
    else:
        given = {kind: sections[section] for kind in plan.kinds if (section := str(section_of(kind))) in sections}
        live = connect(with_nccl_config(plan, given) if given else plan)
    state.added.append(live)
    return live["dp_cp_ag"].pg, live["expt_dp_ag"].pg if experts else None
