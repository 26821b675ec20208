"""Megatron's kinds of groups as data: the globals of a parallel state that hold each and its ranks.

```
plan        global of the process group      global of its ranks
tp          _TENSOR_MODEL_PARALLEL_GROUP     _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS
embd        _EMBEDDING_GROUP                 _EMBEDDING_GLOBAL_RANKS
```

Plan names are the short keys of Megatron's NCCL configuration. Sources: NVIDIA Megatron-Core 0.16.0 to 0.20.0,
``core.parallel_state``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BY_KIND", "CONFIG_KEYS", "GLOBALS", "ROWS", "SECTIONS_OF_PIECES", "Row"]


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

# What getters read: process groups, their global ranks, what setters set, and buffers.
GLOBALS = (
    *(name for row in BY_KIND.values() for name in (row.group, row.ranks) if name),
    *(
        f"_MPU_{kind}_{number}"
        for kind in (
            "TENSOR_MODEL_PARALLEL",
            "PIPELINE_MODEL_PARALLEL",
            "EXPERT_MODEL_PARALLEL",
            "EXPERT_TENSOR_PARALLEL",
        )
        for number in ("RANK", "WORLD_SIZE")
    ),
    "_GLOBAL_MEMORY_BUFFER",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
    "_UNWRITTEN",
)

# The sections of an NCCL configuration for groups that cross the pieces of weights.
SECTIONS_OF_PIECES = {
    "dp_gtp": "gtp_remat_dp",
    "dp_cp_gtp": "gtp_remat_dp_cp",
    "ep_dp_gtp": "ep_gtp_remat_dp",
    "tp_ep_pp_gtp": "tp_ep_gtp_remat_pp",
}
# Sections that an NCCL configuration may have, whether or not a job has the group.
CONFIG_KEYS = frozenset(row.kind for row in ROWS if not row.kind.endswith(("_gloo", "_gtp", "_ag"))) | {
    "hcp",
    *SECTIONS_OF_PIECES.values(),
}
