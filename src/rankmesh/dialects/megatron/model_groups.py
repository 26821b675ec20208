"""Megatron's functions for the groups of one model: tensors, stages, embeddings, context, experts.

Laid over the globals of each parallel state: see ``state.py``. What a name without a rule reads stands here for
type checkers; the globals of the others are in ``table.py``.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, which annotates few.

import warnings
from typing import Any

import torch.distributed as dist

from rankmesh.dialects.megatron import getters as rule
from rankmesh.dialects.megatron.data_groups import get_data_parallel_world_size, get_tensor_and_data_parallel_group
from rankmesh.dialects.megatron.refusals import no_stage_named, unknown_group_size

rankmesh_state: Any = None

_EMBEDDING_GLOBAL_RANKS: Any = None
_POSITION_EMBEDDING_GLOBAL_RANKS: Any = None
_HYBRID_DP_CP_GROUPS: Any = {}
_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK: Any = None
_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: Any = None

# Kept answers: ``state.py`` says when each is computed again.
_is_first_stage: Any = None
_is_last_stage: Any = None

# -- tensors ----------------------------------------------------------------------------------------------------------

get_tensor_model_parallel_group = rule.group("tp", "The ranks that share a layer's tensors")
get_tensor_model_parallel_rank = rule.rank("tp")
get_tensor_model_parallel_world_size = rule.size("tp")
get_tensor_model_parallel_src_rank = rule.first_rank("tp")
set_tensor_model_parallel_rank = rule.set_rank("_MPU_TENSOR_MODEL_PARALLEL_RANK")
set_tensor_model_parallel_world_size = rule.set_size("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE")

# -- stages: the ring of next and prev closes, after the last stage comes the first -----------------------------------

get_pipeline_model_parallel_group = rule.group("pp", "The stages that this rank's activations pass")
get_pipeline_model_parallel_rank = rule.rank("pp")
get_pipeline_model_parallel_world_size = rule.size("pp")
set_pipeline_model_parallel_rank = rule.set_rank("_MPU_PIPELINE_MODEL_PARALLEL_RANK")
set_pipeline_model_parallel_world_size = rule.set_size("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
get_virtual_pipeline_model_parallel_rank = rule.value(
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", "The virtual stage that was set, None without."
)
get_virtual_pipeline_model_parallel_world_size = rule.value(
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", "How many virtual stages a rank has, None without."
)
set_virtual_pipeline_model_parallel_world_size = rule.set_size("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")


def set_virtual_pipeline_model_parallel_rank(rank):
    """Deprecated: pass vp_stage. Set the virtual stage."""
    warnings.warn(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to is_pipeline_first_stage and "
        "is_pipeline_last_stage",
        DeprecationWarning,
        stacklevel=2,
    )
    rankmesh_state.write("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", rank)


get_pipeline_model_parallel_first_rank = rule.stage("first", "The global rank of the first stage of this pipeline.")
get_pipeline_model_parallel_last_rank = rule.stage("last", "The global rank of the last stage of this pipeline.")
get_pipeline_model_parallel_next_rank = rule.stage("next", "The global rank after this one in the pipeline.")
get_pipeline_model_parallel_prev_rank = rule.stage("prev", "The global rank before this one in the pipeline.")


def is_pipeline_first_stage(ignore_virtual=True, vp_stage=None):
    """Whether this rank is the first stage; with virtual stages heeded, whether vp_stage is the first as well."""
    if not ignore_virtual and get_virtual_pipeline_model_parallel_world_size() is not None:
        if vp_stage is None:
            raise no_stage_named()
        if vp_stage != 0:
            return False
    if _is_first_stage is not None:
        return _is_first_stage
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual=True, vp_stage=None):
    """Whether this rank is the last stage; with virtual stages heeded, whether vp_stage is the last as well."""
    if not ignore_virtual and get_virtual_pipeline_model_parallel_world_size() is not None:
        if vp_stage is None:
            raise no_stage_named()
        if vp_stage != get_virtual_pipeline_model_parallel_world_size() - 1:
            return False
    if _is_last_stage is not None:
        return _is_last_stage
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


get_embedding_group = rule.group("embd", "The stages that hold the word embeddings")
get_position_embedding_group = rule.group("pos_embd", "The stages that hold the position embeddings")


def is_rank_in_embedding_group(ignore_virtual=True, vp_stage=None):
    """Whether this rank (and vp_stage, when virtual stages are heeded) holds the word embeddings."""
    rank, ranks = dist.get_rank(), _EMBEDDING_GLOBAL_RANKS
    if ranks is None or rank not in ranks:
        return False
    if ignore_virtual or rank not in (ranks[0], ranks[-1]):
        return True
    at_its_end = is_pipeline_first_stage if rank == ranks[0] else is_pipeline_last_stage
    return at_its_end(ignore_virtual=False, vp_stage=vp_stage)


def is_rank_in_position_embedding_group():
    """Whether this rank holds the position embeddings."""
    return _POSITION_EMBEDDING_GLOBAL_RANKS is not None and dist.get_rank() in _POSITION_EMBEDDING_GLOBAL_RANKS


# -- the whole model, and context -------------------------------------------------------------------------------------

get_model_parallel_group = rule.group("mp", "The ranks that hold one model: tensors and stages")
get_model_parallel_src_rank = rule.first_rank("mp")
get_context_parallel_group = rule.group("cp", "The ranks that share a sequence")
get_context_parallel_rank = rule.rank("cp")
get_context_parallel_world_size = rule.size("cp")
get_context_parallel_global_ranks = rule.ranks("cp")
get_hierarchical_context_parallel_groups = rule.group(
    "hcp", "The context-parallel groups of each level, innermost first"
)
get_tensor_and_context_parallel_group = rule.group("tp_cp", "The ranks that share a layer's tensors and a sequence")
get_tensor_and_context_parallel_rank = rule.rank("tp_cp")
get_tensor_and_context_parallel_world_size = rule.size("tp_cp")


def get_hybrid_data_context_parallel_groups(check_initialized=True, group_size=None):
    """The hybrid group of this size inside dp_cp; the size of dp_cp gives dp_cp itself."""
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return rankmesh_state.given("dp_cp", check_initialized)
    if group_size not in _HYBRID_DP_CP_GROUPS:
        raise unknown_group_size(group_size, sorted(_HYBRID_DP_CP_GROUPS))
    return _HYBRID_DP_CP_GROUPS[group_size]


def get_amax_reduction_group(with_context_parallel=False, tp_only_amax_red=False):
    """The ranks that agree on the largest value of an FP8 tensor."""
    if tp_only_amax_red:
        return get_tensor_and_context_parallel_group() if with_context_parallel else get_tensor_model_parallel_group()
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


# -- experts ----------------------------------------------------------------------------------------------------------

get_expert_model_parallel_group = rule.group("ep", "The ranks that hold different experts")
get_expert_model_parallel_rank = rule.rank("ep")
get_expert_model_parallel_world_size = rule.size("ep")
get_expert_model_parallel_src_rank = rule.first_rank("ep")
set_expert_model_parallel_rank = rule.set_rank("_MPU_EXPERT_MODEL_PARALLEL_RANK")
set_expert_model_parallel_world_size = rule.set_size("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE")
# Without a group, its rank and size are what was set for the tensor group.
get_expert_tensor_parallel_group = rule.group("ep_tp", "The ranks that share an expert's tensors")
get_expert_tensor_parallel_rank = rule.rank("ep_tp")
get_expert_tensor_parallel_world_size = rule.size("ep_tp")
set_expert_tensor_parallel_rank = rule.set_rank("_MPU_EXPERT_TENSOR_PARALLEL_RANK")
set_expert_tensor_parallel_world_size = rule.set_size("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE")
get_expert_tensor_and_model_parallel_group = rule.group(
    "tp_ep_mp", "The ranks that share an expert's tensors, and those of the other experts"
)
get_expert_tensor_and_model_parallel_rank = rule.rank("tp_ep_mp")
get_expert_tensor_and_model_parallel_world_size = rule.size("tp_ep_mp")


def get_expert_tensor_model_pipeline_parallel_group(check_initialized=True, with_egtp_remat=False):
    """The ranks of one model's experts; with_egtp_remat: with those that hold other pieces of their weights."""
    return rankmesh_state.given("tp_ep_pp_gtp" if with_egtp_remat else "tp_ep_pp", check_initialized)
