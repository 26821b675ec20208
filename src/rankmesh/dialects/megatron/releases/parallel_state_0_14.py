"""Megatron-Core 0.14: getters without ``check_initialized``, no hybrid context parallelism.

Run over the globals of a parallel state, after ``parallel_state.py``: see ``releases``.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all.

from typing import TYPE_CHECKING, Callable, List  # noqa: UP035

from rankmesh.dialects.megatron import lifecycle
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import absent

if TYPE_CHECKING:  # they are the globals of the parallel state
    from rankmesh.dialects.megatron.parallel_state import (
        _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP,
        _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP,
        _TENSOR_AND_DATA_PARALLEL_GROUP,
        _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP,
    )


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: List[int] | None = None,  # noqa: UP006
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
) -> None:
    """Make every process group of this rank, dense and expert, and fill the globals of this state.

    As of this release; see ``parallel_state.py``.
    """
    lifecycle.initialize(globals(), Request.of(locals()))


def get_tensor_and_data_parallel_group(with_context_parallel=False):
    """Tensor and data parallel ranks together."""
    group = _TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP if with_context_parallel else _TENSOR_AND_DATA_PARALLEL_GROUP
    if group is None:
        raise absent(globals(), "tp_dp_cp" if with_context_parallel else "tp_dp")
    return group


def get_inter_distributed_optimizer_instance_group():
    """The same shard in every optimizer instance."""
    if _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP is None:
        raise absent(globals(), "inter_ep_dp")
    return _INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP


def get_intra_distributed_optimizer_instance_group():
    """The ranks of one optimizer instance."""
    if _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP is None:
        raise absent(globals(), "intra_dist_opt_instance")
    return _INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP
