"""accelerate's ``ParallelismConfig``: the mesh that it stands for, its groups, and the ``DeviceMesh`` that it asks for.

```
dimension       dp_replicate  dp_shard  cp  sp  tp         first slowest, tp adjacent; only sizes above 1
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
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from rankmesh.errors import PlanError
from rankmesh.layout import Mesh
from rankmesh.layout.axes import axis_size
from rankmesh.plan import GroupSpec, Options, Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rankmesh.groups.live import LiveGroups

__all__ = ["device_mesh", "plan"]

# First the slowest.
_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


def plan(config: object = None, *, options: Options | None = None, **sizes: int | None) -> Plan:
    """The plan of a ``ParallelismConfig``, or of its sizes: ``dp_replicate_size=2, tp_size=4``.

    A size that is left out, or None, is that of the environment (``PARALLELISM_CONFIG_TP_SIZE`` and so on) or 1.
    ``PlanError``, which is a ``ValueError`` as accelerate's, for sizes that accelerate refuses: context and sequence
    parallelism together, tensor or context parallelism with replicas that are not sharded; and for no size above 1.

    >>> both = plan(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
    >>> both.mesh, both.groups("dp").of(0).ranks
    (Mesh(tp=2, dp_shard=2, dp_replicate=2), (0, 2, 4, 6))
    """
    all_sizes = _sizes(config, sizes)
    _check(all_sizes)
    active = {name: size for name, size in all_sizes.items() if size > 1}
    mesh = Mesh(rank_map=None, **dict(reversed(active.items())))
    specs = [GroupSpec(name) for name in active]
    specs += [GroupSpec(name, joined) for name, joined in _joined(active).items()]
    return Plan(mesh, specs, world_size=mesh.size, options=options)


def device_mesh(groups: LiveGroups, device_type: str | None = None) -> DeviceMesh:
    """The ``DeviceMesh`` of accelerate over the live groups of ``plan``, flattened dimensions too; no new group."""
    from rankmesh.groups import torch_private

    axes = groups.plan.mesh.axes
    made = groups.device_mesh(*reversed(axes), device_type=device_type)
    for name, joined in _joined(axes).items():
        torch_private.flatten(made, joined, name, groups[name].pg)
    return made


def _joined(active: Container[str]) -> dict[str, tuple[str, ...]]:
    """The flattened dimensions of these active ones, with the dimensions that each joins."""
    joined = {name: tuple(axis for axis in axes if axis in active) for name, axes in _FLATTENED.items()}
    return {name: axes for name, axes in joined.items() if axes}


def _sizes(config: object, given: Mapping[str, int | None]) -> dict[str, int]:
    names = {f"{axis}_size": axis for axis in _ORDER}
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise PlanError(
            f"received {unknown[0]!r}; the sizes of a ParallelismConfig are {', '.join(names)}; use one of them",
            received=unknown[0],
        )
    if config is not None and (given or not any(hasattr(config, name) for name in names)):
        raise PlanError(
            f"received {config!r} as config, and the sizes {dict(given)}; give a ParallelismConfig, or sizes such as "
            "tp_size=2, not both",
            received=config,
        )
    chosen = given if config is None else {name: getattr(config, name, None) for name in names}
    return {axis: axis_size(axis, _size(name, chosen.get(name))) for name, axis in names.items()}


def _size(name: str, size: int | None) -> int:
    """The size itself; for None, what accelerate's launcher put into the environment."""
    if size is not None:
        return size
    variable = f"PARALLELISM_CONFIG_{name.upper()}"
    text = os.environ.get(variable, "1")
    if not text.isdecimal():
        raise PlanError(
            f"received {variable}={text!r} in the environment; it is a number of ranks; correct it, or unset it",
            received=text,
        )
    return int(text)


def _check(sizes: Mapping[str, int]) -> None:
    """Refuse what accelerate refuses."""
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        raise PlanError(
            f"received cp_size {sizes['cp']} and sp_size {sizes['sp']}; accelerate splits a sequence one way or the "
            "other; make one of them 1",
            cp=sizes["cp"],
            sp=sizes["sp"],
        )
    if max(sizes["tp"], sizes["cp"]) > 1 and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
        raise PlanError(
            f"received dp_replicate_size {sizes['dp_replicate']} and dp_shard_size 1 with tp_size {sizes['tp']} and "
            f"cp_size {sizes['cp']}; accelerate does not put these over replicas that are not sharded; "
            "use dp_shard_size instead of dp_replicate_size, or both",
            dp_replicate=sizes["dp_replicate"],
        )
    if max(sizes.values()) == 1:
        raise PlanError(
            "received sizes that are all 1; accelerate makes no mesh then; "
            "give dp_replicate_size, the number of processes, for plain data parallelism"
        )
