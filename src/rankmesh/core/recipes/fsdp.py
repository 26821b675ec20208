"""torchtitan's ``ParallelDims``: its views are one mesh of five axes and one view for the experts.

```
mesh      tp cp dp_shard dp_replicate pp           adjacent first
            batch = dp_replicate x dp_shard        data loading
            fsdp  = dp_shard x cp                  parameter shards
            loss  = dp_replicate x dp_shard x cp   loss reduction
expert    etp ep efsdp dp_replicate pp             efsdp = dp_shard x cp x tp / (etp x ep)
```

Source: ``torchtitan.distributed.parallel_dims``. Its views name the same rank sets several times; here each is named
once, and equal ones share a communicator.

>>> plan = torchtitan(16, dp_shard=2, cp=2, tp=2, pp=2, ep=4)
>>> plan.groups("ep").of(5).ranks, plan.groups("fsdp").of(5).ranks
((4, 5, 6, 7), (1, 3, 5, 7))
"""

from __future__ import annotations

from rankmesh.core.axes import axis_size
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.sizes import divided, recipe, world_and_dp
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError

__all__ = ["torchtitan"]


@recipe
def torchtitan(
    world_size: int | None = None,
    *,
    dp_replicate: int = 1,
    dp_shard: int | None = None,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    options: Options | None = None,
) -> Plan:
    """The groups of torchtitan: ``dp_shard`` and ``world_size`` follow from each other; ``etp`` is 1 or ``tp``."""
    world, shard = world_and_dp(world_size, dp_shard, dp_replicate=dp_replicate, cp=cp, tp=tp, pp=pp)
    expert_tp = axis_size("etp", 1 if etp is None else etp)
    if expert_tp not in (1, tp):
        raise PlanError(
            f"etp is {expert_tp} with tp {tp}, but torchtitan shards an expert like a dense layer or not at all; use "
            f"etp=1 or etp={tp}",
            etp=expert_tp,
            tp=tp,
        )
    efsdp = divided(shard * cp * tp, expert_tp * axis_size("ep", ep), "dp_shard x cp x tp", "etp x ep")
    mesh = Mesh(tp=tp, cp=cp, dp_shard=shard, dp_replicate=dp_replicate, pp=pp).with_view(
        "expert", etp=expert_tp, ep=ep, efsdp=efsdp, dp_replicate=dp_replicate, pp=pp
    )
    specs = [
        GroupSpec("pp"),
        GroupSpec("batch", "dp_replicate-dp_shard"),
        GroupSpec("loss", "dp_replicate-dp_shard-cp"),
        GroupSpec("dp_replicate"),
        GroupSpec("dp_shard"),
        GroupSpec("fsdp", "dp_shard-cp"),
        GroupSpec("cp"),
        GroupSpec("tp"),
        GroupSpec("ep", view="expert"),
        GroupSpec("efsdp", view="expert"),
        GroupSpec("etp", view="expert"),
    ]
    return Plan(mesh, specs, world_size=world, options=options)
