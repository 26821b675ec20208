"""Megatron-Core's parallel state as data: what each group is called, in the plan, as a global and in getters.

```
plan        global of the process group      global of its ranks                     functions
tp          _TENSOR_MODEL_PARALLEL_GROUP     _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS     get_tensor_model_parallel_group,
                                                                                     .._rank, .._world_size, .._src_rank
embd        _EMBEDDING_GROUP                 _EMBEDDING_GLOBAL_RANKS                 get_embedding_group
```

From a row's ``name`` follow its functions: ``get_<name>_group`` and, as its ``asks`` say, ``get_<name>_rank``,
``get_<name>_world_size``, ``get_<name>_src_rank``, ``get_<name>_global_ranks``. A row with ``sets`` has
``set_<name>_rank`` or ``set_<name>_world_size``, which write ``_MPU_<NAME>_RANK`` or ``.._WORLD_SIZE``: a value there
is what the getter returns.

Plan names are the short keys of Megatron's NCCL configuration. Source: NVIDIA Megatron-Core 0.16.1,
``core.parallel_state``; the rows with ``remat`` are of later releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BUFFERS", "BY_KIND", "CONFIG_KEYS", "ROWS", "VIRTUAL", "Row", "initial", "override"]


@dataclass(frozen=True)
class Row:
    """One kind of group.

    ``kind`` is its name in the plan, ``group`` and ``ranks`` are module globals, ``name`` makes its getters (empty:
    its getter takes flags and is written out), ``asks`` and ``sets`` are words among rank, size, src, ranks.
    ``lenient``: rank and size are 0 where torch.distributed is not initialised, instead of an error.
    """

    kind: str
    group: str
    name: str = ""
    ranks: str | None = None
    asks: str = ""
    sets: str = ""
    lenient: bool = True

    @property
    def what(self) -> str:
        """The group in words, for messages."""
        return self.group.strip("_").lower().replace("_", " ")


ROWS = (
    Row(
        "tp",
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "tensor_model_parallel",
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
        asks="rank size src",
        sets="rank size",
        lenient=False,
    ),
    Row(
        "pp",
        "_PIPELINE_MODEL_PARALLEL_GROUP",
        "pipeline_model_parallel",
        "_PIPELINE_GLOBAL_RANKS",
        asks="rank size",
        sets="rank size",
        lenient=False,
    ),
    Row("mp", "_MODEL_PARALLEL_GROUP", "model_parallel", "_MODEL_PARALLEL_GLOBAL_RANKS", asks="src"),
    Row("cp", "_CONTEXT_PARALLEL_GROUP", "context_parallel", "_CONTEXT_PARALLEL_GLOBAL_RANKS", asks="rank size ranks"),
    Row("embd", "_EMBEDDING_GROUP", "embedding", "_EMBEDDING_GLOBAL_RANKS"),
    Row("pos_embd", "_POSITION_EMBEDDING_GROUP", "position_embedding", "_POSITION_EMBEDDING_GLOBAL_RANKS"),
    Row("tp_cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tensor_and_context_parallel", asks="rank size"),
    # data parallel: the getters take flags
    Row("dp", "_DATA_PARALLEL_GROUP", ranks="_DATA_PARALLEL_GLOBAL_RANKS"),
    Row("dp_gloo", "_DATA_PARALLEL_GROUP_GLOO"),
    Row("dp_cp", "_DATA_PARALLEL_GROUP_WITH_CP", ranks="_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"),
    Row("dp_cp_ag", "_DATA_PARALLEL_GROUP_WITH_CP_AG"),
    Row("dp_cp_gloo", "_DATA_PARALLEL_GROUP_WITH_CP_GLOO"),
    Row("intra_dp_cp", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"),
    Row("intra_dp_cp_gloo", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO"),
    Row("tp_dp", "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    Row("tp_dp_cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    # experts
    Row(
        "ep",
        "_EXPERT_MODEL_PARALLEL_GROUP",
        "expert_model_parallel",
        "_EXPERT_MODEL_PARALLEL_RANKS",
        asks="rank size src",
        sets="rank size",
    ),
    Row("ep_tp", "_EXPERT_TENSOR_PARALLEL_GROUP", "expert_tensor_parallel", sets="rank size"),
    Row("tp_ep_mp", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "expert_tensor_and_model_parallel", asks="rank size"),
    Row("tp_ep_pp", "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
    Row("ep_dp", "_EXPERT_DATA_PARALLEL_GROUP"),
    Row("ep_dp_gloo", "_EXPERT_DATA_PARALLEL_GROUP_GLOO"),
    Row("intra_ep_dp", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"),
    Row("intra_ep_dp_gloo", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO"),
    # optimizer instances: attention and experts share the group between them
    Row("inter_ep_dp", "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "inter_distributed_optimizer_instance"),
    Row(
        "intra_dist_opt_instance",
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "intra_distributed_optimizer_instance",
    ),
    # sharded weights
    Row(
        "gtp_remat",
        "_GTP_WEIGHT_REMAT_GROUP",
        "gtp_weight_remat",
        "_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
        asks="rank size ranks",
    ),
    Row(
        "expt_gtp_remat",
        "_EXPERT_GTP_WEIGHT_REMAT_GROUP",
        "expert_gtp_weight_remat",
        "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
        asks="rank size ranks",
    ),
    Row("dp_gtp", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    Row("dp_cp_gtp", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"),
    Row("ep_dp_gtp", "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    Row("tp_ep_pp_gtp", "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP_REMAT"),
)

VIRTUAL = ("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")

BUFFERS = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")

# Sections that an NCCL configuration may have, whether or not a job has the group.
CONFIG_KEYS = frozenset(row.kind for row in ROWS if not row.kind.endswith(("_gloo", "_gtp", "_ag"))) | {"hcp"}


BY_KIND = {row.kind: row for row in ROWS}


def override(name: str, word: str) -> str:
    """The global whose value replaces a rank or size.

    >>> override("tensor_model_parallel", "rank")
    '_MPU_TENSOR_MODEL_PARALLEL_RANK'
    """
    return f"_MPU_{name.upper()}_{'RANK' if word == 'rank' else 'WORLD_SIZE'}"


def _initial() -> Iterator[tuple[str, object]]:
    for row in ROWS:
        yield row.group, None
        if row.ranks:
            yield row.ranks, None
        yield from ((override(row.name, word), None) for word in row.sets.split())
    yield from ((override("data_parallel", word), None) for word in ("rank", "size"))
    yield from ((name, None) for name in (*VIRTUAL, *BUFFERS))
    yield "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", None
    yield "_HYBRID_DP_CP_GROUPS", {}
    yield "_global_process_group_list", None


def initial() -> dict[str, object]:
    """Every module global, as it is before initialisation and after destruction."""
    return dict(_initial())
