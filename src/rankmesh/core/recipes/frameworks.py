"""The layouts of nanotron, ezpz, torchtitan, Accelerate and DeepSpeed, of a minimal class, and of a plain mesh.

```
recipe       mesh, adjacent first                   further groups
nanotron     tp cp dp pp ep                         mp, dp_cp, tp_ep; the world is the product of all five
ezpz         tp cp pp dp
three_d      tp pp dp
torchtitan   tp cp dp_shard dp_replicate pp         batch = dp_replicate x dp_shard, fsdp = dp_shard x cp, loss = both
  expert     etp ep efsdp dp_replicate pp           efsdp = dp_shard x cp x tp / (etp x ep)
accelerate   tp sp cp dp_shard dp_replicate         dp, dp_shard_cp and dp_cp: axes joined, without sp
deepspeed    tp dp | sp dp                          hpz, mics_shard: blocks of ranks; mics_replicate: across the blocks
  expert     tp ep edp                              experts over data-parallel ranks of one tp; with sp, adjacent ranks
axes         as written                             dp_cp, embd
```

Sources: ``nanotron.parallel.context``, ``ezpz.tp``, ``torchtitan.distributed.parallel_dims``,
``accelerate.parallelism_config`` of Accelerate 1.15.0, and ``deepspeed.utils.groups``, ``deepspeed.initialize`` and
``deepspeed.runtime.zero.mics_utils``. Equal groups that a system names several times are named once here.

>>> nanotron(tp=2, pp=2, dp=2).groups("tp_ep").tolist()
[[0, 1], [2, 3], [4, 5], [6, 7]]
>>> three_d(tp=2, pp=2, dp=2).groups("pp").tolist()
[[0, 2], [1, 3], [4, 6], [5, 7]]
>>> plan = torchtitan(16, dp_shard=2, cp=2, tp=2, pp=2, ep=4)
>>> plan.groups("ep").of(5).ranks, plan.groups("fsdp").of(5).ranks
((4, 5, 6, 7), (1, 3, 5, 7))
>>> plan = accelerate(16, dp_replicate=2, dp_shard=2, cp=2, tp=2)
>>> list(plan.kinds), plan.groups("dp_shard_cp").of(5).ranks
(['dp_replicate', 'dp_shard', 'cp', 'tp', 'dp', 'dp_shard_cp', 'dp_cp'], (1, 3, 5, 7))
>>> plan = deepspeed(8, tp=2, hpz=4)
>>> plan.groups("tp").of(5).ranks, plan.groups("dp").of(5).ranks, plan.groups("hpz").of(5).ranks
((4, 5), (1, 3, 5, 7), (4, 5, 6, 7))
"""

from __future__ import annotations

from rankmesh.core.axes import axis_size, integer
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.picks import ends
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.sizes import divided, kinds, recipe, world_and_dp
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError, quoted

__all__ = ["FLATTENED", "accelerate", "axes", "deepspeed", "ezpz", "nanotron", "three_d", "torchtitan"]

# The names of joined axes, with the axes that each joins where they are larger than one.
FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


@recipe
def nanotron(
    world_size: int | None = None,
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    ep: int = 1,
    local_world_size: int | None = None,
    options: Options | None = None,
) -> Plan:
    """nanotron's ``ParallelContext``: expert parallelism multiplies the world and is the slowest axis.

    ``local_world_size`` adds ``local``, the ranks of one host.
    """
    data = 1 if dp is None and world_size is None else dp
    world, data = world_and_dp(world_size, data, tp=tp, cp=cp, pp=pp, ep=ep)
    mesh = Mesh(tp=tp, cp=cp, dp=data, pp=pp, ep=ep)
    every = "tp-cp-dp-pp-ep"
    specs = [GroupSpec("world", every)]
    if local_world_size is not None:
        local = integer(local_world_size, "local_world_size", least=1)
        hosts = divided(world, local, "world_size", "local_world_size")
        specs.append(GroupSpec("local", every, levels=(local, hosts), level=0))
    specs += kinds("tp cp dp pp ep")
    specs += [GroupSpec("mp", "tp-pp-ep"), GroupSpec("dp_cp", "dp-cp"), GroupSpec("tp_ep", "tp-ep")]
    return Plan(mesh, specs, world_size=world, options=options)


@recipe
def ezpz(
    world_size: int | None = None,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    options: Options | None = None,
) -> Plan:
    """``ezpz.tp``: (dp, pp, cp, tp) with tp adjacent, as its code lays ranks out (its docstring differs).

    The docstring lists, for 16 ranks with tp=cp=pp=2, data groups of stride 4 and pipeline groups of stride 8; the
    code makes data groups of stride 8 and pipeline groups of stride 4, and so does this recipe.
    """
    world, data = world_and_dp(world_size, dp, tp=tp, cp=cp, pp=pp)
    return Plan(Mesh(tp=tp, cp=cp, pp=pp, dp=data), kinds("dp tp pp cp"), world_size=world, options=options)


