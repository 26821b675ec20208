"""Drop-in for ``megatron.core.parallel_state``: the same functions and globals, over a rankmesh plan.

```python
from rankmesh.dialects.megatron import parallel_state

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
parallel_state.get_tensor_model_parallel_group()
```

The functions are those of Megatron-Core 0.16.1; what later releases added follows the parameters that were there.
Those of one model's groups are in ``model_groups.py``, those of groups across replicas in ``data_groups.py``, the
globals in ``table.py``; ``releases.py`` has what differs by release. ``ParallelState(name)`` has the same
functions over separate globals. Where it differs from Megatron-Core:

- a rank makes only the groups that it is in, after all ranks agreed; groups with the same members share a
  communicator, and a group of one rank has none; a gloo group is its own CPU counterpart
- ``destroy_model_parallel`` destroys the groups, and clears every global
- a refused ``initialize_model_parallel`` leaves nothing behind
- an order that names an axis twice, hybrid context parallelism that does not fill its groups, embedding functions
  that do not choose by position, and unknown sections of an NCCL configuration are refused
- SHARP is an option of one communicator: no environment variable is changed
- where ``torch.distributed.new_group``, ``create_group`` or ``get_nccl_options`` is replaced, groups are made by it as
  in Megatron-Core: on every rank all of them, none shared, and ``destroy_model_parallel`` leaves them to who made them

>>> from rankmesh.dialects.megatron import parallel_state
>>> parallel_state.is_initialized(), parallel_state._MODEL_PARALLEL_GROUP
(False, None)
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all: none are postponed, and many functions have none.

import sys
import warnings
from datetime import timedelta
from typing import Any, Callable, List  # noqa: UP035

import torch.distributed as dist

from rankmesh.dialects.megatron import data_groups, lifecycle, model_groups
from rankmesh.dialects.megatron.buffers import SYMMETRIC_MEGABYTES, GlobalMemoryBuffer, GlobalSymmetricMemoryBuffer
from rankmesh.dialects.megatron.data_groups import *  # noqa: F403
from rankmesh.dialects.megatron.data_groups import get_data_parallel_rank, rankmesh_state
from rankmesh.dialects.megatron.model_groups import *  # noqa: F403
from rankmesh.dialects.megatron.model_groups import (
    get_context_parallel_rank,
    get_expert_model_parallel_rank,
    get_pipeline_model_parallel_rank,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
)
from rankmesh.dialects.megatron.nccl import get_nccl_options, overwrite_nccl_comm_cfgs  # noqa: F401
from rankmesh.dialects.megatron.rank_generator import (  # noqa: F401
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)
from rankmesh.dialects.megatron.refusals import no_buffer, second_buffer
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import ParallelState

_TENSOR_MODEL_PARALLEL_GROUP: Any = None
_PIPELINE_MODEL_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GROUP: Any = None
_global_process_group_list: Any = None
_GLOBAL_MEMORY_BUFFER: Any = None
_GLOBAL_SYMMETRIC_MEMORY_BUFFER: Any = None

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
    have no CPU counterparts then, as in Megatron-Core. UCC is for the pipeline groups only.

    Raises ``NotInitialized`` outside a torch.distributed world, ``Refused`` (an ``AssertionError``, a
    ``RuntimeError`` and a ``ValueError``) for what cannot be, ``AgreementError`` when ranks differ.
    """
    lifecycle.initialize(rankmesh_state, Request(**locals()))


def destroy_model_parallel():
    """Destroy the process groups and set every global to what it was before initialisation.

    Megatron-Core forgets its groups without destroying them, and leaves 13 globals set. Calling it again, or
    before initialisation, clears the globals only.
    """
    lifecycle.destroy(rankmesh_state)


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
    """Wait for the ranks of the group (the world by default), then set the timeout of this group, or of all groups.

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
    """The groups of each level of a hierarchy of these ranks, and their CPU counterparts: those of ``rank``, two lists.

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
    """The groups of 2, 4, 8, ... up to half of these ranks that ``rank`` is in, by size.

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

    The second is None unless asked for. The options of dp_cp and ep_dp in ``nccl_comm_cfgs`` are theirs.
    """
    return lifecycle.all_gather(rankmesh_state, for_expert_parallelism, timeout, nccl_comm_cfgs or {})


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


ParallelState.become(sys.modules[__name__], model_groups, data_groups)
