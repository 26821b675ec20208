"""Releases: which backend makes the groups of a world, found by a probe of this torch at its first use.

```
threads that are ranks           ThreadBackend
2.8 and newer                     MemberBackend, where every private piece is there
a piece is missing, or a release
that is not known behaves otherwise     PublicBackend, with a warning on rank 0
```
"""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankmesh.backend.default import DefaultGroup
from rankmesh.backend.protocol import Backend
from rankmesh.backend.versions import KNOWN, minor
from rankmesh.errors import first_line

try:
    from rankmesh.backend import members, torch_threads
    from rankmesh.backend.registries import registries
    from rankmesh.backend.single_rank import single_rank_group
except (ImportError, AttributeError) as error:
    _NOT_IMPORTED = f"what rankmesh imports of it is missing ({first_line(error)})"
else:
    _NOT_IMPORTED = ""

__all__ = ["backend_of", "missing"]

_WORLD = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
_MODULE = (
    "_get_default_group",
    "_get_split_source",
    "_new_process_group_helper",
    "Backend",
    "BackendConfig",
)
_GROUP = ("_set_default_backend", "_register_backend", "_set_group_name", "_set_group_desc")
_GLOO = ("_Options", "create_device", "create_default_device")
_PROBE = "rankmesh/probe"
# Set by tests, which then run over torch's public API alone.
_PUBLIC = "RANKMESH_TEST_PUBLIC"


def backend_of(default: DefaultGroup) -> Backend:
    """Return the backend for the groups of this world; its choice is the same on every rank that has this torch."""
    reason = missing()
    if reason is None:
        return torch_threads.ThreadBackend(default) if torch_threads.is_rank() else members.MemberBackend(default)
    from rankmesh.backend.public import PublicBackend

    if default.rank == 0:
        warnings.warn(
            f"torch {torch.__version__}: {reason}; rankmesh makes the groups through torch.distributed.new_group and "
            "split_group, which every rank calls for every kind of group; install a torch that rankmesh knows "
            f"({', '.join(f'{major}.{second}' for major, second in KNOWN)}) for a fast start",
            stacklevel=2,
        )
    return PublicBackend(default)


@cache
def missing() -> str | None:
    """Return the private piece of this torch that is missing or behaves otherwise; None if all are as expected."""
    if _NOT_IMPORTED or os.environ.get(_PUBLIC):
        return _NOT_IMPORTED or f"{_PUBLIC} is set"
    places: list[tuple[str, object, tuple[str, ...]]] = [
        ("torch.distributed.distributed_c10d", c10d, _MODULE),
        ("torch.distributed.distributed_c10d._world", getattr(c10d, "_world", None), _WORLD),
        ("torch.distributed.ProcessGroup", dist.ProcessGroup, _GROUP),
    ]
    if dist.is_gloo_available():
        places.append(("torch.distributed.ProcessGroupGloo", getattr(c10d, "ProcessGroupGloo", None), _GLOO))
    gone = [f"{place}.{name}" for place, owner, names in places for name in names if not hasattr(owner, name)]
    if gone:
        return f"{gone[0]} is missing"
    return None if minor(torch.__version__) in KNOWN else _misbehaves()


def _misbehaves() -> str | None:
    """Make, use and destroy a single-rank group on a release that is not known; return the problem, or None."""
    try:
        before, one = registries(), torch.ones(1)
        pg = single_rank_group(rank=dist.get_rank(), name=_PROBE, desc=_PROBE, backend="gloo")
        dist.all_reduce(one, group=pg)
        if dist.get_process_group_ranks(pg) != [dist.get_rank()] or one.item() != 1:
            return "a group made from private pieces has other members"
        members.destroy(pg)
        if registries() != before:
            return "a group that was destroyed is still registered"
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError, KeyError) as error:
        return f"its private pieces behave otherwise ({first_line(error)})"
    return None
