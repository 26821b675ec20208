"""Groups that callers make themselves, beside those of ``initialize_model_parallel``.

They are torch's own: every rank of the world calls these functions with the same ranks, as for ``new_group``, and who
makes a group destroys it. ``create_all_gather_groups`` is made of a plan, and ``destroy_model_parallel`` ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rankmesh.dialects.megatron.refusals import NotInitialized, refusals
from rankmesh.dialects.megatron.state import Function, State
from rankmesh.groups.connect import connect
from rankmesh.layout.mesh import Mesh
from rankmesh.plan.nccl_config import with_nccl_config
from rankmesh.plan.plan import Plan
from rankmesh.plan.spec import GroupSpec

__all__ = ["functions"]


def functions(state: State) -> Iterator[Function]:
    """Every function that makes a group for its caller."""

    def create_group(  # type: ignore[no-untyped-def]
        ranks=None, timeout=None, backend=None, pg_options=None, use_local_synchronization=False, group_desc=None
    ):
        """A process group of torch, which ``update_pg_timeout`` then knows on its members."""
        group = dist.new_group(
            ranks=ranks,
            timeout=timeout,
            backend=backend,
            pg_options=pg_options,
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
        )
        known = state.globals["_global_process_group_list"] or [None]
        if ranks is None or dist.get_rank() in ranks:
            known = [*known, group]
        state.globals["_global_process_group_list"] = known
        return group

    yield create_group

    def create_hierarchical_groups(  # type: ignore[no-untyped-def]
        rank,
        ranks,
        hierarchical_group_sizes,
        create_gloo_process_groups=False,
        pg_options=None,
        timeout=None,
        group_desc=None,
    ):
        """The groups of each level of a hierarchy of these ranks, and their gloo twins: those of ``rank``, two lists.

        A twin takes no NCCL options, which Megatron-Core hands it.
        """
        own, twins = [], []
        options = pg_options if isinstance(pg_options, list) else [pg_options] * len(hierarchical_group_sizes)
        for level, members in _levels(ranks, hierarchical_group_sizes):
            name = f"HIERARCHICAL_{group_desc}"
            make = state.globals["create_group"]
            group = make(members, timeout=timeout, pg_options=options[level], group_desc=f"{name}_L{level}")
            twin = None
            if create_gloo_process_groups:
                twin = make(members, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO_L{level}")
            if rank in members:
                own.append(group)
                twins.append(twin)
        return own, twins

    yield create_hierarchical_groups

    def create_hybrid_dp_cp_groups(rank, ranks, pg_options):  # type: ignore[no-untyped-def]
        """The groups of 2, 4, 8, ... up to half of these ranks that ``rank`` is in, by size.

        Where one of these sizes does not divide the number of ranks, this is refused: Megatron-Core then has a group
        that is smaller than its name.
        """
        found = {}
        for exponent in range(1, len(ranks).bit_length() - 1):
            size = 2**exponent
            for _, members in _levels(ranks, (size, len(ranks) // size), only=0):
                group = state.globals["create_group"](
                    members, pg_options=pg_options, group_desc=f"HYBRID_DP_CP_GROUP_{size}"
                )
                if rank in members:
                    found[size] = group
        return found

    yield create_hybrid_dp_cp_groups
    yield from _all_gather(state)


def _levels(ranks: Sequence[int], sizes: Sequence[int], only: int | None = None) -> Iterator[tuple[int, list[int]]]:
    """Level and members of each group of a hierarchy, level by level."""
    with refusals():
        groups = Mesh(position=len(ranks)).groups("position")
        levels = range(len(sizes)) if only is None else (only,)
        made = [(level, groups.level_of(tuple(sizes), level).tolist()) for level in levels]
    for level, listed in made:
        yield from ((level, [ranks[position] for position in members]) for members in listed)


def _all_gather(state: State) -> Iterator[Function]:
    def create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None):  # type: ignore[no-untyped-def]
        """Communicators of their own for overlapping gathers: over dp_cp, and over the expert data-parallel ranks.

        The second is None unless asked for. The options of dp_cp and ep_dp in ``nccl_comm_cfgs`` are theirs.
        """
        if state.live is None:
            raise NotInitialized("received no parallel state to add groups to; call initialize_model_parallel() first")
        name = f"{state.live.plan.name}/all_gather/{len(state.added)}"
        live = connect(_gathers(state.live.plan, name, for_expert_parallelism, timeout, nccl_comm_cfgs or {}))
        state.added.append(live)
        return live["dp_cp_ag"].pg, live["expt_dp_ag"].pg if for_expert_parallelism else None

    yield create_all_gather_groups


def _gathers(
    base: Plan, name: str, experts: bool, timeout: timedelta | None, sections: Mapping[str, Mapping[str, Any]]
) -> Plan:
    specs = [GroupSpec("dp_cp_ag", "dp-cp", overlap="all_gather", timeout=timeout)]
    wanted = {"dp_cp_ag": sections.get("dp_cp")}
    if experts:
        specs.append(GroupSpec("expt_dp_ag", "edp", view="expert", overlap="all_gather", timeout=timeout))
        wanted["expt_dp_ag"] = sections.get("ep_dp")
    plan = Plan(base.mesh, specs, world_size=base.world_size, name=name)
    given = {kind: section for kind, section in wanted.items() if section}
    return with_nccl_config(plan, given) if given else plan
