"""The life of a parallel state: its groups are made, their timeouts change, they are destroyed.

```
initialize    Request ── plan ── connect ── globals
destroy       close, last made first ── globals as they were before
```

A program that replaces ``torch.distributed.new_group``, or ``create_group``, ``get_nccl_options`` or ``RankGenerator``
of the parallel state, expects that they are called. The plan makes the groups without them, so this is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankmesh.backend.default import default_group, is_torch_function
from rankmesh.backend.registries import set_timeout
from rankmesh.core.mesh import Mesh
from rankmesh.core.nccl_config import with_nccl_config
from rankmesh.core.options import NcclValue
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.dialects.megatron.buffers import GlobalMemoryBuffer
from rankmesh.dialects.megatron.nccl import get_nccl_options, prepare_ucc, section_of
from rankmesh.dialects.megatron.rank_generator import (
    RankGenerator,
    WithPieces,
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from rankmesh.dialects.megatron.refusals import NotInitialized, Refused, refusals
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import RankIn, SizeOf, State
from rankmesh.dialects.megatron.table import ROWS
from rankmesh.runtime.connect import DEFAULT_TIMEOUT, connect
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["all_gather", "destroy", "initialize", "levels", "set_timeouts"]


Sections = Mapping[str, Mapping[str, NcclValue]]


def initialize(state: State, request: Request) -> None:
    """Make the groups that are asked for, and fill the globals; nothing is left of a refused request."""
    names = vars(state.module)
    if not dist.is_initialized():
        raise NotInitialized(
            "torch.distributed is not initialised, and groups are made inside its world; call "
            "torch.distributed.init_process_group() first"
        )
    if state.live is not None or names["_DATA_PARALLEL_GROUP"] is not None:
        raise Refused(
            "this parallel state is already initialised, and a second initialisation would lose its groups; call "
            "destroy_model_parallel() first, or make another ParallelState"
        )
    request = _heeding(state, request)
    world = default_group()
    all_gloo = world.backend == "gloo" or world.dry
    plan = request.plan(world.size, all_gloo=all_gloo, name=state.plan_name)
    if request.pipeline_model_parallel_comm_backend == "ucc":
        prepare_ucc()
    if plan.fixed_world or world.rank in plan.mesh:
        state.live = connect(plan, timeout=min(DEFAULT_TIMEOUT, request.timeout))
    else:
        state.live = World.current().outside(plan)  # outside the part of the world that the state is for
    state.set_pieces(request.gtp_remat_size > 1, request.expert_gtp_remat_size > 1)
    names.update(_filled(state.live, request, all_gloo=all_gloo))
    names["_GLOBAL_MEMORY_BUFFER"] = GlobalMemoryBuffer()


def _heeding(state: State, request: Request) -> Request:
    """Return the request with the functions by which a program has replaced those that choose ranks."""
    names = vars(state.module)
    used = {
        "RankGenerator": names["RankGenerator"] in (RankGenerator, WithPieces),
        "create_group": names["create_group"] is state.functions["create_group"],
        "get_nccl_options": names["get_nccl_options"] is get_nccl_options,
        "torch.distributed.new_group": is_torch_function("new_group"),
    }
    if replaced := [name for name, ours in used.items() if not ours]:
        raise Refused(
            f"{replaced[0]} is replaced, but groups are planned and made without it; give the order of the axes by "
            "order=, or use Megatron-Core's own parallel_state",
            replaced=replaced[0],
        )
    defaults = {
        "get_embedding_ranks": default_embedding_ranks,
        "get_position_embedding_ranks": default_position_embedding_ranks,
    }
    given = {}
    for argument, default in defaults.items():
        function = names[default.__name__]
        if getattr(request, argument) is None and function is not default:
            given[argument] = function
    return replace(request, **given)


# -- from groups to globals -------------------------------------------------------------------------------------------


def _filled(live: LiveGroups, request: Request, *, all_gloo: bool) -> dict[str, object]:
    """Return the values of the globals after initialisation; a global that is missing here stays as it is."""
    values: dict[str, object] = {}
    for row in ROWS:
        kind = _stand_in(row.kind, live.plan.kinds, all_gloo=all_gloo and request.has_cpu_counterpart(row.kind))
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
    values["_rank_in"] = RankIn({live[name].pg: live[name].rank for name in live})
    values["_size_of"] = SizeOf({live[name].pg: live[name].size for name in live})
    if request.virtual_pipeline_model_parallel_size is not None:
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = request.virtual_pipeline_model_parallel_size
    return values


def _stand_in(kind: str, made: Collection[str], *, all_gloo: bool) -> str:
    """Return the kind that replaces one that the plan does not have.

    A gloo group is its own CPU counterpart, one optimizer instance is the whole, and with weights in one piece the
    ranks that hold the pieces add none.
    """
    if kind in made:
        return kind
    if kind.endswith("_gloo"):
        return _stand_in(kind.removesuffix("_gloo"), made, all_gloo=False) if all_gloo else kind
    if kind.endswith("_gtp"):
        whole = kind.removeprefix("intra_")
        return whole if whole in made else _stand_in(kind.removesuffix("_gtp"), made, all_gloo=False)
    return kind.removeprefix("intra_") if kind in ("intra_dp_cp", "intra_ep_dp") else kind


def _embedding_ranks(live: LiveGroups, request: Request) -> Iterator[tuple[str, list[int]]]:
    """Yield the members as the caller's functions list them: the first and the last of a list count as ends."""
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
    first = {name: dict(value) if type(value) is dict else value for name, value in state.initial.items()}
    vars(state.module).update(first)
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
    """Wait for the ranks of ``meet_in``, then set the timeout of every group given; None is the world."""
    dist.barrier(meet_in)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for group in groups:
        set_timeout(group, timeout)


# -- more groups ------------------------------------------------------------------------------------------------------


def levels(ranks: Sequence[int], sizes: Sequence[int], only: int | None = None) -> Iterator[tuple[int, list[int]]]:
    """Level and members of each group of a hierarchy, level by level."""
    with refusals():
        groups = Mesh(position=len(ranks)).groups("position")
        wanted = range(len(sizes)) if only is None else (only,)
        made = [(level, groups.level_of(tuple(sizes), level).tolist()) for level in wanted]
    for level, listed in made:
        yield from ((level, [ranks[position] for position in members]) for members in listed)


def all_gather(
    state: State, experts: bool, timeout: timedelta | None, sections: Sections
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Separate communicators over dp_cp and, for experts, over ep_dp; the state owns them."""
    if state.live is None:
        raise NotInitialized("this parallel state has no groups to add to; call initialize_model_parallel() first")
    base = state.live.plan
    specs = [GroupSpec("dp_cp_ag", "dp-cp", overlap="all_gather", timeout=timeout)]
    if experts:
        specs.append(GroupSpec("expt_dp_ag", "edp", view="expert", overlap="all_gather", timeout=timeout))
    world_size = base.world_size if base.fixed_world else None
    plan = Plan(base.mesh, specs, world_size=world_size, name=f"{base.name}/all_gather")
    given = {kind: sections[section] for kind in plan.kinds if (section := str(section_of(kind))) in sections}
    live = connect(with_nccl_config(plan, given) if given else plan)
    state.added.append(live)
    return live["dp_cp_ag"].pg, live["expt_dp_ag"].pg if experts else None
