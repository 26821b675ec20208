"""Names of groups to which their framework gave no description: it holds them under a name while it lives.

```
deepspeed.utils.groups._DATA_PARALLEL_GROUP        DATA_PARALLEL_GROUP
    ._EXPERT_PARALLEL_GROUP["ep_size_2"]           EXPERT_PARALLEL_GROUP[ep_size_2]
ParallelContext.dp_pg                              dp_pg
HyperCommGrid._pgs["dp-cp"]                        dp-cp
```

Looked for when a recording is written, not before.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

__all__ = ["live_names"]

# Modules that hold groups in globals, and classes whose objects hold them, by the package that defines them.
_MODULES = ("megatron.core.parallel_state", "deepspeed.utils.groups")
_CLASSES = {"megatron": "HyperCommGrid", "nanotron": "ParallelContext", "deepspeed": "PipelineParallelGrid"}
# Where a HyperCommGrid has its groups, by their axes.
_GRID = "_pgs"


def live_names() -> dict[str, str]:
    """Return the names that frameworks in this process hold process groups under, by torch's name of the group."""
    found: dict[str, str] = {}
    for holder in _holders():
        for name, group in _groups(holder):
            found.setdefault(str(group.group_name), name.strip("_"))
    return found


def _holders() -> Iterator[Mapping[str, Any]]:
    yield from (vars(sys.modules[name]) for name in _MODULES if name in sys.modules)
    classes = {name for package, name in _CLASSES.items() if package in sys.modules}
    for each in gc.get_objects() if classes else ():
        if type(each).__name__ in classes and type(each).__module__.partition(".")[0] in _CLASSES:
            yield vars(each)


def _groups(holder: Mapping[str, Any]) -> Iterator[tuple[str, dist.ProcessGroup]]:
    for name, value in list(holder.items()):
        if isinstance(value, dist.ProcessGroup):
            yield name, value
        elif isinstance(value, dict):
            named = "{}" if name == _GRID else f"{name}[{{}}]"  # DeepSpeed has the same keys in several of its tables
            for key, each in list(value.items()):
                if isinstance(each, dist.ProcessGroup):
                    yield named.format(key), each
