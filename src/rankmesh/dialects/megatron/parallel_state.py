"""Drop-in for ``megatron.core.parallel_state``: the same functions and globals, over a rankmesh plan.

```python
from rankmesh.dialects.megatron import parallel_state

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
parallel_state.get_tensor_model_parallel_group()
```

The functions are those of Megatron-Core 0.16.1; what later releases added follows the parameters that were there.
``ParallelState(name)`` is this file once more, with globals of its own; ``releases/`` holds the functions that another
release has otherwise. Where it differs from Megatron-Core:

- a rank makes its own groups alone, after all ranks agreed; groups with the same members share a communicator, and a
  group of one rank has none; gloo twins of groups that are gloo already are these groups
- ``destroy_model_parallel`` destroys the groups, and clears every global
- a refused ``initialize_model_parallel`` leaves nothing behind
- an order that names an axis twice, hybrid context parallelism that does not fill its groups, embedding functions
  that do not choose by position, and unknown sections of an NCCL configuration are refused
- SHARP is an option of one communicator: no environment variable is changed

```
_TENSOR_MODEL_PARALLEL_GROUP, ...     the state: what is written here is what getters return
_tp_rank, _is_first_stage, ...        answers that no write has changed since; None: ask
```

>>> from rankmesh.dialects.megatron import parallel_state
>>> parallel_state.is_initialized(), parallel_state._MODEL_PARALLEL_GROUP
(False, None)
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all: none are postponed, and many functions have none.

import logging
import warnings
from datetime import timedelta
from typing import Any, Callable, List  # noqa: UP035

import torch.distributed as dist

from rankmesh.dialects.megatron import lifecycle, making
from rankmesh.dialects.megatron.answers import refresh
from rankmesh.dialects.megatron.buffers import SYMMETRIC_MEGABYTES, GlobalMemoryBuffer, GlobalSymmetricMemoryBuffer
from rankmesh.dialects.megatron.nccl import get_nccl_options, overwrite_nccl_comm_cfgs
from rankmesh.dialects.megatron.rank_generator import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)
from rankmesh.dialects.megatron.refusals import no_buffer, no_stage_named, second_buffer, unknown_group_size
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import absent, begin, in_a_world, without_context

# What Megatron's module has beside the functions that are written out here.
_AS_THEY_ARE = (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
    get_nccl_options,
    overwrite_nccl_comm_cfgs,
)

logger = logging.getLogger(__name__)

# -- process groups of this rank --------------------------------------------------------------------------------------

_TENSOR_MODEL_PARALLEL_GROUP: Any = None
_PIPELINE_MODEL_PARALLEL_GROUP: Any = None
_MODEL_PARALLEL_GROUP: Any = None
_CONTEXT_PARALLEL_GROUP: Any = None
_EMBEDDING_GROUP: Any = None
_POSITION_EMBEDDING_GROUP: Any = None
_TENSOR_AND_CONTEXT_PARALLEL_GROUP: Any = None
_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS: Any = None
_HYBRID_DP_CP_GROUPS: Any = {}
# data parallel; partial: one optimizer instance; with GTP_REMAT: with the ranks that hold other pieces of each weight
_DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GROUP_GLOO: Any = None
_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_AG: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_GLOO: Any = None
_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None
_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO: Any = None
_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT: Any = None
_TENSOR_AND_DATA_PARALLEL_GROUP: Any = None
_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP: Any = None
# experts
_EXPERT_MODEL_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP: Any = None
_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP: Any = None
_EXPERT_DATA_PARALLEL_GROUP: Any = None
_EXPERT_DATA_PARALLEL_GROUP_GLOO: Any = None
_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO: Any = None
_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT: Any = None
# between optimizer instances (attention and experts share it), and inside one
_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP: Any = None
_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP: Any = None
# the pieces of each weight
_GTP_WEIGHT_REMAT_GROUP: Any = None
_EXPERT_GTP_WEIGHT_REMAT_GROUP: Any = None
_global_process_group_list: Any = None

# -- their global ranks -----------------------------------------------------------------------------------------------

_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS: Any = None
_PIPELINE_GLOBAL_RANKS: Any = None
_MODEL_PARALLEL_GLOBAL_RANKS: Any = None
_CONTEXT_PARALLEL_GLOBAL_RANKS: Any = None
_EMBEDDING_GLOBAL_RANKS: Any = None
_POSITION_EMBEDDING_GLOBAL_RANKS: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: Any = None
_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP: Any = None
_EXPERT_MODEL_PARALLEL_RANKS: Any = None
_GTP_WEIGHT_REMAT_GLOBAL_RANKS: Any = None
_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS: Any = None

# -- ranks and sizes that stand for a group's own, where they are set -------------------------------------------------

_MPU_TENSOR_MODEL_PARALLEL_RANK: Any = None
_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_PIPELINE_MODEL_PARALLEL_RANK: Any = None
_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_DATA_PARALLEL_RANK: Any = None
_MPU_DATA_PARALLEL_WORLD_SIZE: Any = None
_MPU_EXPERT_MODEL_PARALLEL_RANK: Any = None
_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE: Any = None
_MPU_EXPERT_TENSOR_PARALLEL_RANK: Any = None
_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE: Any = None
_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK: Any = None
_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE: Any = None

_GLOBAL_MEMORY_BUFFER: Any = None
_GLOBAL_SYMMETRIC_MEMORY_BUFFER: Any = None

# -- answers that no write has changed: ``answers.py`` says which, and when -------------------------------------------

_tp_rank: Any = None
_tp_size: Any = None
_pp_rank: Any = None
_pp_size: Any = None
_first_rank: Any = None
_last_rank: Any = None
_next_rank: Any = None
_prev_rank: Any = None
_is_first_stage: Any = None
_is_last_stage: Any = None
_cp_rank: Any = None
_cp_size: Any = None
_dp_rank: Any = None
_dp_size: Any = None
_dp_cp_rank: Any = None
_dp_cp_size: Any = None
_ep_rank: Any = None
_ep_size: Any = None
_expert_tp_rank: Any = None
_expert_tp_size: Any = None
_expert_dp_rank: Any = None
_expert_dp_size: Any = None


# -- begin and end ----------------------------------------------------------------------------------------------------


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: List[int] | None = None,  # noqa: UP006
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[[List[int], int | None], List[int]] | None = None,  # noqa: UP006
    get_position_embedding_ranks: Callable[[List[int], int | None], List[int]] | None = None,  # noqa: UP006
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: List[str] | None = None,  # noqa: UP006
    sharp_enabled_group: str | None = None,
    create_all_gather_group: bool | None = False,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Make every process group of this rank, dense and expert, and fill the globals of this state.

    Arguments as in Megatron-Core; sizes are numbers of ranks, the data-parallel size is what they leave. Each
    rank makes its own groups only, after all ranks agreed on the plan. A refused call leaves no group and no
    global behind.

    ``order`` names the axes, fastest first, each once. ``get_embedding_ranks`` and
    ``get_position_embedding_ranks`` take the ranks of one pipeline and choose by position, the same in each
    pipeline. ``rank_offset`` and ``local_world_size`` lay the mesh over part of the world; a rank outside has no
    groups. ``gtp_remat_size`` and ``expert_gtp_remat_size`` shard weights further; groups that cross these pieces
    have no gloo twins then, as in Megatron-Core. UCC is for the pipeline groups alone.

    Raises ``NotInitialized`` outside a torch.distributed world, ``Refused`` (an ``AssertionError``, a
    ``RuntimeError`` and a ``ValueError``) for what cannot be, ``AgreementError`` when ranks differ.
    """
    lifecycle.initialize(globals(), Request.of(locals()))


