"""Drop-in for ``megatron.core.parallel_state``: the same functions and globals, over a rankmesh plan.

```python
from rankmesh.dialects.megatron import parallel_state

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
parallel_state.get_tensor_model_parallel_group()
```

The functions match Megatron-Core 0.16.1; what later releases added follows the parameters that were there.
``releases.py`` has what differs by release. ``ParallelState(name)`` executes this file again: the same functions over
separate globals, which ``table.py`` lists. Where it differs from Megatron-Core:

- a rank makes only the groups that it is in, after all ranks agreed; groups with the same members share a
  communicator, and a group of one rank has none; a gloo group is its own CPU counterpart
- ``destroy_model_parallel`` destroys the groups, and clears every global
- a refused ``initialize_model_parallel`` leaves nothing behind
- an order that names an axis twice, hybrid context parallelism that does not fill its groups, embedding functions
  that do not choose by position, and unknown sections of an NCCL configuration are refused
- SHARP is an option of one communicator: no environment variable is changed
- where ``torch.distributed.new_group``, ``create_group`` or ``get_nccl_options`` is replaced, initialisation is refused

>>> from rankmesh.dialects.megatron import parallel_state
>>> parallel_state.is_initialized(), parallel_state._MODEL_PARALLEL_GROUP
(False, None)
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all: none are postponed, and many functions have none.

import sys
import warnings
from datetime import timedelta
from typing import Any, Callable, List, cast  # noqa: UP035

import torch.distributed as dist

from rankmesh.dialects.megatron import lifecycle
from rankmesh.dialects.megatron.buffers import GlobalMemoryBuffer
from rankmesh.dialects.megatron.getters import Getters
from rankmesh.dialects.megatron.nccl import get_nccl_options, overwrite_nccl_comm_cfgs  # noqa: F401
from rankmesh.dialects.megatron.rank_generator import (  # noqa: F401
    RankGenerator,
    _inject_gtp_remat_axis,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)
from rankmesh.dialects.megatron.refusals import NotInitialized, UnknownName
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import RankIn, SizeOf, State
from rankmesh.dialects.megatron.table import GLOBALS

# The state that these functions read and write: the globals below, and what ``State`` keeps beside them.
rankmesh_state: State = globals().get("rankmesh_state") or State(sys.modules[__name__], "megatron")

vars(rankmesh_state.module).update(dict.fromkeys(GLOBALS))
# Those that functions of this file read by themselves.
_DATA_PARALLEL_GROUP = _DATA_PARALLEL_GROUP_WITH_CP = _EXPERT_DATA_PARALLEL_GROUP = cast(Any, None)
_PIPELINE_GLOBAL_RANKS = _MPU_DATA_PARALLEL_RANK = _MPU_DATA_PARALLEL_WORLD_SIZE = cast(Any, None)
_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = cast(Any, None)
_HYBRID_DP_CP_GROUPS: Any = {}
_global_process_group_list = cast(Any, None)

# This rank's place in each process group that the state made, and its size: neither changes, and torch takes 100 ns.
_rank_in, _size_of = RankIn(), SizeOf()

getters = Getters(rankmesh_state)


def _absent(kind, check=True):
    """Return None for a group that this rank does not have, or raise the reason."""
    if check:
        raise rankmesh_state.absent(kind)


def _outside(kind):
    """Return None outside a world, which has groups of no kind; inside one, raise why this group is missing."""
    return _absent(kind, dist.is_initialized())


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
    rank_offset: int = 0,
    local_world_size: int | None = None,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
) -> None:
    """Make every process group of this rank, dense and expert, and fill the globals of this state.

    Arguments as in Megatron-Core; sizes are numbers of ranks, the data-parallel size is what they leave. Each
    rank makes its own groups only, after all ranks agreed on the plan. A refused call leaves no group and no
    global behind.

    ``order`` names the axes, fastest first, each once. ``get_embedding_ranks`` and
    ``get_position_embedding_ranks`` take the ranks of one pipeline and choose by position, the same in each
    pipeline. ``rank_offset`` and ``local_world_size`` lay the mesh over part of the world; a rank outside has no
    groups. ``gtp_remat_size`` and ``expert_gtp_remat_size`` shard weights further; groups that cross these pieces
    have no CPU counterparts then, as in Megatron-Core. UCC is for the pipeline groups only.

    Raises ``NotInitialized`` outside a torch.distributed world, ``Refused`` (an ``AssertionError``, a
    ``RuntimeError`` and a ``ValueError``) for what cannot be, ``AgreementError`` when ranks differ.
    """
    lifecycle.initialize(rankmesh_state, Request(**locals()))


def destroy_model_parallel():
    """Destroy the process groups and set every global to its value before initialisation.

    Megatron-Core forgets its groups without destroying them, and leaves 13 globals set. Calling it again, or
    before initialisation, clears the globals only.
    """
    lifecycle.destroy(rankmesh_state)


def is_initialized():
    """Return whether there are data-parallel groups."""
    return _DATA_PARALLEL_GROUP is not None


def is_unitialized() -> bool:
    """Return the opposite of is_initialized(). Deprecated."""
    warnings.warn("is_unitialized is deprecated; call is_initialized", DeprecationWarning, stacklevel=2)
    return not is_initialized()


def model_parallel_is_initialized():
    """Return whether there are tensor, pipeline and data-parallel groups."""
    return all(rankmesh_state.given(kind, False) is not None for kind in ("tp", "pp", "dp"))


def get_all_ranks():
    """Return this rank's places in tp, dp, cp, pp and ep, joined by underscores; since 0.19 gtp_remat is behind tp."""
    ranks = (
        get_tensor_model_parallel_rank(),
        *([get_gtp_weight_remat_rank()] if rankmesh_state.has_pieces else []),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


def update_pg_timeout(timeout: timedelta, pg: dist.ProcessGroup | None = None):  # type: ignore[no-untyped-def]
    """Wait for the ranks of the group (the world by default), then set the timeout of this group, or of all groups.

    Unlike Megatron-Core this works without a GPU too, and on a group of one rank, where it is nothing.
    """
    lifecycle.set_timeouts(timeout, [pg] if pg is not None else _global_process_group_list or [None], meet_in=pg)


# -- tensors ----------------------------------------------------------------------------------------------------------

get_tensor_model_parallel_group = getters.group("tp")
get_tensor_model_parallel_rank = getters.rank("tp", "_MPU_TENSOR_MODEL_PARALLEL_RANK", absent="an error")
get_tensor_model_parallel_world_size = getters.size("tp", "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", absent="an error")
get_tensor_model_parallel_src_rank = getters.first("tp")
set_tensor_model_parallel_rank = getters.set_rank("_MPU_TENSOR_MODEL_PARALLEL_RANK")
set_tensor_model_parallel_world_size = getters.set_size("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE")

# -- stages: the ring of next and prev closes, after the last stage comes the first -----------------------------------

get_pipeline_model_parallel_group = getters.group("pp")
get_pipeline_model_parallel_rank = getters.rank("pp", "_MPU_PIPELINE_MODEL_PARALLEL_RANK", absent="an error")
get_pipeline_model_parallel_world_size = getters.size(
    "pp", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", absent="an error"
)
get_pipeline_model_parallel_first_rank = getters.first("pp")
set_pipeline_model_parallel_rank = getters.set_rank("_MPU_PIPELINE_MODEL_PARALLEL_RANK")
set_pipeline_model_parallel_world_size = getters.set_size("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")
set_virtual_pipeline_model_parallel_world_size = getters.set_size("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE")


def get_virtual_pipeline_model_parallel_rank():
    """Return the virtual stage that was set, None without."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK


def get_virtual_pipeline_model_parallel_world_size():
    """Return the number of virtual stages of a rank, None without them."""
    return _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE


def set_virtual_pipeline_model_parallel_rank(rank):
    """Set the virtual stage. Deprecated: pass vp_stage."""
    global _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK
    warnings.warn(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to is_pipeline_first_stage and "
        "is_pipeline_last_stage",
        DeprecationWarning,
        stacklevel=2,
    )
    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = rank


def get_pipeline_model_parallel_last_rank():
    """Return the global rank of the last stage of this pipeline."""
    return (_PIPELINE_GLOBAL_RANKS or _absent("pp"))[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank():
    """Return the global rank after this one in the pipeline."""
    place = (get_pipeline_model_parallel_rank() + 1) % get_pipeline_model_parallel_world_size()
    return (_PIPELINE_GLOBAL_RANKS or _absent("pp"))[place]


def get_pipeline_model_parallel_prev_rank():
    """Return the global rank before this one in the pipeline."""
    place = (get_pipeline_model_parallel_rank() - 1) % get_pipeline_model_parallel_world_size()
    return (_PIPELINE_GLOBAL_RANKS or _absent("pp"))[place]


def is_pipeline_first_stage(ignore_virtual=True, vp_stage=None):
    """Return whether this rank is the first stage, and with virtual stages heeded vp_stage the first as well."""
    return _is_virtual_stage(0, ignore_virtual, vp_stage) and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual=True, vp_stage=None):
    """Return whether this rank is the last stage, and with virtual stages heeded vp_stage the last as well."""
    if not _is_virtual_stage(-1, ignore_virtual, vp_stage):
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _is_virtual_stage(number, ignore_virtual, vp_stage):
    stages = get_virtual_pipeline_model_parallel_world_size()
    if ignore_virtual or stages is None:
        return True
    if vp_stage is None:
        raise NotInitialized("vp_stage is not given in an interleaved pipeline; name the virtual stage: vp_stage=0")
    return vp_stage == number % stages


def is_rank_in_embedding_group(ignore_virtual=True, vp_stage=None):
    """Return whether this rank (and vp_stage, when virtual stages are heeded) holds the word embeddings."""
    rank, ranks = dist.get_rank(), rankmesh_state.ranks("embd", False)
    if ranks is None or rank not in ranks:
        return False
    if ignore_virtual or rank not in (ranks[0], ranks[-1]):
        return True
    at_its_end = is_pipeline_first_stage if rank == ranks[0] else is_pipeline_last_stage
    return at_its_end(ignore_virtual=False, vp_stage=vp_stage)


def is_rank_in_position_embedding_group():
    """Return whether this rank holds the position embeddings."""
    return dist.get_rank() in (rankmesh_state.ranks("pos_embd", False) or ())


get_embedding_group = getters.group("embd")
get_position_embedding_group = getters.group("pos_embd")

# -- the whole model, and context -------------------------------------------------------------------------------------

get_model_parallel_group = getters.group("mp")
get_model_parallel_src_rank = getters.first("mp")
get_context_parallel_group = getters.group("cp")
get_context_parallel_rank = getters.rank("cp")
get_context_parallel_world_size = getters.size("cp")
get_context_parallel_global_ranks = getters.ranks("cp")
get_hierarchical_context_parallel_groups = getters.group("hcp")
get_tensor_and_context_parallel_group = getters.group("tp_cp")
get_tensor_and_context_parallel_rank = getters.rank("tp_cp")
get_tensor_and_context_parallel_world_size = getters.size("tp_cp")


def get_hybrid_data_context_parallel_groups(check_initialized=True, group_size=None):
    """Return the hybrid group of this size inside dp_cp; the size of dp_cp gives dp_cp itself."""
    if get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return rankmesh_state.given("dp_cp", check_initialized)
    if group_size not in _HYBRID_DP_CP_GROUPS:
        known = sorted(_HYBRID_DP_CP_GROUPS)
        raise UnknownName(
            f"group_size is {group_size!r}, but the hybrid groups of this rank have {known} ranks; use one of these, "
            "and hybrid_context_parallel=True at initialisation",
            received=group_size,
            known=known,
        )
    return _HYBRID_DP_CP_GROUPS[group_size]


def get_amax_reduction_group(with_context_parallel=False, tp_only_amax_red=False):
    """Return the ranks that agree on the largest value of an FP8 tensor."""
    if tp_only_amax_red:
        return get_tensor_and_context_parallel_group() if with_context_parallel else get_tensor_model_parallel_group()
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


# -- experts ----------------------------------------------------------------------------------------------------------

get_expert_model_parallel_group = getters.group("ep")
get_expert_model_parallel_rank = getters.rank("ep", "_MPU_EXPERT_MODEL_PARALLEL_RANK")
get_expert_model_parallel_world_size = getters.size("ep", "_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE")
get_expert_model_parallel_src_rank = getters.first("ep")
set_expert_model_parallel_rank = getters.set_rank("_MPU_EXPERT_MODEL_PARALLEL_RANK")
set_expert_model_parallel_world_size = getters.set_size("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE")
get_expert_tensor_parallel_group = getters.group("ep_tp")
set_expert_tensor_parallel_rank = getters.set_rank("_MPU_EXPERT_TENSOR_PARALLEL_RANK")
set_expert_tensor_parallel_world_size = getters.set_size("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE")
get_expert_tensor_and_model_parallel_group = getters.group("tp_ep_mp")
get_expert_tensor_and_model_parallel_rank = getters.rank("tp_ep_mp")
get_expert_tensor_and_model_parallel_world_size = getters.size("tp_ep_mp")
# Without the group they are the tensor parallel ones that a program wrote.
get_expert_tensor_parallel_rank = getters.rank(
    "ep_tp", "_MPU_EXPERT_TENSOR_PARALLEL_RANK", absent="_MPU_TENSOR_MODEL_PARALLEL_RANK"
)
get_expert_tensor_parallel_world_size = getters.size(
    "ep_tp", "_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE", absent="_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE"
)


def get_expert_tensor_model_pipeline_parallel_group(check_initialized=True, with_egtp_remat=False):
    """Return the ranks of one model's experts; with_egtp_remat: with those that hold other pieces of their weights."""
    return rankmesh_state.given("tp_ep_pp_gtp" if with_egtp_remat else "tp_ep_pp", check_initialized)


# -- data -------------------------------------------------------------------------------------------------------------


def get_data_parallel_group(
    with_context_parallel=False, partial_data_parallel=False, independent_all_gather=False, with_gtp_remat=True
):
    """Return the data-parallel group that the flags choose."""
    if independent_all_gather and with_context_parallel and not partial_data_parallel:
        return rankmesh_state.given("dp_cp_ag")
    return _data_group(with_context_parallel, partial_data_parallel, with_gtp_remat, _absent)


def get_data_parallel_rank(with_context_parallel=False, partial_data_parallel=False, with_gtp_remat=True):
    """Return this rank's place in the data-parallel group that the flags choose; 0 without torch.distributed."""
    if _MPU_DATA_PARALLEL_RANK is not None:
        return _MPU_DATA_PARALLEL_RANK
    return _rank_in[_data_group(with_context_parallel, partial_data_parallel, with_gtp_remat)]


def get_data_parallel_world_size(with_context_parallel=False, partial_data_parallel=False, with_gtp_remat=True):
    """Return the size of the data-parallel group that the flags choose; 0 without torch.distributed."""
    if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
        return _MPU_DATA_PARALLEL_WORLD_SIZE
    return _size_of[_data_group(with_context_parallel, partial_data_parallel, with_gtp_remat)]


def _data_group(with_context_parallel, partial_data_parallel, with_gtp_remat, absent=_outside):
    kind = "dp_cp" if with_context_parallel else "dp"
    if partial_data_parallel:
        if not with_context_parallel:
            raise rankmesh_state.without_context("dp")
        kind = "intra_dp_cp"
    elif not (with_gtp_remat and rankmesh_state.pieces):
        return (_DATA_PARALLEL_GROUP_WITH_CP if with_context_parallel else _DATA_PARALLEL_GROUP) or absent(kind)
    return rankmesh_state.given(kind, False, whole=with_gtp_remat) or absent(kind)


set_data_parallel_rank = getters.set_rank("_MPU_DATA_PARALLEL_RANK")


def get_data_parallel_group_gloo(with_context_parallel=False, partial_data_parallel=False):
    """Return the CPU (gloo) counterpart of the data-parallel group that the flags choose."""
    if partial_data_parallel and not with_context_parallel:
        raise rankmesh_state.without_context("dp_gloo")
    kind = "dp_cp_gloo" if with_context_parallel else "dp_gloo"
    return rankmesh_state.given(f"intra_{kind}" if partial_data_parallel else kind)


def has_separate_all_gather_group() -> bool:
    """Return whether gathers have a communicator of their own."""
    return rankmesh_state.given("dp_cp_ag", False) is not None


def get_data_parallel_src_rank(with_context_parallel=False):
    """Return the first global rank of the data-parallel group."""
    return get_data_parallel_global_ranks(with_context_parallel)[0]


def get_data_parallel_global_ranks(with_context_parallel=False):
    """Return the global ranks of the data-parallel group."""
    return rankmesh_state.ranks("dp_cp" if with_context_parallel else "dp")


def get_tensor_and_data_parallel_group(check_initialized=True, with_context_parallel=False):
    """Tensor and data parallel ranks together."""
    return rankmesh_state.given("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


# -- experts' data ----------------------------------------------------------------------------------------------------


def get_expert_data_parallel_group(check_initialized=True, partial_expert_data_parallel=False, with_gtp_remat=True):
    """Return the ranks that hold the same experts; partial: inside one optimizer instance."""
    kind = "intra_ep_dp" if partial_expert_data_parallel else "ep_dp"
    return rankmesh_state.given(kind, check_initialized, whole=with_gtp_remat)


def get_expert_data_parallel_rank(partial_expert_data_parallel=False, with_gtp_remat=True):
    """Return this rank's place in the expert data-parallel group; 0 without torch.distributed."""
    return _rank_in[_expert_data_group(partial_expert_data_parallel, with_gtp_remat)]


def get_expert_data_parallel_world_size(partial_expert_data_parallel=False, with_gtp_remat=True):
    """Return the size of the expert data-parallel group that the flags choose; 0 without torch.distributed."""
    return _size_of[_expert_data_group(partial_expert_data_parallel, with_gtp_remat)]


def _expert_data_group(partial_expert_data_parallel, with_gtp_remat):
    if partial_expert_data_parallel or (with_gtp_remat and rankmesh_state.expert_pieces):
        kind = "intra_ep_dp" if partial_expert_data_parallel else "ep_dp"
        return rankmesh_state.given(kind, False, whole=with_gtp_remat) or _outside("ep_dp")
    return _EXPERT_DATA_PARALLEL_GROUP or _outside("ep_dp")


def get_data_modulo_expert_parallel_group(partial_expert_data_parallel=False):
    """Return get_expert_data_parallel_group(). Deprecated."""
    warnings.warn(
        "get_data_modulo_expert_parallel_group is deprecated; call get_expert_data_parallel_group",
        DeprecationWarning,
        stacklevel=2,
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel=False):
    """Return the CPU (gloo) counterpart of the expert data-parallel group."""
    return rankmesh_state.given("intra_ep_dp_gloo" if partial_expert_data_parallel else "ep_dp_gloo")


# -- optimizer instances, and pieces of weights -----------------------------------------------------------------------


get_inter_distributed_optimizer_instance_group = getters.group("inter_ep_dp")
get_intra_distributed_optimizer_instance_group = getters.group("intra_dist_opt_instance")
get_gtp_weight_remat_group = getters.group("gtp_remat")
get_gtp_weight_remat_rank = getters.rank("gtp_remat", absent="0")
get_gtp_weight_remat_world_size = getters.size("gtp_remat", absent="0")
get_gtp_weight_remat_global_ranks = getters.ranks("gtp_remat")
get_expert_gtp_weight_remat_group = getters.group("expt_gtp_remat")
get_expert_gtp_weight_remat_rank = getters.rank("expt_gtp_remat", absent="0")
get_expert_gtp_weight_remat_world_size = getters.size("expt_gtp_remat", absent="0")
get_expert_gtp_weight_remat_global_ranks = getters.ranks("expt_gtp_remat")

# -- groups for callers: every rank of the world calls these with the same ranks, as torch's new_group ----------------


def create_group(
    ranks=None, timeout=None, backend=None, pg_options=None, use_local_synchronization=False, group_desc=None
):
    """Make a process group of torch, which ``update_pg_timeout`` then knows on its members."""
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
    """Return the groups of ``rank`` at each level of a hierarchy of these ranks, and their CPU counterparts: two lists.

    A counterpart takes no NCCL options, which Megatron-Core gives it.
    """
    found, on_cpu = [], []
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(hierarchical_group_sizes)
    for level, members in lifecycle.levels(ranks, hierarchical_group_sizes):
        name = f"HIERARCHICAL_{group_desc}"
        group = create_group(members, timeout=timeout, pg_options=options[level], group_desc=f"{name}_L{level}")
        counterpart = None
        if create_gloo_process_groups:
            counterpart = create_group(members, timeout=timeout, backend="gloo", group_desc=f"{name}_GLOO_L{level}")
        if rank in members:
            found.append(group)
            on_cpu.append(counterpart)
    return found, on_cpu


def create_hybrid_dp_cp_groups(rank, ranks, pg_options):
    """Return the groups of 2, 4, 8, ... up to half of these ranks that ``rank`` is in, by size.

    Where one of these sizes does not divide the number of ranks, this is refused: Megatron-Core then has a group
    that is smaller than its name.
    """
    found = {}
    for exponent in range(1, len(ranks).bit_length() - 1):
        size = 2**exponent
        for _, members in lifecycle.levels(ranks, (size, len(ranks) // size), only=0):
            group = create_group(members, pg_options=pg_options, group_desc=f"HYBRID_DP_CP_GROUP_{size}")
            if rank in members:
                found[size] = group
    return found


def create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None):
    """Separate communicators for overlapping gathers: over dp_cp, and over the expert data-parallel ranks.

    The second is None unless it is asked for and expert parallelism has several ranks. The options of dp_cp and ep_dp
    in ``nccl_comm_cfgs`` are theirs.
    """
    experts = for_expert_parallelism and get_expert_model_parallel_world_size() > 1
    return lifecycle.all_gather(rankmesh_state, experts, timeout, nccl_comm_cfgs or {})


# -- memory that is lent by name --------------------------------------------------------------------------------------


_set_global_memory_buffer, get_global_memory_buffer, destroy_global_memory_buffer = getters.buffer(
    "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer
)


def _symmetric_memory():
    """Return Megatron's own symmetric buffer, over our group, for Megatron's inference."""
    from megatron.core.utils import GlobalSymmetricMemoryBuffer

    return GlobalSymmetricMemoryBuffer(256, get_tensor_model_parallel_group())


_set_global_symmetric_memory_buffer, get_global_symmetric_memory_buffer, destroy_global_symmetric_memory_buffer = (
    getters.buffer("_GLOBAL_SYMMETRIC_MEMORY_BUFFER", _symmetric_memory)
)

# -- as of Megatron-Core 0.19: see ``releases.py`` --------------------------------------------------------------------


def rankmesh_since_0_19():
    """Return the functions whose parameters 0.19 reordered: with_gtp_remat is before the partial flags."""

    def get_data_parallel_group(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False):
        """Return the data-parallel group that the flags choose."""
        return _data_group(with_context_parallel, partial_data_parallel, with_gtp_remat, _absent)

    def get_data_parallel_rank(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False):
        """Return this rank's place in the data-parallel group that the flags choose; 0 without torch.distributed."""
        if _MPU_DATA_PARALLEL_RANK is not None:
            return _MPU_DATA_PARALLEL_RANK
        return _rank_in[_data_group(with_context_parallel, partial_data_parallel, with_gtp_remat)]

    def get_data_parallel_world_size(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False):
        """Return the size of the data-parallel group that the flags choose; 0 without torch.distributed."""
        if _MPU_DATA_PARALLEL_WORLD_SIZE is not None:
            return _MPU_DATA_PARALLEL_WORLD_SIZE
        return _size_of[_data_group(with_context_parallel, partial_data_parallel, with_gtp_remat)]

    def get_expert_data_parallel_group(check_initialized=True, with_gtp_remat=True, partial_expert_data_parallel=False):
        """Return the ranks that hold the same experts; partial: inside one optimizer instance."""
        kind = "intra_ep_dp" if partial_expert_data_parallel else "ep_dp"
        return rankmesh_state.given(kind, check_initialized, whole=with_gtp_remat)

    def get_expert_data_parallel_rank(with_gtp_remat=True, partial_expert_data_parallel=False):
        """Return this rank's place in the expert data-parallel group; 0 without torch.distributed."""
        return _rank_in[_expert_data_group(partial_expert_data_parallel, with_gtp_remat)]

    def get_expert_data_parallel_world_size(with_gtp_remat=True, partial_expert_data_parallel=False):
        """Return the size of the expert data-parallel group that the flags choose; 0 without torch.distributed."""
        return _size_of[_expert_data_group(partial_expert_data_parallel, with_gtp_remat)]

    return locals()


rankmesh_state.begin()
del getters
