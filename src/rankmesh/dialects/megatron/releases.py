"""Megatron-Core's releases: where each differs from the drop-ins by themselves, which follow 0.16.1.

```
0.16     ProcessGroupCollection, hybrid context parallelism, a separate group for gathers
0.17     a mesh over part of the world; MultiModuleProcessGroupCollection
0.18     create_all_gather_groups() instead of a flag
0.19     weights in pieces (gtp_remat); fields of a collection are None until they are set
0.20     resolve_gtp_remat_group
```

Names are data: since when there are some, until when there were others. The functions that differ are in
``parallel_state.rankmesh_since_0_19``.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all: none are postponed.

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

from rankmesh.dialects.megatron import lifecycle, parallel_state
from rankmesh.dialects.megatron.rank_generator import RankGenerator, WithPieces, _inject_gtp_remat_axis
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import State

__all__ = ["KNOWN", "Release", "absent_names", "follow", "followed_state", "parse"]

Release = tuple[int, int]

# The releases whose functions, groups, globals and refusals are compared with in tests.
KNOWN: tuple[Release, ...] = ((0, 16), (0, 17), (0, 18), (0, 19), (0, 20))

# First release that has a name; what is not listed here is in all of them.
_SINCE: Mapping[Release, str] = {
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


def followed_state() -> ModuleType:
    """Return the parallel state that ``install()`` put in Megatron's place, the default one without it."""
    installed = sys.modules.get("megatron.core.parallel_state", parallel_state)
    return installed if isinstance(getattr(installed, "rankmesh_state", None), State) else parallel_state


def parse(version: str) -> Release:
    """Return the release of a version: its first two numbers.

    >>> parse("0.19.2"), parse("0.20.0rc0+d98e8a64"), parse("core_r0.16.0")
    ((0, 19), (0, 20), (0, 16))
    """
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1])


def absent_names(release: Release) -> frozenset[str]:
    """Return the names of our ``parallel_state`` that a release does not define.

    >>> "is_unitialized" in absent_names((0, 17)), "is_unitialized" in absent_names((0, 16))
    (True, False)
    """
    later = [name for first, names in _SINCE.items() if release < first for name in names.split()]
    removed = [name for last, names in _UNTIL.items() if release >= last for name in names.split()]
    return frozenset((*later, *removed))


def follow(state: ModuleType, release: Release | None) -> None:
    """Give a parallel state the names, parameters and answers of a release; None: those that it has by itself.

    Its groups and what was set stay as they are. A release that is not known is taken for the nearest before it.
    """
    local, names = state.rankmesh_state, vars(state)
    local.release = release
    local.set_pieces(*local.in_pieces)
    for name, value in local.first_values():
        names.setdefault(name, value)
    names.update(local.functions, RankGenerator=RankGenerator)
    names.pop("_inject_gtp_remat_axis", None)
    if release is None:
        return
    if release >= (0, 18):
        names["initialize_model_parallel"] = _initialize(local, release)
    if release >= (0, 19):
        names.update(names["rankmesh_since_0_19"]())
        names.update(RankGenerator=WithPieces, _inject_gtp_remat_axis=_inject_gtp_remat_axis)
    for name in absent_names(release):
        names.pop(name, None)


def _initialize(local: State, release: Release) -> Callable[..., None]:
    """Return the function with the parameters of a release since 0.18, in its order."""
    by_itself = local.functions["initialize_model_parallel"]
    parameters = dict(inspect.signature(by_itself).parameters)
    del parameters["create_all_gather_group"]
    names = list(parameters)
    if release >= (0, 19):
        pieces = names[-2:]
        place = names.index("expert_model_parallel_size") + 1
        names = [*names[:place], *pieces, *names[place:-2]]
    signature = inspect.Signature([parameters[name] for name in names])

    def initialize_model_parallel(*args, **kwargs):
        lifecycle.initialize(local, Request(**signature.bind(*args, **kwargs).arguments))

    initialize_model_parallel.__doc__ = by_itself.__doc__
    vars(initialize_model_parallel)["__signature__"] = signature
    return initialize_model_parallel