def destroy_model_parallel():
    """Destroy the process groups and set every global to what it was before initialisation.

    Megatron-Core forgets its groups without destroying them, and leaves 13 globals set. Calling it again, or
    before initialisation, clears the globals alone.
    """
    lifecycle.destroy(globals())


def is_initialized():
    """Whether there are data-parallel groups."""
    return _DATA_PARALLEL_GROUP is not None


def is_unitialized() -> bool:
    """Deprecated: not is_initialized()."""
    warnings.warn("is_unitialized is deprecated; call is_initialized", DeprecationWarning, stacklevel=2)
    return not is_initialized()


def model_parallel_is_initialized():
    """Whether there are tensor, pipeline and data-parallel groups."""
    needed = (_TENSOR_MODEL_PARALLEL_GROUP, _PIPELINE_MODEL_PARALLEL_GROUP, _DATA_PARALLEL_GROUP)
    return all(group is not None for group in needed)


def get_all_ranks():
    """This rank's places in tp, dp, cp, pp and ep, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


def update_pg_timeout(timeout: timedelta, pg: dist.ProcessGroup | None = None):  # type: ignore[no-untyped-def]
    """Meet in the group (the world by default), then set the timeout of this group, or of all groups.

    Unlike Megatron-Core this works without a GPU too, and on a group of one rank, where it is nothing.
    """
    lifecycle.set_timeouts(timeout, [pg] if pg is not None else _global_process_group_list or [None], meet_in=pg)


# -- groups for callers: every rank of the world calls these with the same ranks, as torch's new_group ----------------


def create_group(
    ranks=None, timeout=None, backend=None, pg_options=None, use_local_synchronization=False, group_desc=None
):
    """A process group of torch, which ``update_pg_timeout`` then knows on its members."""
    global _global_process_group_list
    group = dist.new_group(
        ranks=ranks,
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    known = _global_process_group_list or [None]
    _global_process_group_list = [*known, group] if ranks is None or dist.get_rank() in ranks else known
    return group


def create_hierarchical_groups(
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
    return making.hierarchical(
        create_group, rank, ranks, hierarchical_group_sizes, create_gloo_process_groups, pg_options, timeout, group_desc
    )


def create_hybrid_dp_cp_groups(rank, ranks, pg_options):
    """The groups of 2, 4, 8, ... up to half of these ranks that ``rank`` is in, by size.

    Where one of these sizes does not divide the number of ranks, this is refused: Megatron-Core then has a group
    that is smaller than its name.
    """
    return making.hybrid(create_group, rank, ranks, pg_options)


def create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None):
    """Communicators of their own for overlapping gathers: over dp_cp, and over the expert data-parallel ranks.

    The second is None unless asked for. The options of dp_cp and ep_dp in ``nccl_comm_cfgs`` are theirs.
    """
    return making.all_gather(globals(), for_expert_parallelism, timeout, nccl_comm_cfgs or {})


# -- tensors ----------------------------------------------------------------------------------------------------------


def get_tensor_model_parallel_group(check_initialized=True):
    """The ranks that share a layer's tensors; None if absent and not checked."""
    if _TENSOR_MODEL_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "tp")
    return _TENSOR_MODEL_PARALLEL_GROUP


