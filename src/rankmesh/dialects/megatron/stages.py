"""Pipeline stages: first, last, next, previous; virtual stages; who holds the embeddings.

The ring of ``next`` and ``prev`` closes: after the last stage comes the first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from rankmesh.dialects.megatron.groups_of import remembered
from rankmesh.dialects.megatron.refusals import NotInitialized
from rankmesh.dialects.megatron.state import Function, State, absent
from rankmesh.dialects.megatron.table import BY_KIND, VIRTUAL

__all__ = ["functions"]

_GROUP = "_PIPELINE_MODEL_PARALLEL_GROUP"
_RANK, _SIZE = "_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"


def functions(state: State) -> Iterator[Function]:
    """Every function about stages."""
    yield from _ends(state)
    yield from _neighbours(state)
    yield from _virtual(state)
    yield from _embeddings(state)


def _rank(state: State) -> int:
    return int(state.globals["get_pipeline_model_parallel_rank"]())


def _size(state: State) -> int:
    return int(state.globals["get_pipeline_model_parallel_world_size"]())


def _virtual_size(state: State) -> Any:
    return state.globals["get_virtual_pipeline_model_parallel_world_size"]()


def _ready(state: State) -> Callable[[], bool]:
    return lambda: state.fixed(_RANK, _GROUP) and state.fixed(_SIZE, _GROUP)


def _other_virtual_stage(state: State, vp_stage: int | None, *, last: bool) -> bool:
    """Whether stages are virtual, and this one is not the first (or last) of them."""
    size = _virtual_size(state)
    if size is None:
        return False
    if vp_stage is None:
        raise NotInitialized("received no vp_stage in an interleaved pipeline; name the virtual stage: vp_stage=0")
    return bool(vp_stage != (size - 1 if last else 0))


def _ends(state: State) -> Iterator[Function]:
    first: Any = None
    final: Any = None

    def is_pipeline_first_stage(ignore_virtual=True, vp_stage=None):  # type: ignore[no-untyped-def]
        """Whether this rank is the first stage; with virtual stages heeded, whether vp_stage is the first as well."""
        if not ignore_virtual and _other_virtual_stage(state, vp_stage, last=False):
            return False
        return first if first is not None else _rank(state) == 0

    yield is_pipeline_first_stage

    def is_pipeline_last_stage(ignore_virtual=True, vp_stage=None):  # type: ignore[no-untyped-def]
        """Whether this rank is the last stage; with virtual stages heeded, whether vp_stage is the last as well."""
        if not ignore_virtual and _other_virtual_stage(state, vp_stage, last=True):
            return False
        return final if final is not None else _rank(state) == _size(state) - 1

    yield is_pipeline_last_stage

    ask_first = state.kept(lambda: _rank(state) == 0, _ready(state))
    ask_final = state.kept(lambda: _rank(state) == _size(state) - 1, _ready(state))

    def refresh() -> None:
        nonlocal first, final
        first, final = ask_first(), ask_final()

    state.refreshers.append(refresh)


def _neighbours(state: State) -> Iterator[Function]:
    def at(position: Callable[[], int]) -> Callable[[], Any]:
        def compute() -> Any:
            ranks = state.globals["_PIPELINE_GLOBAL_RANKS"]
            if ranks is None:
                raise absent(state, BY_KIND["pp"])
            return ranks[position()]

        return compute

    def ready() -> bool:
        return isinstance(state.globals["_PIPELINE_GLOBAL_RANKS"], list) and _ready(state)()

    places = {
        "first": (lambda: 0, "of the first stage of this pipeline"),
        "last": (lambda: _size(state) - 1, "of the last stage of this pipeline"),
        "next": (lambda: (_rank(state) + 1) % _size(state), "after this one in the pipeline"),
        "prev": (lambda: (_rank(state) - 1) % _size(state), "before this one in the pipeline"),
    }
    for word, (position, doc) in places.items():
        yield remembered(
            state, f"get_pipeline_model_parallel_{word}_rank", f"The global rank {doc}.", at(position), ready
        )


def _virtual(state: State) -> Iterator[Function]:
    values = state.globals
    rank_name, size_name = VIRTUAL

    def get_virtual_pipeline_model_parallel_rank():  # type: ignore[no-untyped-def]
        """The virtual stage that was set, None without."""
        return values[rank_name]

    yield get_virtual_pipeline_model_parallel_rank

    def get_virtual_pipeline_model_parallel_world_size():  # type: ignore[no-untyped-def]
        """How many virtual stages a rank has, None without."""
        return values[size_name]

    yield get_virtual_pipeline_model_parallel_world_size

    def set_virtual_pipeline_model_parallel_rank(rank):  # type: ignore[no-untyped-def]
        """Deprecated: pass vp_stage. Set the virtual stage."""
        warnings.warn(
            "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to is_pipeline_first_stage and "
            "is_pipeline_last_stage",
            DeprecationWarning,
            stacklevel=2,
        )
        values[rank_name] = rank

    yield set_virtual_pipeline_model_parallel_rank

    def set_virtual_pipeline_model_parallel_world_size(world_size):  # type: ignore[no-untyped-def]
        """Set how many virtual stages a rank has."""
        values[size_name] = world_size

    yield set_virtual_pipeline_model_parallel_world_size


def _embeddings(state: State) -> Iterator[Function]:
    def is_rank_in_embedding_group(ignore_virtual=True, vp_stage=None):  # type: ignore[no-untyped-def]
        """Whether this rank (and vp_stage, when virtual stages are heeded) holds the word embeddings."""
        rank, ranks = dist.get_rank(), state.globals["_EMBEDDING_GLOBAL_RANKS"]
        if ranks is None or rank not in ranks:
            return False
        if ignore_virtual or rank not in (ranks[0], ranks[-1]):
            return True
        end = "first" if rank == ranks[0] else "last"
        return state.globals[f"is_pipeline_{end}_stage"](ignore_virtual=False, vp_stage=vp_stage)

    yield is_rank_in_embedding_group

    def is_rank_in_position_embedding_group():  # type: ignore[no-untyped-def]
        """Whether this rank holds the position embeddings."""
        rank, ranks = dist.get_rank(), state.globals["_POSITION_EMBEDDING_GLOBAL_RANKS"]
        return ranks is not None and rank in ranks

    yield is_rank_in_position_embedding_group
