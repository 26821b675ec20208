"""The life of a parallel state: initialise, ask whether it is, change timeouts, destroy; and its memory buffers.

```
initialize_model_parallel ── Request ── plan ── connect ── globals
destroy_model_parallel    ── close, last made first ── globals as they were before
```
"""

# No postponed annotations here: the signatures are those of Megatron-Core, annotations and all.

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Callable, List  # noqa: UP035

import torch
import torch.distributed as dist

from rankmesh.dialects.megatron.buffers import GlobalMemoryBuffer, GlobalSymmetricMemoryBuffer
from rankmesh.dialects.megatron.filling import filled
from rankmesh.dialects.megatron.refusals import NotInitialized, Refused
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import Function, State, in_a_world, taken
from rankmesh.dialects.megatron.table import initial
from rankmesh.dialects.megatron.ucc import prepare_environment
from rankmesh.groups import torch_private
from rankmesh.groups.connect import DEFAULT_TIMEOUT, connect

__all__ = ["functions"]

_SYMMETRIC_MEGABYTES = 256


def functions(state: State) -> Iterator[Function]:
    """Every function that begins, ends or asks about the whole state."""
    yield from _beginning(state)
    yield from _end(state)
    yield from _questions(state)
    yield from _buffers(state)
    yield from _timeouts(state)


def _beginning(state: State) -> Iterator[Function]:
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
        groups. ``gtp_remat_size`` and ``expert_gtp_remat_size`` shard weights further; the FP8 amax groups
        then span those ranks too, as they hold different data. UCC is for the pipeline groups alone.

        Raises ``NotInitialized`` outside a torch.distributed world, ``Refused`` (an ``AssertionError``, a
        ``RuntimeError`` and a ``ValueError``) for what cannot be, ``AgreementError`` when ranks differ.
        """
        request = Request.of(locals())
        _initialize(state, request)

    yield initialize_model_parallel


def _initialize(state: State, request: Request) -> None:
    if not in_a_world():
        raise NotInitialized(
            "received no initialised torch.distributed world; groups are made inside one; call "
            "torch.distributed.init_process_group() first"
        )
    if state.live is not None or state.globals["_DATA_PARALLEL_GROUP"] is not None:
        raise Refused(
            "received a second initialisation of a parallel state; a state is initialised once; call "
            "destroy_model_parallel() first, or make another ParallelState"
        )
    world = torch_private.default_group()
    all_gloo = world.backend == "gloo" or world.dry
    plan = request.plan(world.size, all_gloo=all_gloo, name=state.plan_name)
    if request.pipeline_model_parallel_comm_backend == "ucc":
        prepare_environment()
    state.live = connect(plan, timeout=min(DEFAULT_TIMEOUT, request.timeout))
    taken(state, {**filled(state.live, request, all_gloo=all_gloo), "_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer()})


def _end(state: State) -> Iterator[Function]:
    def destroy_model_parallel():  # type: ignore[no-untyped-def]
        """Destroy the process groups and set every global to what it was before initialisation.

        Megatron-Core forgets its groups without destroying them, and leaves 13 globals set. Calling it again, or
        before initialisation, clears the globals alone.
        """
        owned = [*state.added[::-1], *([state.live] if state.live is not None else [])]
        state.live = None
        state.added.clear()
        taken(state, initial())
        for live in owned:
            live.close()

    yield destroy_model_parallel


def _questions(state: State) -> Iterator[Function]:
    values = state.globals

    def is_initialized():  # type: ignore[no-untyped-def]
        """Whether there are data-parallel groups."""
        return values["_DATA_PARALLEL_GROUP"] is not None

    yield is_initialized

    def is_unitialized() -> bool:
        """Deprecated: not is_initialized()."""
        warnings.warn("is_unitialized is deprecated; call is_initialized", DeprecationWarning, stacklevel=2)
        return not values["is_initialized"]()

    yield is_unitialized

    def model_parallel_is_initialized():  # type: ignore[no-untyped-def]
        """Whether there are tensor, pipeline and data-parallel groups."""
        needed = ("_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")
        return all(values[name] is not None for name in needed)

    yield model_parallel_is_initialized

    def get_all_ranks():  # type: ignore[no-untyped-def]
        """This rank's places in tp, dp, cp, pp and ep, joined by underscores."""
        axes = ("tensor_model", "data", "context", "pipeline_model", "expert_model")
        return "_".join(str(values[f"get_{axis}_parallel_rank"]() or 0) for axis in axes)

    yield get_all_ranks


def _buffers(state: State) -> Iterator[Function]:
    for what in ("memory_buffer", "symmetric_memory_buffer"):
        yield from _buffer(state, what, f"_GLOBAL_{what.upper()}")


def _buffer(state: State, what: str, name: str) -> Iterator[Function]:
    values = state.globals

    def make() -> Any:
        if what == "memory_buffer":
            return GlobalMemoryBuffer()
        return GlobalSymmetricMemoryBuffer(_SYMMETRIC_MEGABYTES, values["get_tensor_model_parallel_group"]())

    def begin():  # type: ignore[no-untyped-def]
        if values[name] is not None:
            raise Refused(f"received a second global {what.replace('_', ' ')}; there is one; destroy it first")
        values[name] = make()

    def get():  # type: ignore[no-untyped-def]
        if values[name] is None:
            raise NotInitialized(
                f"received a request for the global {what.replace('_', ' ')}, which is not initialized; "
                f"call _set_global_{what}() first"
            )
        return values[name]

    def end():  # type: ignore[no-untyped-def]
        values[name] = None

    docs = {
        f"_set_global_{what}": (begin, f"Make the global {what.replace('_', ' ')}."),
        f"get_global_{what}": (get, f"The global {what.replace('_', ' ')}."),
        f"destroy_global_{what}": (end, f"Forget the global {what.replace('_', ' ')}."),
    }
    for function_name, (function, doc) in docs.items():
        function.__name__, function.__doc__ = function_name, doc
        yield function


def _timeouts(state: State) -> Iterator[Function]:
    def update_pg_timeout(timeout: timedelta, pg: dist.ProcessGroup | None = None):  # type: ignore[no-untyped-def]
        """Meet in the group (the world by default), then set the timeout of this group, or of all groups.

        Unlike Megatron-Core this works without a GPU too, and on a group of one rank, where it is nothing.
        """
        dist.barrier(pg)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for group in [pg] if pg is not None else state.globals["_global_process_group_list"] or [None]:
            torch_private.set_timeout(group, timeout)

    yield update_pg_timeout