def get_tensor_model_parallel_rank():
    """The place of this rank in the tensor-parallel group."""
    if _tp_rank is not None:
        return _tp_rank
    if _MPU_TENSOR_MODEL_PARALLEL_RANK is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return get_tensor_model_parallel_group().rank()


def get_tensor_model_parallel_world_size():
    """The size of the tensor-parallel group."""
    if _tp_size is not None:
        return _tp_size
    if _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return get_tensor_model_parallel_group().size()


def get_tensor_model_parallel_src_rank():
    """The first global rank of the tensor-parallel group."""
    if _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS is None:
        raise absent(globals(), "tp")
    return _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS[0]


def set_tensor_model_parallel_rank(rank):
    """Set the rank that the getter returns; None: the group's own again."""
    global _MPU_TENSOR_MODEL_PARALLEL_RANK
    _MPU_TENSOR_MODEL_PARALLEL_RANK = rank
    refresh(globals())


def set_tensor_model_parallel_world_size(world_size):
    """Set the world size that the getter returns; None: the group's own again."""
    global _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = world_size
    refresh(globals())


# -- stages: the ring of next and prev closes, after the last stage comes the first -----------------------------------


def get_pipeline_model_parallel_group(check_initialized=True):
    """The stages that this rank's activations pass; None if absent and not checked."""
    if _PIPELINE_MODEL_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "pp")
    return _PIPELINE_MODEL_PARALLEL_GROUP


def get_pipeline_model_parallel_rank():
    """The stage of this rank."""
    if _pp_rank is not None:
        return _pp_rank
    if _MPU_PIPELINE_MODEL_PARALLEL_RANK is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_RANK
    return get_pipeline_model_parallel_group().rank()


def get_pipeline_model_parallel_world_size():
    """How many stages there are."""
    if _pp_size is not None:
        return _pp_size
    if _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    return get_pipeline_model_parallel_group().size()


