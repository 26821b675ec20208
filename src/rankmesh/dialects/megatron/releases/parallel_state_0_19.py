"""Megatron-Core 0.19 and 0.20: several ranks may hold the pieces of a weight (gtp_remat).

Run over the globals of a parallel state, after ``parallel_state.py``: see ``releases``.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all.

from typing import TYPE_CHECKING, Callable, List  # noqa: UP035

from rankmesh.dialects.megatron import lifecycle, making, rank_generator
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import absent, in_a_world, without_context

if TYPE_CHECKING:  # they are the parallel state's own
    from rankmesh.dialects.megatron.parallel_state import (
        _DATA_PARALLEL_GROUP,
        _DATA_PARALLEL_GROUP_WITH_CP,
        _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT,
        _DATA_PARALLEL_GROUP_WITH_GTP_REMAT,
        _EXPERT_DATA_PARALLEL_GROUP,
        _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT,
        _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP,
        _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT,
        _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP,
        _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT,
        _MPU_DATA_PARALLEL_RANK,
        _MPU_DATA_PARALLEL_WORLD_SIZE,
        _dp_cp_rank,
        _dp_cp_size,
        _dp_rank,
        _dp_size,
        _expert_dp_rank,
        _expert_dp_size,
        get_context_parallel_rank,
        get_expert_model_parallel_rank,
        get_expert_model_parallel_world_size,
        get_gtp_weight_remat_rank,
        get_pipeline_model_parallel_rank,
        get_tensor_model_parallel_rank,
    )

RankGenerator = rank_generator.WithPieces


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
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
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
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Make every process group of this rank, dense and expert, and fill the globals of this state.

    As of this release; see ``parallel_state.py``.
    """
    lifecycle.initialize(globals(), Request.of(locals()))


def create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None):
    """Communicators of their own for overlapping gathers: over dp_cp, and over the expert data-parallel ranks.

    The second is None unless asked for, and without expert parallelism.
    """
    experts = for_expert_parallelism and get_expert_model_parallel_world_size() > 1
    return making.all_gather(globals(), experts, timeout, nccl_comm_cfgs or {})


def _inject_gtp_remat_axis(order_str: str, after: str = "tp") -> str:
    """The order with the axis gtp_remat behind another, or behind tp, unless it names it.

    >>> _inject_gtp_remat_axis("tp-cp-ep-dp-pp", after="ep")
    'tp-cp-ep-gtp_remat-dp-pp'
    """
    return rank_generator.with_pieces(order_str, after)


def get_all_ranks():
    """This rank's places in tp, gtp_remat, dp, cp, pp and ep, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_gtp_weight_remat_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


def get_data_parallel_group(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False):
    """The data-parallel group that the flags choose; with_gtp_remat: all ranks that have other data."""
    if partial_data_parallel:
        if not with_context_parallel:
            raise without_context(globals(), "dp")
        kind, group = "intra_dp_cp", _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
        group = _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT if with_gtp_remat else group
    elif with_context_parallel:
        kind, group = "dp_cp", _DATA_PARALLEL_GROUP_WITH_CP
        group = _DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT if with_gtp_remat else group
    else:
        kind, group = "dp", _DATA_PARALLEL_GROUP_WITH_GTP_REMAT if with_gtp_remat else _DATA_PARALLEL_GROUP
    if group is None:
        raise absent(globals(), kind)
    return group


def get_data_parallel_rank(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False):
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
        with_gtp_remat=with_gtp_remat,
        partial_data_parallel=partial_data_parallel,
    ).rank()


def get_data_parallel_world_size(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False):
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
        with_gtp_remat=with_gtp_remat,
        partial_data_parallel=partial_data_parallel,
    ).size()


def get_expert_data_parallel_group(check_initialized=True, with_gtp_remat=True, partial_expert_data_parallel=False):
    """The ranks that hold the same experts; with_gtp_remat: all ranks of theirs that have other data."""
    if partial_expert_data_parallel:
        kind, group = "intra_ep_dp", _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP
        group = _INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT if with_gtp_remat else group
    else:
        kind, group = "ep_dp", _EXPERT_DATA_PARALLEL_GROUP
        group = _EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT if with_gtp_remat else group
    if group is None and check_initialized:
        raise absent(globals(), kind)
    return group


def get_expert_data_parallel_rank(with_gtp_remat=True, partial_expert_data_parallel=False):
    """The place of this rank in the expert data-parallel group that the flags choose."""
    if _expert_dp_rank is not None and with_gtp_remat and not partial_expert_data_parallel:
        return _expert_dp_rank
    if not in_a_world():
        return 0
    return get_expert_data_parallel_group(
        with_gtp_remat=with_gtp_remat, partial_expert_data_parallel=partial_expert_data_parallel
    ).rank()


def get_expert_data_parallel_world_size(with_gtp_remat=True, partial_expert_data_parallel=False):
    """The size of the expert data-parallel group that the flags choose."""
    if _expert_dp_size is not None and with_gtp_remat and not partial_expert_data_parallel:
        return _expert_dp_size
    if not in_a_world():
        return 0
    return get_expert_data_parallel_group(
        with_gtp_remat=with_gtp_remat, partial_expert_data_parallel=partial_expert_data_parallel
    ).size()
