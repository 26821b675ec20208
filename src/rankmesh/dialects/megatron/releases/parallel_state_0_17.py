"""Megatron-Core 0.17: the mesh may lie over part of the world.

Run over the globals of a parallel state, after ``parallel_state.py``: see ``releases``.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all.

from typing import Callable, List  # noqa: UP035

from rankmesh.dialects.megatron import lifecycle
from rankmesh.dialects.megatron.request import Request


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
) -> None:
    """Make every process group of this rank, dense and expert, and fill the globals of this state.

    As of this release; see ``parallel_state.py``.
    """
    lifecycle.initialize(globals(), Request.of(locals()))