def set_pipeline_model_parallel_rank(rank):
    """Set the rank that the getter returns; None: the group's own again."""
    global _MPU_PIPELINE_MODEL_PARALLEL_RANK
    _MPU_PIPELINE_MODEL_PARALLEL_RANK = rank
    refresh(globals())


def set_pipeline_model_parallel_world_size(world_size):
    """Set the world size that the getter returns; None: the group's own again."""
    global _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size
    refresh(globals())


def get_pipeline_model_parallel_first_rank():
    """The global rank of the first stage of this pipeline."""
    if _first_rank is not None:
        return _first_rank
    if _PIPELINE_GLOBAL_RANKS is None:
        raise absent(globals(), "pp")
    return _PIPELINE_GLOBAL_RANKS[0]


def get_pipeline_model_parallel_last_rank():
    """The global rank of the last stage of this pipeline."""
    if _last_rank is not None:
        return _last_rank
    if _PIPELINE_GLOBAL_RANKS is None:
        raise absent(globals(), "pp")
    return _PIPELINE_GLOBAL_RANKS[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank():
    """The global rank after this one in the pipeline."""
    if _next_rank is not None:
        return _next_rank
    if _PIPELINE_GLOBAL_RANKS is None:
        raise absent(globals(), "pp")
    return _PIPELINE_GLOBAL_RANKS[(get_pipeline_model_parallel_rank() + 1) % get_pipeline_model_parallel_world_size()]


def get_pipeline_model_parallel_prev_rank():
    """The global rank before this one in the pipeline."""
    if _prev_rank is not None:
        return _prev_rank
    if _PIPELINE_GLOBAL_RANKS is None:
        raise absent(globals(), "pp")
    return _PIPELINE_GLOBAL_RANKS[(get_pipeline_model_parallel_rank() - 1) % get_pipeline_model_parallel_world_size()]


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
    return (
        get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1
        if _is_last_stage is None
        else _is_last_stage
    )


def get_virtual_pipeline_model_parallel_rank():
    """The virtual stage that was set, None without."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK


def get_virtual_pipeline_model_parallel_world_size():
    """How many virtual stages a rank has, None without."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def set_virtual_pipeline_model_parallel_rank(rank):
    """Deprecated: pass vp_stage. Set the virtual stage."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK
    warnings.warn(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to is_pipeline_first_stage and "
        "is_pipeline_last_stage",
        DeprecationWarning,
        stacklevel=2,
    )
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank


def set_virtual_pipeline_model_parallel_world_size(world_size):
    """Set how many virtual stages a rank has."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = world_size


def get_embedding_group(check_initialized=True):
    """The stages that hold the word embeddings; None if absent and not checked."""
    if _EMBEDDING_GROUP is None and check_initialized:
        raise absent(globals(), "embd")
    return _EMBEDDING_GROUP


def get_position_embedding_group(check_initialized=True):
    """The stages that hold the position embeddings; None if absent and not checked."""
    if _POSITION_EMBEDDING_GROUP is None and check_initialized:
        raise absent(globals(), "pos_embd")
    return _POSITION_EMBEDDING_GROUP


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


def get_model_parallel_group(check_initialized=True):
    """The ranks that hold one model: tensors and stages; None if absent and not checked."""
    if _MODEL_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "mp")
    return _MODEL_PARALLEL_GROUP


def get_model_parallel_src_rank():
    """The first global rank of the model-parallel group."""
    if _MODEL_PARALLEL_GLOBAL_RANKS is None:
        raise absent(globals(), "mp")
    return _MODEL_PARALLEL_GLOBAL_RANKS[0]


def get_context_parallel_group(check_initialized=True):
    """The ranks that share a sequence; None if absent and not checked."""
    if _CONTEXT_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "cp")
    return _CONTEXT_PARALLEL_GROUP


def get_context_parallel_rank():
    """The place of this rank in the context-parallel group."""
    if _cp_rank is not None:
        return _cp_rank
    if not in_a_world():
        return 0
    return get_context_parallel_group().rank()


def get_context_parallel_world_size():
    """The size of the context-parallel group."""
    if _cp_size is not None:
        return _cp_size
    if not in_a_world():
        return 0
    return get_context_parallel_group().size()


