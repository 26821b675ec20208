"""The life of a parallel state: initialise, change timeouts, destroy.

```
initialize    Request ── plan ── connect ── globals
destroy       close, last made first ── globals as they were before
```
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankmesh.backend.default import default_group, is_torchs_own
from rankmesh.backend.registries import set_timeout
from rankmesh.dialects.megatron.buffers import GlobalMemoryBuffer
from rankmesh.dialects.megatron.making import CalledGroups, called_groups
from rankmesh.dialects.megatron.nccl import prepare_ucc
from rankmesh.dialects.megatron.rank_generator import RankGenerator, WithPieces
from rankmesh.dialects.megatron.refusals import NotInitialized, Refused
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import ParallelState, State, in_a_world
from rankmesh.dialects.megatron.table import ROWS
from rankmesh.runtime.connect import DEFAULT_TIMEOUT, connect
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rankmesh.core.plan import Plan

__all__ = ["destroy", "initialize", "set_timeouts"]


def initialize(state: State, request: Request) -> None:
    """Make the groups that are asked for, and fill the globals; nothing is left of a refused request."""
    names = vars(state.module)
    if not in_a_world():
        raise NotInitialized(
            "torch.distributed is not initialised, and groups are made inside its world; call "
            "torch.distributed.init_process_group() first"
        )
    if state.live is not None or names["_DATA_PARALLEL_GROUP"] is not None:
        raise Refused(
            "this parallel state is already initialised, and a second initialisation would lose its groups; call "
            "destroy_model_parallel() first, or make another ParallelState"
        )
    request = _heeding(names, request)
    world = default_group()
    all_gloo = world.backend == "gloo" or world.dry
    plan = request.plan(world.size, all_gloo=all_gloo, name=state.plan_name)
    if request.pipeline_model_parallel_comm_backend == "ucc":
        prepare_ucc()
    state.live = _groups(state, names, plan, request, world.rank)
    state.set_pieces(request.gtp_remat_size > 1, request.expert_gtp_remat_size > 1)
    names.update(_filled(state.live, request, all_gloo=all_gloo))
    names["_GLOBAL_MEMORY_BUFFER"] = GlobalMemoryBuffer()
    state.refresh()


def _heeding(names: Mapping[str, Any], request: Request) -> Request:
    """The request with what a program has put in place of the functions that choose ranks."""
    shared = ParallelState.interface.shared
    if names["RankGenerator"] not in (RankGenerator, WithPieces):
        raise Refused(
            f"RankGenerator is replaced by {names['RankGenerator']!r:.80}, and ranks are laid out without it; give the "
            "order of the axes by order=, or use Megatron-Core's own parallel_state"
        )
    given = {}
    for argument in ("get_embedding_ranks", "get_position_embedding_ranks"):
        default = f"default_{argument.removeprefix('get_')}"
        if getattr(request, argument) is None and names[default] is not shared[default]:
            given[argument] = names[default]
    return replace(request, **given)


def _groups(
    state: State, names: Mapping[str, Any], plan: Plan, request: Request, rank: int
) -> LiveGroups | CalledGroups:
    make, options = names["create_group"], names["get_nccl_options"]
    own = make is state.functions["create_group"] and options is ParallelState.interface.shared["get_nccl_options"]
    if not (own and is_torchs_own("new_group")):
        return called_groups(plan, request.sections(), make, options)
    if plan.fixed_world or rank in plan.mesh:
        return connect(plan, timeout=min(DEFAULT_TIMEOUT, request.timeout))
    return LiveGroups(plan, World.current(), 0, {})  # outside the part of the world that the state is for


# -- from groups to globals -------------------------------------------------------------------------------------------


def _filled(live: LiveGroups | CalledGroups, request: Request, *, all_gloo: bool) -> dict[str, Any]:
    """The values of the globals after initialisation; a global that is missing here stays as it is."""
    values: dict[str, Any] = {}
    for row in ROWS:
        kind = _stand_in(row.kind, live.plan.kinds, twins=all_gloo and request.has_gloo_twin(row.kind))
        if kind in live:
            values[row.group] = live[kind].pg
            if row.ranks:
                values[row.ranks] = list(live[kind].ranks)
    values.update(_embedding_ranks(live, request))
    hierarchy = [live[name].pg for name in live if name.startswith("hcp_")]
    hybrid = {live[name].size: live[name].pg for name in live if name.startswith("hybrid_dp_cp_")}
    values["_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"] = hierarchy or None
    values["_HYBRID_DP_CP_GROUPS"] = hybrid
    values["_global_process_group_list"] = [None, *{id(live[name].pg): live[name].pg for name in live}.values()]
    if request.virtual_pipeline_model_parallel_size is not None:
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = request.virtual_pipeline_model_parallel_size
    return values


def _stand_in(kind: str, made: Collection[str], *, twins: bool) -> str:
    """The group that serves for one that the plan needs not have: the gloo twin of a gloo group is this group, one
    optimizer instance is the whole, and with weights in one piece the ranks that hold the pieces add none.
    """
    if kind in made:
        return kind
    if kind.endswith("_gloo"):
        return _stand_in(kind.removesuffix("_gloo"), made, twins=False) if twins else kind
    if kind.endswith("_gtp"):
        whole = kind.removeprefix("intra_")
        return whole if whole in made else _stand_in(kind.removesuffix("_gtp"), made, twins=False)
    return kind.removeprefix("intra_") if kind in ("intra_dp_cp", "intra_ep_dp") else kind


def _embedding_ranks(live: LiveGroups | CalledGroups, request: Request) -> Iterator[tuple[str, list[int]]]:
    """The members as the caller's functions list them: the first and the last of a list count as ends."""
    asked = {
        "_EMBEDDING_GLOBAL_RANKS": ("embd", request.get_embedding_ranks),
        "_POSITION_EMBEDDING_GLOBAL_RANKS": ("pos_embd", request.get_position_embedding_ranks),
    }
    for name, (kind, ranks) in asked.items():
        if ranks is not None and kind in live:
            yield name, list(ranks(list(live["pp"].ranks)))


# -- afterwards -------------------------------------------------------------------------------------------------------


def destroy(state: State) -> None:
    """Destroy the groups of a state, and give its globals the values that they had at first."""
    owned = [*state.added[::-1], *([state.live] if state.live is not None else [])]
    state.live, state.added = None, []
    state.set_pieces(False, False)
    names = vars(state.module)
    names.update({name: value for name, value in state.first_values() if name in names})
    state.refresh()
    for live in owned:
        live.close()
    _end_symmetric_memory()


def _end_symmetric_memory() -> None:
    """Megatron-Core since 0.17 keeps symmetric memory of its groups elsewhere, and ends it with them."""
    module = sys.modules.get("megatron.core.inference.symmetric_memory")
    manager = getattr(module, "SymmetricMemoryManager", None)
    if manager is not None:
        manager.destroy()


def set_timeouts(timeout: timedelta, groups: Sequence[ProcessGroup | None], *, meet_in: ProcessGroup | None) -> None:
    """Meet in a group (None: the world), then set the timeout of every group given; None stands for the world."""
    dist.barrier(meet_in)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for group in groups:
        set_timeout(group, timeout)
