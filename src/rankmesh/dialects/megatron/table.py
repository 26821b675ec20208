"""Megatron's kinds of groups as data: the globals of a parallel state that hold each, its rank and its size.

```
plan        global of the process group      global of its ranks                    kept answers
tp          _TENSOR_MODEL_PARALLEL_GROUP     _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS    _tp_rank, _tp_size
embd        _EMBEDDING_GROUP                 _EMBEDDING_GLOBAL_RANKS
```

Plan names are the short keys of Megatron's NCCL configuration. Sources: NVIDIA Megatron-Core 0.14.0 to 0.20.0,
``core.parallel_state``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BY_KIND", "CONFIG_KEYS", "NUMBERS", "ROWS", "STAGES", "Numbers", "Row", "global_names"]


@dataclass(frozen=True)
class Row:
    """One kind of group: its name in the plan, and the module globals of its process group and of its ranks."""

    kind: str
    group: str
    ranks: str | None = None

    @property
    def what(self) -> str:
        """The group in words, for messages."""
        return self.group.strip("_").lower().replace("_", " ")


ROWS = (
    Row("tp", "_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    Row("pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    Row("mp", "_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    Row("cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    Row("embd", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS"),
    Row("pos_embd", "_POSITION_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GLOBAL_RANKS"),
    Row("tp_cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    Row("dp", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS"),
    Row("dp_gloo", "_DATA_PARALLEL_GROUP_GLOO"),
    Row("dp_cp", "_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"),
    Row("dp_cp_ag", "_DATA_PARALLEL_GROUP_WITH_CP_AG"),
    Row("dp_cp_gloo", "_DATA_PARALLEL_GROUP_WITH_CP_GLOO"),
    # partial: one optimizer instance
    Row("intra_dp_cp", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"),
    Row("intra_dp_cp_gloo", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO"),
    Row("tp_dp", "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    Row("tp_dp_cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    # experts
    Row("ep", "_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    Row("ep_tp", "_EXPERT_TENSOR_PARALLEL_GROUP"),
    Row("tp_ep_mp", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    Row("tp_ep_pp", "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
    Row("ep_dp", "_EXPERT_DATA_PARALLEL_GROUP"),
    Row("ep_dp_gloo", "_EXPERT_DATA_PARALLEL_GROUP_GLOO"),
    Row("intra_ep_dp", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"),
    Row("intra_ep_dp_gloo", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO"),
    # optimizer instances: attention and experts share the group between them
    Row("inter_ep_dp", "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"),
    Row("intra_dist_opt_instance", "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"),
    # pieces of weights (gtp_remat), and the groups with the ranks that hold them
    Row("gtp_remat", "_GTP_WEIGHT_REMAT_GROUP", "_GTP_WEIGHT_REMAT_GLOBAL_RANKS"),
    Row("expt_gtp_remat", "_EXPERT_GTP_WEIGHT_REMAT_GROUP", "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS"),
    Row("dp_gtp", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    Row("dp_cp_gtp", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"),
    Row("intra_dp_cp_gtp", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"),
    Row("ep_dp_gtp", "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    Row("intra_ep_dp_gtp", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    Row("tp_ep_pp_gtp", "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP"),
)

BY_KIND = {row.kind: row for row in ROWS} | {"hcp": Row("hcp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS")}

# Sections that an NCCL configuration may have, whether or not a job has the group.
CONFIG_KEYS = frozenset(row.kind for row in ROWS if not row.kind.endswith(("_gloo", "_gtp", "_ag"))) | {
    "hcp",
    "gtp_remat_dp",
    "gtp_remat_dp_cp",
    "ep_gtp_remat_dp",
    "tp_ep_gtp_remat_pp",
}


@dataclass(frozen=True)
class Numbers:
    """The rank in a kind of group and its size: the getter of the group, and the globals that keep the answers.

    ``set_by``: values that a caller set (``_MPU_..._RANK``, ``_MPU_..._WORLD_SIZE``); ``instead``: values that
    replace a group that is not there; ``outside``: the answer without torch.distributed, ``absent``: without the group;
    None where there is none.
    """

    kept: str
    getter: str
    set_by: str = ""
    instead: str = ""
    outside: int | None = 0
    absent: int | None = None

    def kept_as(self, method: str) -> str:
        """The global that keeps the answer: ``method`` is ``rank`` or ``size``."""
        return f"{self.kept}_{method}"

    def set_as(self, method: str) -> str | None:
        """The global of the value that a caller set."""
        return _of(self.set_by, method)

    def instead_as(self, method: str) -> str | None:
        """The global of the value that replaces an absent group."""
        return _of(self.instead, method)


def _of(prefix: str, method: str) -> str | None:
    return f"{prefix}_{'RANK' if method == 'rank' else 'WORLD_SIZE'}" if prefix else None


_TP = "_MPU_TENSOR_MODEL_PARALLEL"
NUMBERS = {
    "tp": Numbers("_tp", "get_tensor_model_parallel_group", _TP, outside=None),
    "pp": Numbers("_pp", "get_pipeline_model_parallel_group", "_MPU_PIPELINE_MODEL_PARALLEL", outside=None),
    "cp": Numbers("_cp", "get_context_parallel_group"),
    "tp_cp": Numbers("_tp_cp", "get_tensor_and_context_parallel_group"),
    "dp": Numbers("_dp", "get_data_parallel_group", "_MPU_DATA_PARALLEL"),
    "dp_cp": Numbers("_dp_cp", "get_data_parallel_group", "_MPU_DATA_PARALLEL"),
    "ep": Numbers("_ep", "get_expert_model_parallel_group", "_MPU_EXPERT_MODEL_PARALLEL"),
    "ep_tp": Numbers("_ep_tp", "get_expert_tensor_parallel_group", "_MPU_EXPERT_TENSOR_PARALLEL", _TP, None),
    "ep_dp": Numbers("_ep_dp", "get_expert_data_parallel_group"),
    "tp_ep_mp": Numbers("_tp_ep", "get_expert_tensor_and_model_parallel_group"),
    # absent is 0 too
    "gtp_remat": Numbers("_gtp", "get_gtp_weight_remat_group", absent=0),
    "expt_gtp_remat": Numbers("_expt_gtp", "get_expert_gtp_weight_remat_group", absent=0),
}


# The globals that keep the global ranks of stages, by place.
STAGES = {place: f"_{place}_rank" for place in ("first", "last", "next", "prev")}


def global_names() -> Iterator[str]:
    """Every global that the rows name; all are None at first."""
    for row in BY_KIND.values():
        yield row.group
        if row.ranks is not None:
            yield row.ranks
    for numbers in NUMBERS.values():
        for method in ("rank", "size"):
            yield numbers.kept_as(method)
            if (value := numbers.set_as(method)) is not None:
                yield value