def get_context_parallel_global_ranks(check_initialized=True):
    """The global ranks of the context-parallel group."""
    if _CONTEXT_PARALLEL_GLOBAL_RANKS is None and check_initialized:
        raise absent(globals(), "cp")
    return _CONTEXT_PARALLEL_GLOBAL_RANKS


def get_hierarchical_context_parallel_groups(check_initialized=True):
    """The context-parallel groups of each level, innermost first."""
    if _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS is None and check_initialized:
        raise absent(globals(), "hcp")
    return _HIERARCHICAL_CONTEXT_PARALLEL_GROUPS


def get_hybrid_data_context_parallel_groups(check_initialized=True, group_size=None):
    """The hybrid group of this size inside dp_cp; the size of dp_cp gives dp_cp itself."""
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        if _DATA_PARALLEL_GROUP_WITH_CP is None and check_initialized:
            raise absent(globals(), "dp_cp")
        return _DATA_PARALLEL_GROUP_WITH_CP
    if group_size not in _HYBRID_DP_CP_GROUPS:
        raise unknown_group_size(group_size, sorted(_HYBRID_DP_CP_GROUPS))
    return _HYBRID_DP_CP_GROUPS[group_size]


def get_tensor_and_context_parallel_group(check_initialized=True):
    """The ranks that share a layer's tensors and a sequence; None if absent and not checked."""
    if _TENSOR_AND_CONTEXT_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "tp_cp")
    return _TENSOR_AND_CONTEXT_PARALLEL_GROUP


def get_tensor_and_context_parallel_rank():
    """The place of this rank in the tensor and context parallel group."""
    if not in_a_world():
        return 0
    return get_tensor_and_context_parallel_group().rank()


def get_tensor_and_context_parallel_world_size():
    """The size of the tensor and context parallel group."""
    if not in_a_world():
        return 0
    return get_tensor_and_context_parallel_group().size()


# -- data -------------------------------------------------------------------------------------------------------------
#
#   plain                                                  dp
#   with_context_parallel                                  dp_cp
#   with_context_parallel, partial_data_parallel           intra_dp_cp     one optimizer instance
#   with_context_parallel, independent_all_gather          dp_cp_ag
#   with_gtp_remat (the default) of sharded weights        dp_gtp, dp_cp_gtp: all ranks that have other data


def get_data_parallel_group(
    with_context_parallel=False, partial_data_parallel=False, independent_all_gather=False, with_gtp_remat=True
):
    """The data-parallel group that the flags choose."""
    whole = with_gtp_remat and rankmesh_state.sharded
    if partial_data_parallel:
        if not with_context_parallel:
            raise without_context(globals(), "dp")
        kind = "intra_dp_cp_gtp" if whole else "intra_dp_cp"
        group = (
            _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
            if whole
            else _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
        )
    elif with_context_parallel:
        if independent_all_gather:
            kind, group = "dp_cp_ag", _DATA_PARALLEL_GROUP_WITH_CP_AG
        else:
            kind = "dp_cp"
            group = _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT if whole else _DATA_PARALLEL_GROUP_WITH_CP
    else:
        kind, group = "dp", _DATA_PARALLEL_GROUP_WITH_GTP_REMAT if whole else _DATA_PARALLEL_GROUP
    if group is None:
        raise absent(globals(), kind)
    return group


def get_data_parallel_rank(with_context_parallel=False, partial_data_parallel=False, with_gtp_remat=True):
    """The place of this rank in the data-parallel group that the flags choose."""
    kept = _dp_cp_rank if with_context_parallel else _dp_rank
    if kept is not None and with_gtp_remat and not partial_data_parallel:
        return kept
    if _MPU_DATA_PARALLEL_RANK is not None:
        return _MPU_DATA_PARALLEL_RANK
    if not in_a_world():
        return 0
    return get_data_parallel_group(
        with_context_parallel=with_context_parallel,
        partial_data_parallel=partial_data_parallel,
        with_gtp_remat=with_gtp_remat,
    ).rank()


def get_data_parallel_world_size(with_context_parallel=False, partial_data_parallel=False, with_gtp_remat=True):
    """The size of the data-parallel group that the flags choose."""
    kept = _dp_cp_size if with_context_parallel else _dp_size
    if kept is not None and with_gtp_remat and not partial_data_parallel:
        return kept
    if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
        return _MPU_DATA_PARALLEL_WORLD_SIZE
    if not in_a_world():
        return 0
    return get_data_parallel_group(
        with_context_parallel=with_context_parallel,
        partial_data_parallel=partial_data_parallel,
        with_gtp_remat=with_gtp_remat,
    ).size()


