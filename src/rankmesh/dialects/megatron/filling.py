"""From live groups to the globals of a state: the table, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.table import ROWS
from rankmesh.runtime.live import LiveGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["filled"]


def filled(live: LiveGroups, request: Request, *, all_gloo: bool) -> dict[str, Any]:
    """The values of the globals after initialisation; a global that is missing here stays as it is."""
    values: dict[str, Any] = {}
    for row in ROWS:
        kind = _stand_in(row.kind, live, twins=all_gloo and request.has_gloo_twin(row.kind))
        if kind in live:
            values[row.group] = live[kind].pg
            if row.ranks:
                values[row.ranks] = list(live[kind].ranks)
    values.update(_embedding_ranks(live, request))
    hierarchy = [live[name].pg for name in live if name.startswith("hcp_")]
    hybrid = {live[name].size: live[name].pg for name in live if name.startswith("hybrid_dp_cp_")}
    values["_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"] = hierarchy or None
    values["_HYBRID_DP_CP_GROUPS"] = hybrid
    values["_global_process_group_list"] = [None, *_distinct(live)]
    if request.virtual_pipeline_model_parallel_size is not None:
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = request.virtual_pipeline_model_parallel_size
    return values


def _stand_in(kind: str, live: LiveGroups, *, twins: bool) -> str:
    """The group that serves for one that the plan needs not have: the gloo twin of a gloo group is this group, one
    optimizer instance is the whole, and with weights in one piece the ranks that hold the pieces add none.
    """
    if kind in live.plan.kinds:
        return kind
    if kind.endswith("_gloo"):
        return _stand_in(kind.removesuffix("_gloo"), live, twins=False) if twins else kind
    if kind.endswith("_gtp"):
        whole = kind.removeprefix("intra_")
        return whole if whole in live.plan.kinds else _stand_in(kind.removesuffix("_gtp"), live, twins=False)
    return kind.removeprefix("intra_") if kind in ("intra_dp_cp", "intra_ep_dp") else kind


def _embedding_ranks(live: LiveGroups, request: Request) -> Iterator[tuple[str, list[int]]]:
    """The members as the caller's functions list them: the first and the last of a list count as ends."""
    asked = {
        "_EMBEDDING_GLOBAL_RANKS": ("embd", request.get_embedding_ranks),
        "_POSITION_EMBEDDING_GLOBAL_RANKS": ("pos_embd", request.get_position_embedding_ranks),
    }
    for name, (kind, ranks) in asked.items():
        if ranks is not None and kind in live:
            yield name, list(ranks(list(live["pp"].ranks)))


def _distinct(live: LiveGroups) -> Iterator[ProcessGroup]:
    """Each process group once, however many groups share it."""
    seen: set[str] = set()
    for name, handle in live.items():
        leader = handle.own.canonical
        if leader not in seen:
            seen.add(leader)
            yield live[name].pg
