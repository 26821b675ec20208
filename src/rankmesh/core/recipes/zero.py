"""DeepSpeed's groups, as far as its configuration makes them.

```
mesh           tp dp | sp dp       AutoTP: tp adjacent; sequence parallelism: sp adjacent
  hpz          blocks of ranks     ZeRO++: the secondary shards of the parameters
  mics_shard   blocks of ranks     MiCS: shards of the parameters; mics_replicate: the same shard of every block
expert         tp ep edp           AutoEP: experts over data-parallel ranks of the same tp; with sp, over adjacent ranks
```

Source: ``deepspeed.utils.groups``, ``deepspeed.initialize``, ``deepspeed.runtime.zero.mics_utils``.

>>> plan = deepspeed(8, tp=2, hpz=4)
>>> plan.groups("tp").of(5).ranks, plan.groups("dp").of(5).ranks, plan.groups("hpz").of(5).ranks
((4, 5), (1, 3, 5, 7), (4, 5, 6, 7))
"""

from __future__ import annotations

from rankmesh.core.axes import axis_size
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.sizes import divided, recipe, world_and_dp
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError

__all__ = ["deepspeed"]


@recipe
def deepspeed(
    world_size: int | None = None,
    *,
    tp: int = 1,
    sp: int = 1,
    dp: int | None = None,
    ep: int = 1,
    hpz: int = 1,
    mics: int = 1,
    options: Options | None = None,
) -> Plan:
    """The groups of a DeepSpeed configuration: ``dp`` and ``world_size`` follow from each other.

    ``tp`` is AutoTP's size, ``sp`` the size of sequence parallelism (one of them is 1), ``ep`` AutoEP's, ``hpz`` the
    partition size of ZeRO++, ``mics`` the shard size of MiCS. A partition size that does not divide the world is
    refused; DeepSpeed lowers one that is larger.
    """
    world, data = world_and_dp(world_size, dp, tp=tp, sp=sp)
    if tp > 1 and sp > 1:
        raise PlanError(
            f"tp is {tp} and sp is {sp}, but DeepSpeed makes a mesh of dp and one of them; leave one at 1",
            tp=tp,
            sp=sp,
        )
    inner = {"sp": sp} if sp > 1 else {"tp": tp}
    mesh = Mesh.of({**inner, "dp": data})
    every = "-".join(mesh.axes)
    specs = [GroupSpec("world", every), GroupSpec("dp"), *(GroupSpec(name) for name in inner)]
    if axis_size("ep", ep) > 1:
        lanes = {} if sp > 1 else {"tp": tp}
        mesh = mesh.with_view(
            "expert", shared=None, **lanes, ep=ep, edp=divided(world // lanes.get("tp", 1), ep, "dp", "ep")
        )
        specs += [GroupSpec("ep", view="expert"), GroupSpec("edp", view="expert")]
    if axis_size("hpz", hpz) > 1:
        specs.append(GroupSpec("hpz", every, levels=(hpz, divided(world, hpz, "world_size", "hpz")), level=0))
    if axis_size("mics", mics) > 1:
        levels = (mics, divided(world, mics, "world_size", "mics"))
        specs += [
            GroupSpec(f"mics_{part}", every, levels=levels, level=n) for n, part in enumerate(("shard", "replicate"))
        ]
    return Plan(mesh, specs, world_size=world, options=options)