def set_data_parallel_rank(rank):
    """Set the rank that the getter returns; None: the group's own again."""
    global _MPU_DATA_PARALLEL_RANK
    _MPU_DATA_PARALLEL_RANK = rank
    refresh(globals())


def get_data_parallel_group_gloo(with_context_parallel=False, partial_data_parallel=False):
    """The CPU twin of the data-parallel group that the flags choose."""
    if partial_data_parallel and not with_context_parallel:
        raise without_context(globals(), "dp_gloo")
    if partial_data_parallel:
        kind, group = "intra_dp_cp_gloo", _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO
    elif with_context_parallel:
        kind, group = "dp_cp_gloo", _DATA_PARALLEL_GROUP_WITH_CP_GLOO
    else:
        kind, group = "dp_gloo", _DATA_PARALLEL_GROUP_GLOO
    if group is None:
        raise absent(globals(), kind)
    return group


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
        raise absent(globals(), "dp_cp" if with_context_parallel else "dp")
    return ranks


def get_tensor_and_data_parallel_group(check_initialized=True, with_context_parallel=False):
    """Tensor and data parallel ranks together."""
    group = _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP if with_context_parallel else _TENSOR_AND_DATA_PARALLEL_GROUP
    if group is None and check_initialized:
        raise absent(globals(), "tp_dp_cp" if with_context_parallel else "tp_dp")
    return group


def get_amax_reduction_group(with_context_parallel=False, tp_only_amax_red=False):
    """The ranks that agree on the largest value of an FP8 tensor."""
    if tp_only_amax_red:
        return get_tensor_and_context_parallel_group() if with_context_parallel else get_tensor_model_parallel_group()
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


# -- experts ----------------------------------------------------------------------------------------------------------


def get_expert_model_parallel_group(check_initialized=True):
    """The ranks that hold different experts; None if absent and not checked."""
    if _EXPERT_MODEL_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "ep")
    return _EXPERT_MODEL_PARALLEL_GROUP


def get_expert_model_parallel_rank():
    """The place of this rank in the expert-parallel group."""
    if _ep_rank is not None:
        return _ep_rank
    if _MPU_EXPERT_MODEL_PARALLEL_RANK is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_RANK
    if not in_a_world():
        return 0
    return get_expert_model_parallel_group().rank()


def get_expert_model_parallel_world_size():
    """The size of the expert-parallel group."""
    if _ep_size is not None:
        return _ep_size
    if _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    if not in_a_world():
        return 0
    return get_expert_model_parallel_group().size()


def get_expert_model_parallel_src_rank():
    """The first global rank of the expert-parallel group."""
    if _EXPERT_MODEL_PARALLEL_RANKS is None:
        raise absent(globals(), "ep")
    return _EXPERT_MODEL_PARALLEL_RANKS[0]


def set_expert_model_parallel_rank(rank):
    """Set the rank that the getter returns; None: the group's own again."""
    global _MPU_EXPERT_MODEL_PARALLEL_RANK
    _MPU_EXPERT_MODEL_PARALLEL_RANK = rank
    refresh(globals())


def set_expert_model_parallel_world_size(world_size):
    """Set the world size that the getter returns; None: the group's own again."""
    global _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE = world_size
    refresh(globals())


def get_expert_tensor_parallel_group(check_initialized=True):
    """The ranks that share an expert's tensors; None if absent and not checked."""
    if _EXPERT_TENSOR_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "ep_tp")
    return _EXPERT_TENSOR_PARALLEL_GROUP


def get_expert_tensor_parallel_rank():
    """The place of this rank in the group of an expert's tensors; without one, what was set for the tensor group."""
    if _expert_tp_rank is not None:
        return _expert_tp_rank
    if _MPU_EXPERT_TENSOR_PARALLEL_RANK is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_RANK
    if not _EXPERT_TENSOR_PARALLEL_GROUP:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return get_expert_tensor_parallel_group().rank()


