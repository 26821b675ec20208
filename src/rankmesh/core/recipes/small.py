"""The layouts of nanotron, ezpz, a minimal three-axis class, and a plain axis string.

```
recipe     rank order, adjacent first      the world is
nanotron   tp cp dp pp ep                  the product of all five
ezpz       tp cp pp dp                     tp x cp x pp x dp
three_d    tp pp dp                        tp x pp x dp
axes       as written                      the product
```

>>> nanotron(tp=2, pp=2, dp=2).groups("tp_ep").tolist()
[[0, 1], [2, 3], [4, 5], [6, 7]]
>>> ezpz(16, tp=2, cp=2, pp=2).groups("dp").tolist()[0]
[0, 8]
>>> three_d(tp=2, pp=2, dp=2).groups("pp").tolist()
[[0, 2], [1, 3], [4, 6], [5, 7]]
"""

from __future__ import annotations

from rankmesh.core.axes import integer
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.picks import ends
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.sizes import divided, recipe, world_and_dp
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError, quoted

__all__ = ["axes", "ezpz", "nanotron", "three_d"]


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

    ``local_world_size`` adds ``local``, the ranks of one host. Source: ``nanotron.parallel.context``.
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
    specs += [GroupSpec(name) for name in ("tp", "cp", "dp", "pp", "ep")]
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
    specs = [GroupSpec(name) for name in ("dp", "tp", "pp", "cp")]
    return Plan(Mesh(tp=tp, cp=cp, pp=pp, dp=data), specs, world_size=world, options=options)


@recipe
def three_d(
    world_size: int | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    options: Options | None = None,
) -> Plan:
    """The minimal ``ProcessGroups(tp, pp, dp)``: tp adjacent, then pp, then dp."""
    world, data = world_and_dp(world_size, dp, tp=tp, pp=pp)
    specs = [GroupSpec(name) for name in ("tp", "pp", "dp")]
    return Plan(Mesh(tp=tp, pp=pp, dp=data), specs, world_size=world, options=options)


def axes(mesh: Mesh, *, world_size: int | None = None, options: Options | None = None) -> Plan:
    """A plan for a bare mesh: one group for each axis of the mesh and of its views, and the usual unions.

    ``dp_cp`` reduces gradients where both axes exist, ``embd`` ties the embeddings at the ends of ``pp``. The world is
    what the mesh spans, unless ``world_size`` is larger.

    >>> list(axes(Mesh(tp=2, cp=2, dp=2, pp=2)).kinds)
    ['tp', 'cp', 'dp', 'pp', 'dp_cp', 'embd']
    """
    if not isinstance(mesh, Mesh):
        raise PlanError(
            f"{quoted(mesh)} is no Mesh; give one, such as Mesh(tp=2, dp=4), or read a text with rankmesh.read",
            received=mesh,
        )
    specs = [GroupSpec(name) for name in mesh.axes]
    for view, other in mesh.views.items():
        taken = {spec.name for spec in specs}
        specs += [GroupSpec(name, view=view) for name in other.axes if name not in taken]
    unions = [GroupSpec("dp_cp", "dp-cp"), GroupSpec("embd", "pp", pick=ends)]
    taken = {spec.name for spec in specs}
    specs += [union for union in unions if union.name not in taken and mesh.axes.keys() >= set(union.axes)]
    return Plan(mesh, specs, world_size=mesh.rank_range.stop if world_size is None else world_size, options=options)
