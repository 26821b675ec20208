"""Accelerate's ``ParallelismConfig``: one mesh of the axes that are larger than one, and three flattened groups.

```
mesh           tp sp cp dp_shard dp_replicate     adjacent first
  dp           = dp_replicate x dp_shard          data loading
  dp_shard_cp  = dp_shard x cp                    parameter shards
  dp_cp        = dp_replicate x dp_shard x cp     loss
```

The flattened groups leave ``sp`` out, as Accelerate's do: DeepSpeed shards over these ranks by groups of its own.
Source: ``accelerate.parallelism_config`` of Accelerate 1.15.0.

>>> plan = accelerate(16, dp_replicate=2, dp_shard=2, cp=2, tp=2)
>>> list(plan.kinds), plan.groups("dp_shard_cp").of(5).ranks
(['dp_replicate', 'dp_shard', 'cp', 'tp', 'dp', 'dp_shard_cp', 'dp_cp'], (1, 3, 5, 7))
"""

from __future__ import annotations

from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.sizes import recipe, world_and_dp
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError

__all__ = ["FLATTENED", "accelerate"]

# The names of joined axes, with the axes that each joins where they are larger than one.
FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


@recipe
def accelerate(
    world_size: int | None = None,
    *,
    dp_replicate: int = 1,
    dp_shard: int | None = None,
    cp: int = 1,
    sp: int = 1,
    tp: int = 1,
    options: Options | None = None,
) -> Plan:
    """The groups of a ``ParallelismConfig``: ``dp_shard`` and ``world_size`` follow from each other.

    What Accelerate refuses is refused: replicas alone beside tensor or context parallelism, and ``cp`` with ``sp``. A
    world of one rank keeps the axis ``dp_replicate``.
    """
    world, shard = world_and_dp(world_size, dp_shard, dp_replicate=dp_replicate, cp=cp, sp=sp, tp=tp)
    if cp > 1 and sp > 1:
        raise PlanError(
            f"cp is {cp} and sp is {sp}, but Accelerate shards a sequence in one of the two ways; leave one at 1",
            cp=cp,
            sp=sp,
        )
    if max(tp, cp) > 1 and dp_replicate > 1 and shard == 1:
        raise PlanError(
            f"dp_replicate is {dp_replicate} and dp_shard 1 with tp {tp} and cp {cp}, but Accelerate combines tp and "
            "cp with shards, not with replicas alone; use dp_shard > 1",
            dp_replicate=dp_replicate,
        )
    sizes = {"tp": tp, "sp": sp, "cp": cp, "dp_shard": shard, "dp_replicate": dp_replicate}
    kept = {name: size for name, size in sizes.items() if size > 1} or {"dp_replicate": 1}
    specs = [GroupSpec(name) for name in reversed(kept)]
    for name, axes in FLATTENED.items():
        present = [axis for axis in axes if axis in kept]
        specs += [GroupSpec(name, present)] if present else []
    return Plan(Mesh.of(kept), specs, world_size=world, options=options)