def get_expert_tensor_parallel_world_size():
    """The size of the group of an expert's tensors; without one, what was set for the tensor group."""
    if _expert_tp_size is not None:
        return _expert_tp_size
    if _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE is not None:
        return _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    if not _EXPERT_TENSOR_PARALLEL_GROUP:
        return _MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE
    return get_expert_tensor_parallel_group().size()


def set_expert_tensor_parallel_rank(rank):
    """Set the rank that the getter returns; None: the group's own again."""
    global _MPU_EXPERT_TENSOR_PARALLEL_RANK
    _MPU_EXPERT_TENSOR_PARALLEL_RANK = rank
    refresh(globals())


def set_expert_tensor_parallel_world_size(world_size):
    """Set the world size that the getter returns; None: the group's own again."""
    global _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE
    _MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE = world_size
    refresh(globals())


def get_expert_tensor_and_model_parallel_group(check_initialized=True):
    """The ranks that share an expert's tensors, and those of the other experts; None if absent and not checked."""
    if _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "tp_ep_mp")
    return _EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP


def get_expert_tensor_and_model_parallel_rank():
    """The place of this rank in the expert tensor and model parallel group."""
    if not in_a_world():
        return 0
    return get_expert_tensor_and_model_parallel_group().rank()


def get_expert_tensor_and_model_parallel_world_size():
    """The size of the expert tensor and model parallel group."""
    if not in_a_world():
        return 0
    return get_expert_tensor_and_model_parallel_group().size()


def get_expert_tensor_model_pipeline_parallel_group(check_initialized=True, with_egtp_remat=False):
    """The ranks of one model's experts; with_egtp_remat: with those that hold other pieces of their weights."""
    group = _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP
    if with_egtp_remat:
        group = _EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP
    if group is None and check_initialized:
        raise absent(globals(), "tp_ep_pp")
    return group


def get_expert_data_parallel_group(check_initialized=True, partial_expert_data_parallel=False, with_gtp_remat=True):
    """The ranks that hold the same experts; partial: those of one optimizer instance."""
    whole = with_gtp_remat and rankmesh_state.experts_sharded
    if partial_expert_data_parallel:
        kind, group = "intra_ep_dp", _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT if whole else group
    else:
        kind, group = "ep_dp", _EXPERT_DATA_PARALLEL_GROUP
        group = _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT if whole else group
    if group is None and check_initialized:
        raise absent(globals(), kind)
    return group


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel=False):
    """Deprecated: get_expert_data_parallel_group."""
    warnings.warn(
        "get_data_modulo_expert_parallel_group is deprecated; call get_expert_data_parallel_group",
        DeprecationWarning,
        stacklevel=2,
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel=False):
    """The CPU twin of the expert data-parallel group."""
    kind, group = "ep_dp_gloo", _EXPERT_DATA_PARALLEL_GROUP_GLOO
    if partial_expert_data_parallel:
        kind, group = "intra_ep_dp_gloo", _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO
    if group is None:
        raise absent(globals(), kind)
    return group


def get_expert_data_parallel_rank(partial_expert_data_parallel=False, with_gtp_remat=True):
    """The place of this rank in the expert data-parallel group that the flags choose."""
    if _expert_dp_rank is not None and with_gtp_remat and not partial_expert_data_parallel:
        return _expert_dp_rank
    if not in_a_world():
        return 0
    return get_expert_data_parallel_group(
        partial_expert_data_parallel=partial_expert_data_parallel, with_gtp_remat=with_gtp_remat
    ).rank()


def get_expert_data_parallel_world_size(partial_expert_data_parallel=False, with_gtp_remat=True):
    """The size of the expert data-parallel group that the flags choose."""
    if _expert_dp_size is not None and with_gtp_remat and not partial_expert_data_parallel:
        return _expert_dp_size
    if not in_a_world():
        return 0
    return get_expert_data_parallel_group(
        partial_expert_data_parallel=partial_expert_data_parallel, with_gtp_remat=with_gtp_remat
    ).size()


# -- optimizer instances, and pieces of weights -----------------------------------------------------------------------


def get_inter_distributed_optimizer_instance_group(check_initialized=True):
    """The same shard in every optimizer instance; None if absent and not checked."""
    if _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP is None and check_initialized:
        raise absent(globals(), "inter_ep_dp")
    return _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP


