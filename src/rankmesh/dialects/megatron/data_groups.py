"""Megatron's functions for groups that cross replicas: data, experts' data, optimizer instances, pieces of weights.

```
get_data_parallel_group()                              dp
  with_context_parallel                                dp_cp
  with_context_parallel, partial_data_parallel         intra_dp_cp     one optimizer instance
  with_context_parallel, independent_all_gather        dp_cp_ag
  with_gtp_remat (the default) of sharded weights      dp_gtp, dp_cp_gtp: all ranks that have other data
```

Laid over the globals of each parallel state, as ``model_groups.py``.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, which annotates few.

import warnings
from typing import Any

from rankmesh.dialects.megatron import getters as rule

rankmesh_state: Any = None

_DATA_PARALLEL_GROUP_WITH_CP_AG: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: Any = None
_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP: Any = None

# -- data -------------------------------------------------------------------------------------------------------------


def get_data_parallel_group(
    with_context_parallel=False, partial_data_parallel=False, independent_all_gather=False, with_gtp_remat=True
):
    """The data-parallel group that the flags choose."""
    if partial_data_parallel and not with_context_parallel:
        raise rankmesh_state.without_context("dp")
    if independent_all_gather and with_context_parallel and not partial_data_parallel:
        return rankmesh_state.given("dp_cp_ag")
    kind = "dp_cp" if with_context_parallel else "dp"
    return rankmesh_state.given(f"intra_{kind}" if partial_data_parallel else kind, whole=with_gtp_remat)


get_data_parallel_rank = rule.data("rank")
get_data_parallel_world_size = rule.data("size")
set_data_parallel_rank = rule.set_rank("_MPU_DATA_PARALLEL_RANK")


def get_data_parallel_group_gloo(with_context_parallel=False, partial_data_parallel=False):
    """The CPU (gloo) counterpart of the data-parallel group that the flags choose."""
    if partial_data_parallel and not with_context_parallel:
        raise rankmesh_state.without_context("dp_gloo")
    kind = "dp_cp_gloo" if with_context_parallel else "dp_gloo"
    return rankmesh_state.given(f"intra_{kind}" if partial_data_parallel else kind)


def has_separate_all_gather_group() -> bool:
    """Whether gathers have a communicator of their own."""
    return _DATA_PARALLEL_GROUP_WITH_CP_AG is not None


def get_data_parallel_src_rank(with_context_parallel=False):
    """The first global rank of the data-parallel group."""
    return get_data_parallel_global_ranks(with_context_parallel)[0]


def get_data_parallel_global_ranks(with_context_parallel=False):
    """The global ranks of the data-parallel group."""
    ranks = _DATA_PARALLEL_GLOBAL_RANKS_WITH_CP if with_context_parallel else _DATA_PARALLEL_GLOBAL_RANKS
    if ranks is None:
        raise rankmesh_state.absent("dp_cp" if with_context_parallel else "dp")
    return ranks


def get_tensor_and_data_parallel_group(check_initialized=True, with_context_parallel=False):
    """Tensor and data parallel ranks together."""
    return rankmesh_state.given("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


# -- experts' data ----------------------------------------------------------------------------------------------------


def get_expert_data_parallel_group(check_initialized=True, partial_expert_data_parallel=False, with_gtp_remat=True):
    """The ranks that hold the same experts; partial: those of one optimizer instance."""
    kind = "intra_ep_dp" if partial_expert_data_parallel else "ep_dp"
    return rankmesh_state.given(kind, check_initialized, whole=with_gtp_remat)


get_expert_data_parallel_rank = rule.expert_data("rank")
get_expert_data_parallel_world_size = rule.expert_data("size")


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel=False):
    """Deprecated: get_expert_data_parallel_group."""
    warnings.warn(
        "get_data_modulo_expert_parallel_group is deprecated; call get_expert_data_parallel_group",
        DeprecationWarning,
        stacklevel=2,
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel=False):
    """The CPU (gloo) counterpart of the expert data-parallel group."""
    return rankmesh_state.given("intra_ep_dp_gloo" if partial_expert_data_parallel else "ep_dp_gloo")


# -- optimizer instances, and pieces of weights -----------------------------------------------------------------------

get_inter_distributed_optimizer_instance_group = rule.group("inter_ep_dp", "The same shard in every instance")
get_intra_distributed_optimizer_instance_group = rule.group("intra_dist_opt_instance", "The ranks of one instance")

get_gtp_weight_remat_group = rule.group("gtp_remat", "The ranks that hold the pieces of a weight")
get_gtp_weight_remat_rank = rule.rank("gtp_remat")
get_gtp_weight_remat_world_size = rule.size("gtp_remat")
get_gtp_weight_remat_global_ranks = rule.ranks("gtp_remat")
get_expert_gtp_weight_remat_group = rule.group("expt_gtp_remat", "The ranks that hold the pieces of an expert's weight")
get_expert_gtp_weight_remat_rank = rule.rank("expt_gtp_remat")
get_expert_gtp_weight_remat_world_size = rule.size("expt_gtp_remat")
get_expert_gtp_weight_remat_global_ranks = rule.ranks("expt_gtp_remat")