@recipe
def three_d(
    world_size: int | None = None, *, tp: int = 1, pp: int = 1, dp: int | None = None, options: Options | None = None
) -> Plan:
    """Plan the minimal ``ProcessGroups(tp, pp, dp)``: tp adjacent, then pp, then dp."""
    world, data = world_and_dp(world_size, dp, tp=tp, pp=pp)
    return Plan(Mesh(tp=tp, pp=pp, dp=data), kinds("tp pp dp"), world_size=world, options=options)


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
    """Plan torchtitan's groups: ``dp_shard`` and ``world_size`` follow from each other; ``etp`` is 1 or ``tp``."""
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
    batch, loss = GroupSpec("batch", "dp_replicate-dp_shard"), GroupSpec("loss", "dp_replicate-dp_shard-cp")
    specs = [*kinds("pp"), batch, loss, *kinds("dp_replicate dp_shard"), GroupSpec("fsdp", "dp_shard-cp")]
    specs += [*kinds("cp tp"), *kinds("ep efsdp etp", view="expert")]
    return Plan(mesh, specs, world_size=world, options=options)


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
    """Plan the groups of a ``ParallelismConfig``: ``dp_shard`` and ``world_size`` follow from each other.

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
    specs = kinds(*reversed(kept))
    for name, axes in FLATTENED.items():
        present = [axis for axis in axes if axis in kept]
        specs += [GroupSpec(name, present)] if present else []
    return Plan(Mesh.of(kept), specs, world_size=world, options=options)


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
    """Plan the groups of a DeepSpeed configuration: ``dp`` and ``world_size`` follow from each other.

    ``tp`` is AutoTP's size, ``sp`` the size of sequence parallelism (one of them is 1), ``ep`` AutoEP's, ``hpz`` the
    partition size of ZeRO++, ``mics`` the shard size of MiCS. A partition size that does not divide the world is
    refused; DeepSpeed lowers one that is larger.
    """
    world, data = world_and_dp(world_size, dp, tp=tp, sp=sp)
    if tp > 1 and sp > 1:
        raise PlanError(
            f"tp is {tp} and sp is {sp}, but DeepSpeed makes a mesh of dp and one of them; leave one at 1", tp=tp, sp=sp
        )
    inner = {"sp": sp} if sp > 1 else {"tp": tp}
    mesh = Mesh.of({**inner, "dp": data})
    every = "-".join(mesh.axes)
    specs = [GroupSpec("world", every), *kinds("dp", *inner)]
    if axis_size("ep", ep) > 1:
        lanes = {} if sp > 1 else {"tp": tp}
        mesh = mesh.with_view(
            "expert", shared=None, **lanes, ep=ep, edp=divided(world // lanes.get("tp", 1), ep, "dp", "ep")
        )
        specs += kinds("ep edp", view="expert")
    if axis_size("hpz", hpz) > 1:
        specs.append(GroupSpec("hpz", every, levels=(hpz, divided(world, hpz, "world_size", "hpz")), level=0))
    if axis_size("mics", mics) > 1:
        levels = (mics, divided(world, mics, "world_size", "mics"))
        specs.append(GroupSpec("mics_shard", every, levels=levels, level=0))
        specs.append(GroupSpec("mics_replicate", every, levels=levels, level=1))
    return Plan(mesh, specs, world_size=world, options=options)


def axes(mesh: Mesh, *, world_size: int | None = None, options: Options | None = None) -> Plan:
    """Plan a bare mesh: one group for each axis of the mesh and of its views, and the usual unions.

    ``dp_cp`` reduces gradients where both axes exist, ``embd`` ties the embeddings at the ends of ``pp``. The world is
    what the mesh spans, unless ``world_size`` is larger.

    >>> list(axes(Mesh(tp=2, cp=2, dp=2, pp=2)).kinds)
    ['tp', 'cp', 'dp', 'pp', 'dp_cp', 'embd']
    """
    if not isinstance(mesh, Mesh):
        raise PlanError(
            f"{quoted(mesh)} is not a Mesh; give one, such as Mesh(tp=2, dp=4), or read a text with rankmesh.read",
            received=mesh,
        )
    specs = kinds(*mesh.axes)
    for view, other in mesh.views.items():
        taken = {spec.name for spec in specs}
        specs += kinds(*(name for name in other.axes if name not in taken), view=view)
    unions = [GroupSpec("dp_cp", "dp-cp"), GroupSpec("embd", "pp", pick=ends)]
    taken = {spec.name for spec in specs}
    specs += [union for union in unions if union.name not in taken and mesh.axes.keys() >= set(union.axes)]
    return Plan(mesh, specs, world_size=mesh.rank_range.stop if world_size is None else world_size, options=options)