def get_intra_distributed_optimizer_instance_group(check_initialized=True):
    """The ranks of one optimizer instance; None if absent and not checked."""
    if _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP is None and check_initialized:
        raise absent(globals(), "intra_dist_opt_instance")
    return _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP


def get_gtp_weight_remat_group(check_initialized=True):
    """The ranks that hold the pieces of a weight; None if absent and not checked."""
    if _GTP_WEIGHT_REMAT_GROUP is None and check_initialized:
        raise absent(globals(), "gtp_remat")
    return _GTP_WEIGHT_REMAT_GROUP


def get_gtp_weight_remat_rank():
    """The place of this rank among the ranks that hold pieces of a weight; 0 without them."""
    group = get_gtp_weight_remat_group(check_initialized=False) if in_a_world() else None
    return 0 if group is None else group.rank()


def get_gtp_weight_remat_world_size():
    """How many are the ranks that hold pieces of a weight; 0 without them."""
    group = get_gtp_weight_remat_group(check_initialized=False) if in_a_world() else None
    return 0 if group is None else group.size()


def get_gtp_weight_remat_global_ranks(check_initialized=True):
    """The global ranks of the ranks that hold the pieces of a weight."""
    if _GTP_WEIGHT_REMAT_GLOBAL_RANKS is None and check_initialized:
        raise absent(globals(), "gtp_remat")
    return _GTP_WEIGHT_REMAT_GLOBAL_RANKS


def get_expert_gtp_weight_remat_group(check_initialized=True):
    """The ranks that hold the pieces of an expert's weight; None if absent and not checked."""
    if _EXPERT_GTP_WEIGHT_REMAT_GROUP is None and check_initialized:
        raise absent(globals(), "expt_gtp_remat")
    return _EXPERT_GTP_WEIGHT_REMAT_GROUP


def get_expert_gtp_weight_remat_rank():
    """The place of this rank among the ranks that hold pieces of an expert's weight; 0 without them."""
    group = get_expert_gtp_weight_remat_group(check_initialized=False) if in_a_world() else None
    return 0 if group is None else group.rank()


def get_expert_gtp_weight_remat_world_size():
    """How many are the ranks that hold pieces of an expert's weight; 0 without them."""
    group = get_expert_gtp_weight_remat_group(check_initialized=False) if in_a_world() else None
    return 0 if group is None else group.size()


def get_expert_gtp_weight_remat_global_ranks(check_initialized=True):
    """The global ranks of the ranks that hold the pieces of an expert's weight."""
    if _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS is None and check_initialized:
        raise absent(globals(), "expt_gtp_remat")
    return _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS


# -- memory that is lent by name --------------------------------------------------------------------------------------


def _set_global_memory_buffer():
    """Make the global memory buffer."""
    global _GLOBAL_MEMORY_BUFFER
    if _GLOBAL_MEMORY_BUFFER is not None:
        raise second_buffer("memory buffer")
    _GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()


def get_global_memory_buffer():
    """The global memory buffer."""
    if _GLOBAL_MEMORY_BUFFER is None:
        raise no_buffer("memory buffer")
    return _GLOBAL_MEMORY_BUFFER


def destroy_global_memory_buffer():
    """Forget the global memory buffer."""
    global _GLOBAL_MEMORY_BUFFER
    _GLOBAL_MEMORY_BUFFER = None


def _set_global_symmetric_memory_buffer():
    """Make the global symmetric memory buffer."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    if _GLOBAL_SYMMETRIC_MEMORY_BUFFER is not None:
        raise second_buffer("symmetric memory buffer")
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = GlobalSymmetricMemoryBuffer(
        SYMMETRIC_MEGABYTES, get_tensor_model_parallel_group()
    )


def get_global_symmetric_memory_buffer():
    """The global symmetric memory buffer."""
    if _GLOBAL_SYMMETRIC_MEMORY_BUFFER is None:
        raise no_buffer("symmetric memory buffer")
    return _GLOBAL_SYMMETRIC_MEMORY_BUFFER


def destroy_global_symmetric_memory_buffer():
    """Forget the global symmetric memory buffer."""
    global _GLOBAL_SYMMETRIC_MEMORY_BUFFER
    _GLOBAL_SYMMETRIC_MEMORY_BUFFER = None


rankmesh_state = begin(globals())
