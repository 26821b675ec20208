"""Groups that callers make themselves, beside those of ``initialize_model_parallel``.

They are torch's own: every rank of the world calls these functions with the same ranks, as for ``new_group``, and who
makes a group destroys it. The groups for gathers are made of a plan, and ``destroy_model_parallel`` ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rankmesh.core.mesh import Mesh
from rankmesh.core.nccl_config import with_nccl_config
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.dialects.megatron.refusals import NotInitialized, refusals
from rankmesh.runtime.connect import connect

__all__ = ["all_gather", "hierarchical", "hybrid"]

Make = Callable[..., Any]


def hierarchical(
    make: Make,
    rank: int,
    ranks: Sequence[int],
    sizes: Sequence[int],
    with_gloo: bool,
    pg_options: Any,
    timeout: timedelta | None,
    group_desc: str | None,
) -> tuple[list[Any], list[Any]]:
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


def hybrid(make: Make, rank: int, ranks: Sequence[int], pg_options: Any) -> dict[int, Any]:
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
    names: dict[str, Any], experts: bool, timeout: timedelta | None, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[Any, Any]:
    """Communicators of their own over dp_cp and, for experts, over ep_dp; the state of these globals owns them."""
    state = names["rankmesh_state"]
    if state.live is None:
        raise NotInitialized("received no parallel state to add groups to; call initialize_model_parallel() first")
    name = f"{state.live.plan.name}/all_gather"
    live = connect(_gathers(state.live.plan, name, experts, timeout, sections))
    state.added.append(live)
    return live["dp_cp_ag"].pg, live["expt_dp_ag"].pg if experts else None


def _gathers(
    base: Plan, name: str, experts: bool, timeout: timedelta | None, sections: Mapping[str, Mapping[str, Any]]
) -> Plan:
    specs = [GroupSpec("dp_cp_ag", "dp-cp", overlap="all_gather", timeout=timeout)]
    wanted = {"dp_cp_ag": sections.get("dp_cp")}
    if experts:
        specs.append(GroupSpec("expt_dp_ag", "edp", view="expert", overlap="all_gather", timeout=timeout))
        wanted["expt_dp_ag"] = sections.get("ep_dp")
    plan = Plan(base.mesh, specs, world_size=base.world_size if base.fixed_world else None, name=name)
    given = {kind: section for kind, section in wanted.items() if section}
    return with_nccl_config(plan, given) if given else plan
