"""accelerate's ``ParallelismConfig``: the mesh that it describes, its groups, and the ``DeviceMesh`` that it asks for.

```
dimension       dp_replicate  dp_shard  cp  sp  tp         first slowest, tp adjacent; only sizes above 1 (the recipe)
dp              x             x                            data loading
dp_shard_cp                   x         x                  parameter shards
dp_cp           x             x         x                  loss reduction
```

```python
config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)       # accelerate's
with rm.connect(plan(config)) as groups:
    config.device_mesh = device_mesh(groups, "cuda")                              # what accelerate uses from here on
```

What differs: no process group twice for equal ranks (accelerate makes one for each flattened dimension). Sequence
parallelism has its axis here; accelerate makes no mesh at all then and leaves the groups to DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankmesh.core import Options, Plan, recipes
from rankmesh.core.axes import axis_size
from rankmesh.core.recipes.frameworks import FLATTENED
from rankmesh.errors import PlanError, quoted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rankmesh.runtime.live import LiveGroups

__all__ = ["device_mesh", "plan"]

# The sizes of a ParallelismConfig, first the slowest.
_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


def plan(config: object = None, *, options: Options | None = None, **sizes: int | None) -> Plan:
    """Return the plan of a ``ParallelismConfig``, or of its sizes: ``dp_replicate_size=2, tp_size=4``.

    A size that is left out, or None, is taken from the environment (``PARALLELISM_CONFIG_TP_SIZE`` and so on) or 1.
    ``PlanError``, which is a ``ValueError`` as accelerate's, for sizes that accelerate refuses: context and sequence
    parallelism together, tensor or context parallelism with replicas that are not sharded; and for no size above 1.

    >>> both = plan(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    >>> both.mesh, both.groups("dp").of(0).ranks
    (Mesh(tp=2, dp_shard=2, dp_replicate=2), (0, 2, 4, 6))
    """
    all_sizes = _sizes(config, sizes)
    if max(all_sizes.values()) == 1:
        raise PlanError(
            "the sizes are all 1, for which accelerate makes no mesh; "
            "give dp_replicate_size, the number of processes, for plain data parallelism"
        )
    return recipes.accelerate(**all_sizes, options=options)


def device_mesh(groups: LiveGroups, device_type: str | None = None) -> DeviceMesh:
    """Return accelerate's ``DeviceMesh`` over the live groups of ``plan``, flattened dimensions too; no new group."""
    active = groups.plan.mesh.axes
    joined = {name: tuple(axis for axis in axes if axis in active) for name, axes in FLATTENED.items()}
    return groups.device_mesh(device_type=device_type, flattened={name: axes for name, axes in joined.items() if axes})


def _sizes(config: object, given: Mapping[str, int | None]) -> dict[str, int]:
    names = {f"{axis}_size": axis for axis in _ORDER}
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise PlanError(
            f"{quoted(unknown[0])} is not a size of a ParallelismConfig; use one of {', '.join(names)}",
            received=unknown[0],
        )
    if config is not None and (given or not any(hasattr(config, name) for name in names)):
        raise PlanError(
            f"config {quoted(config)} and the sizes {dict(given)} cannot be read together; give a "
            "ParallelismConfig, or sizes such as tp_size=2, not both",
            received=config,
        )
    chosen = given if config is None else {name: getattr(config, name, None) for name in names}
    return {axis: axis_size(axis, _size(name, chosen.get(name))) for name, axis in names.items()}


def _size(name: str, size: int | None) -> int:
    """Return the size; for None, the one that accelerate's launcher put into the environment."""
    if size is not None:
        return size
    variable = f"PARALLELISM_CONFIG_{name.upper()}"
    text = os.environ.get(variable, "1")
    if not text.isdecimal():
        raise PlanError(
            f"{variable}={quoted(text)} in the environment is not a number of ranks; correct it, or unset it",
            received=text,
        )
    return int(text)
