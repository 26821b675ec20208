"""Megatron-Core's releases: what each has otherwise than the drop-ins of their own, which follow 0.16.1.

```
0.14     positional parameters before hybrid context parallelism, three classes of process groups instead of one
0.15     ProcessGroupCollection
0.16     hybrid context parallelism, a group of its own for gathers
0.17     a mesh over part of the world; MultiModuleProcessGroupCollection
0.18     create_all_gather_groups() instead of a flag
0.19     weights in pieces (gtp_remat); fields of a collection are None until they are set
0.20     resolve_gtp_remat_group
```

``parallel_state_0_19.py`` and its kin hold the functions whose parameters, or answers, are others in that release. They
are run over the globals of a parallel state (``follow``): each is searched for and read like the functions that it
replaces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType

from rankmesh.dialects.megatron.answers import refresh
from rankmesh.dialects.megatron.state import ParallelState, code_of, own_functions

__all__ = ["KNOWN", "Release", "absent_names", "follow", "follow_collections", "parse"]

Release = tuple[int, int]

# The releases whose functions, groups, globals and refusals are compared with in tests.
KNOWN: tuple[Release, ...] = ((0, 14), (0, 15), (0, 16), (0, 17), (0, 18), (0, 19), (0, 20))

_WITH_OTHER_FUNCTIONS: tuple[Release, ...] = ((0, 14), (0, 15), (0, 17), (0, 18), (0, 19))

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


_CLASSES_OF_0_14 = ("ModelCommProcessGroups", "GradCommProcessGroups", "GradFinalizeProcessGroups")


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
    later = [name for since, names in _SINCE.items() if release < since for name in names.split()]
    gone = [name for until, names in _UNTIL.items() if release >= until for name in names.split()]
    return frozenset((*later, *gone))


def follow(state: ParallelState, release: Release | None) -> None:
    """Give a parallel state the names, parameters and answers of a release; None: those of its own again.

    Its groups and what was set stay as they are. A release that is not known is taken for the nearest before it.
    """
    names = vars(state)
    kept = {name: names[name] for name in state.rankmesh_state.initial if name in names}
    own = state.rankmesh_state
    exec(code_of("parallel_state.py"), names)  # noqa: S102  - our own file, over its own globals
    if release is not None and (other := _functions_of(release)):
        exec(code_of(f"releases/parallel_state_{other[0]}_{other[1]}.py"), names)  # noqa: S102  - the same
    names.update(kept, rankmesh_state=own)
    for name in absent_names(release) if release is not None else ():
        del names[name]
    own.functions, own.release = own_functions(names), release
    refresh(names)


def follow_collections(module: ModuleType, release: Release | None) -> None:
    """Give ``process_groups_config`` the classes of a release; None: those of its own again."""
    names = vars(module)
    names["RELEASE"] = release
    exec(code_of("process_groups_config.py"), names)  # noqa: S102  - our own file, over its own globals
    for name in _CLASSES_OF_0_14:
        names.pop(name, None)
    if release is not None and release < (0, 15):
        exec(code_of("releases/process_groups_0_14.py"), names)  # noqa: S102  - the same
        del names["ProcessGroupCollection"]


def _functions_of(release: Release) -> Release | None:
    """Which of our files has the functions of a release: none has those of 0.16."""
    nearest = max((known for known in KNOWN if known <= release), default=KNOWN[0])
    if nearest == (0, 16):
        return None
    return max(known for known in _WITH_OTHER_FUNCTIONS if known <= nearest)
