"""Megatron-Core's releases: where each differs from the drop-ins by themselves, which follow 0.16.1.

```
0.14     positional parameters before hybrid context parallelism, three classes of process groups instead of one
0.15     ProcessGroupCollection
0.16     hybrid context parallelism, a separate group for gathers
0.17     a mesh over part of the world; MultiModuleProcessGroupCollection
0.18     create_all_gather_groups() instead of a flag
0.19     weights in pieces (gtp_remat); fields of a collection are None until they are set
0.20     resolve_gtp_remat_group
```

Names and parameters are data: since when there are some, until when there were others. ``_DIFFERENT`` has the functions
that differ; they are laid over the globals of a parallel state like those that they replace.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all: none are postponed.

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from rankmesh.dialects.megatron import getters as rule
from rankmesh.dialects.megatron import lifecycle, parallel_state
from rankmesh.dialects.megatron.rank_generator import WithPieces, _inject_gtp_remat_axis
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import ParallelState

if TYPE_CHECKING:  # the functions below run over the globals of a parallel state
    from rankmesh.dialects.megatron.data_groups import get_data_parallel_rank, get_gtp_weight_remat_rank
    from rankmesh.dialects.megatron.getters import _KEPT, _KEPT_WITH_CP
    from rankmesh.dialects.megatron.model_groups import (
        get_context_parallel_rank,
        get_expert_model_parallel_rank,
        get_expert_model_parallel_world_size,
        get_pipeline_model_parallel_rank,
        get_tensor_model_parallel_rank,
    )

rankmesh_state: Any = None

__all__ = ["KNOWN", "Followed", "Release", "absent_names", "follow", "followed", "parse"]

Release = tuple[int, int]

# The releases whose functions, groups, globals and refusals are compared with in tests.
KNOWN: tuple[Release, ...] = ((0, 14), (0, 15), (0, 16), (0, 17), (0, 18), (0, 19), (0, 20))

# First release that has a name; what is not listed here is in all of them.
_SINCE: Mapping[Release, str] = {
    (0, 15): "_global_process_group_list update_pg_timeout",
    (0, 16): "_DATA_PARALLEL_GROUP_WITH_CP_AG _EXPERT_MODEL_PARALLEL_RANKS _GLOBAL_SYMMETRIC_MEMORY_BUFFER "
    "_HYBRID_DP_CP_GROUPS _set_global_symmetric_memory_buffer get_global_symmetric_memory_buffer "
    "destroy_global_symmetric_memory_buffer create_hybrid_dp_cp_groups get_expert_model_parallel_src_rank "
    "get_hybrid_data_context_parallel_groups has_separate_all_gather_group",
    (0, 18): "create_all_gather_groups",
    (0, 19): "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT _DATA_PARALLEL_GROUP_WITH_GTP_REMAT "
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT _EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS _EXPERT_GTP_WEIGHT_REMAT_GROUP "
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP _GTP_WEIGHT_REMAT_GLOBAL_RANKS _GTP_WEIGHT_REMAT_GROUP "
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT "
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT get_expert_gtp_weight_remat_global_ranks "
    "get_expert_gtp_weight_remat_group get_expert_gtp_weight_remat_rank get_expert_gtp_weight_remat_world_size "
    "get_gtp_weight_remat_global_ranks get_gtp_weight_remat_group get_gtp_weight_remat_rank "
    "get_gtp_weight_remat_world_size",
}

# First release that no longer has a name.
_UNTIL: Mapping[Release, str] = {
    (0, 17): "_GLOBAL_SYMMETRIC_MEMORY_BUFFER _set_global_symmetric_memory_buffer get_global_symmetric_memory_buffer "
    "destroy_global_symmetric_memory_buffer get_data_modulo_expert_parallel_group is_unitialized",
    (0, 18): "_DATA_PARALLEL_GROUP_WITH_CP_AG has_separate_all_gather_group",
}

# The same of the parameters of initialize_model_parallel, and where a release has put some.
_PARAMETERS_SINCE: Mapping[Release, str] = {
    (0, 16): "hybrid_context_parallel create_all_gather_group",
    (0, 17): "rank_offset local_world_size",
    (0, 19): "gtp_remat_size expert_gtp_remat_size",
}
_PARAMETERS_UNTIL: Mapping[Release, str] = {(0, 18): "create_all_gather_group"}
_PARAMETERS_AFTER: Mapping[Release, tuple[str, str]] = {
    (0, 19): ("expert_model_parallel_size", "gtp_remat_size expert_gtp_remat_size")
}

# What does not read the globals of a state, since 0.19.
_WITH_PIECES = {"RankGenerator": WithPieces, "_inject_gtp_remat_axis": _inject_gtp_remat_axis}


@dataclass
class Followed:
    """The parallel state that collections are made from, and its release; None: the drop-ins by themselves.

    ``install()`` sets the state; the grid, the collections, and what an optimizer is given look here.
    """

    state: ParallelState = cast(ParallelState, parallel_state)  # noqa: RUF009  - the module is the default state

    @property
    def release(self) -> Release | None:
        """The release that the state follows."""
        return self.state.rankmesh_state.release


followed = Followed()


def parse(version: str) -> Release:
    """The release of a version: its first two numbers.

    >>> parse("0.19.2"), parse("0.20.0rc0+d98e8a64"), parse("core_r0.14.0")
    ((0, 19), (0, 20), (0, 14))
    """
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1])


def absent_names(release: Release) -> frozenset[str]:
    """The names that a release has not, of those that ``parallel_state`` has.

    >>> "is_unitialized" in absent_names((0, 17)), "is_unitialized" in absent_names((0, 16))
    (True, False)
    """
    return _absent(release, _SINCE, _UNTIL)


def _absent(release: Release, since: Mapping[Release, str], until: Mapping[Release, str]) -> frozenset[str]:
    later = [name for first, names in since.items() if release < first for name in names.split()]
    removed = [name for last, names in until.items() if release >= last for name in names.split()]
    return frozenset((*later, *removed))


def follow(state: ParallelState, release: Release | None) -> None:
    """Give a parallel state the names, parameters and answers of a release; None: those that it has by itself.

    Its groups and what was set stay as they are. A release that is not known is taken for the nearest before it.
    """
    functions, names = dict(state.interface.functions), vars(state)
    without = {"_inject_gtp_remat_axis"} | (absent_names(release) if release is not None else set())
    names["RankGenerator"] = state.interface.shared["RankGenerator"]
    if release is not None:
        functions["initialize_model_parallel"] = _initialize(max(release, KNOWN[0]))
        functions.update(_different(release))
    state.rankmesh_state.follow(release)
    state.lay(functions, without)
    if release is not None and release >= (0, 19):
        names.update(_WITH_PIECES)


# -- parameters of initialize_model_parallel --------------------------------------------------------------------------


@cache
def _initialize(release: Release) -> FunctionType:
    """The function with the parameters of a release, in its order."""
    by_itself = ParallelState.interface.functions["initialize_model_parallel"]
    whole = inspect.signature(by_itself)
    absent = _absent(release, _PARAMETERS_SINCE, _PARAMETERS_UNTIL)
    names = [name for name in whole.parameters if name not in absent]
    for first, (anchor, moved) in _PARAMETERS_AFTER.items():
        if release >= first:
            names = [name for name in names if name not in moved.split()]
            place = names.index(anchor) + 1
            names[place:place] = moved.split()
    signature = whole.replace(parameters=[whole.parameters[name] for name in names])

    def initialize_model_parallel(*args, **kwargs):
        lifecycle.initialize(rankmesh_state, Request(**signature.bind(*args, **kwargs).arguments))

    initialize_model_parallel.__doc__ = by_itself.__doc__
    vars(initialize_model_parallel)["__signature__"] = signature
    return cast(FunctionType, initialize_model_parallel)


# -- functions that differ --------------------------------------------------------------------------------------------


def _get_tensor_and_data_parallel_group(with_context_parallel=False):
    return rankmesh_state.given("tp_dp_cp" if with_context_parallel else "tp_dp")


def _create_all_gather_groups(for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None):
    experts = for_expert_parallelism and get_expert_model_parallel_world_size() > 1
    return lifecycle.all_gather(rankmesh_state, experts, timeout, nccl_comm_cfgs or {})


def _get_all_ranks():
    ranks = (
        get_tensor_model_parallel_rank(),
        get_gtp_weight_remat_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


# As in data_groups, but that with_gtp_remat comes before the flags of optimizer instances.


def _get_data_parallel_group(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False):
    if partial_data_parallel and not with_context_parallel:
        raise rankmesh_state.without_context("dp")
    kind = "dp_cp" if with_context_parallel else "dp"
    return rankmesh_state.given(f"intra_{kind}" if partial_data_parallel else kind, whole=with_gtp_remat)


def _data_number(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False):
    kept = _KEPT_WITH_CP if with_context_parallel else _KEPT
    if kept is not None and with_gtp_remat and not partial_data_parallel:
        return kept
    flags = {"with_gtp_remat": with_gtp_remat, "partial_data_parallel": partial_data_parallel}
    return rankmesh_state.ask("dp", "_METHOD", with_context_parallel=with_context_parallel, **flags)


def _get_expert_data_parallel_group(check_initialized=True, with_gtp_remat=True, partial_expert_data_parallel=False):
    kind = "intra_ep_dp" if partial_expert_data_parallel else "ep_dp"
    return rankmesh_state.given(kind, check_initialized, whole=with_gtp_remat)


def _expert_data_number(with_gtp_remat=True, partial_expert_data_parallel=False):
    if _KEPT is not None and with_gtp_remat and not partial_expert_data_parallel:
        return _KEPT
    flags = {"with_gtp_remat": with_gtp_remat, "partial_expert_data_parallel": partial_expert_data_parallel}
    return rankmesh_state.ask("ep_dp", "_METHOD", **flags)


_OF_INSTANCES = {
    "get_inter_distributed_optimizer_instance_group": ("inter_ep_dp", "The same shard in every optimizer instance"),
    "get_intra_distributed_optimizer_instance_group": (
        "intra_dist_opt_instance",
        "The ranks of one optimizer instance",
    ),
}

# The functions that differ, by the first release that has them so, and the first that no longer does.
_DIFFERENT: Mapping[tuple[Release, Release | None], Mapping[str, Callable[..., Any]]] = {
    ((0, 0), (0, 15)): {
        "get_tensor_and_data_parallel_group": _get_tensor_and_data_parallel_group,
        **{name: rule.group_if_made(*row) for name, row in _OF_INSTANCES.items()},
    },
    ((0, 18), None): {"create_all_gather_groups": _create_all_gather_groups},
    ((0, 19), None): {
        "get_all_ranks": _get_all_ranks,
        "get_data_parallel_group": _get_data_parallel_group,
        "get_data_parallel_rank": rule.flagged("dp", "rank", _data_number),
        "get_data_parallel_world_size": rule.flagged("dp", "size", _data_number),
        "get_expert_data_parallel_group": _get_expert_data_parallel_group,
        "get_expert_data_parallel_rank": rule.flagged("ep_dp", "rank", _expert_data_number),
        "get_expert_data_parallel_world_size": rule.flagged("ep_dp", "size", _expert_data_number),
    },
}


def _different(release: Release) -> dict[str, FunctionType]:
    found: dict[str, Callable[..., Any]] = {}
    for (first, until), functions in _DIFFERENT.items():
        if first <= release and (until is None or release < until):
            found.update(functions)
    return cast(dict[str, FunctionType], found)
