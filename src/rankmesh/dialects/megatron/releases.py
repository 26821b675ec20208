"""Megatron-Core's releases: where each differs from the drop-ins by themselves, which follow 0.16.1.

```
0.16     ProcessGroupCollection, hybrid context parallelism, a separate group for gathers
0.17     a mesh over part of the world; MultiModuleProcessGroupCollection
0.18     create_all_gather_groups() instead of a flag
0.19     weights in pieces (gtp_remat); fields of a collection are None until they are set
0.20     resolve_gtp_remat_group
```

The drop-ins have the names of every release; the functions whose parameters differ are in
``parallel_state.rankmesh_since_0_19``.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, annotations and all: none are postponed.

import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType

from rankmesh.dialects.megatron import lifecycle, parallel_state
from rankmesh.dialects.megatron.rank_generator import RankGenerator, WithPieces
from rankmesh.dialects.megatron.request import Request
from rankmesh.dialects.megatron.state import State

__all__ = ["KNOWN", "Release", "follow", "followed_state", "parse"]

Release = tuple[int, int]

# The releases whose functions, groups, globals and refusals are compared with in tests.
KNOWN: tuple[Release, ...] = ((0, 16), (0, 17), (0, 18), (0, 19), (0, 20))


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


def follow(state: ModuleType, release: Release | None) -> None:
    """Give a parallel state the parameters and answers of a release; None: those that it has by itself.

    Its groups and what was set stay as they are. A release that is not known is taken for the nearest before it.
    """
    local, names = state.rankmesh_state, vars(state)
    local.release = release
    local.set_pieces(*local.in_pieces)
    names.update(local.functions, RankGenerator=RankGenerator)
    if release is not None and release >= (0, 18):
        names["initialize_model_parallel"] = _initialize(local, release)
    if release is not None and release >= (0, 19):
        names.update(names["rankmesh_since_0_19"](), RankGenerator=WithPieces)


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
