"""The layouts of vLLM and SGLang, which serve models: how their workers share layers, experts and the KV cache.

```
vLLM      mesh        tp pcp pp dp replica           adjacent first; replica: independent engines
            ep        = tp x pcp x dp                experts: one group in each stage
          decode      dcp dtp ... | dtp dcp ...      the KV cache while decoding: dcp inside tp; with pcp, over pcp
SGLang    mesh        tp pp
          attention   attn_tp attn_cp attn_dp pp     tp = attn_tp x attn_cp x attn_dp
          experts     moe_tp moe_ep moe_dp pp        tp = moe_tp x moe_ep x moe_dp
          decode      dcp dtp pp                     tp = dcp x dtp
```

Sources: vLLM 0.33.0, ``vllm.distributed.parallel_state``; SGLang 0.5.23, ``sglang.srt.distributed.parallel_state``.

>>> plan = vllm(16, tp=4, pp=2, dp=2, dcp=2)
>>> plan.groups("tp").of(5).ranks, plan.groups("dcp").of(5).ranks, plan.groups("ep").of(5).ranks
((4, 5, 6, 7), (4, 5), (4, 5, 6, 7, 12, 13, 14, 15))
>>> plan = sglang(tp=8, attn_dp=2, ep=4)
>>> plan.groups("attn_tp").of(5).ranks, plan.groups("moe_ep").of(5).ranks, plan.groups("moe_tp").of(5).ranks
((4, 5, 6, 7), (1, 3, 5, 7), (4, 5))
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from rankmesh.core.axes import axis_size, integer
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.sizes import divided, kinds, recipe
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError

__all__ = ["sglang", "vllm"]


@recipe
def vllm(
    world_size: int | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    pcp: int = 1,
    dcp: int = 1,
    eplb: bool = False,
    options: Options | None = None,
) -> Plan:
    """Plan the groups of a vLLM deployment: ``--tensor-parallel-size`` and its kin, each 1 unless given.

    ``pcp`` and ``dcp`` are the context-parallel sizes of prefill and of decoding. What the sizes leave of
    ``world_size`` is the axis ``replica``: engines that a trainer such as verl runs beside each other. ``dcp`` divides
    ``tp``; with ``pcp`` it is 1, ``pcp`` or ``tp x pcp``, as vLLM demands. The members of ``dcp`` are in vLLM's order,
    along ``pcp`` first: it decides which rank holds which part of the KV cache. ``eplb`` adds the group over which
    experts are rebalanced: the ranks of ``ep``, with a separate communicator.

    >>> vllm(tp=2, pcp=2, dcp=4).groups("dcp").of(0).ranks
    (0, 2, 1, 3)
    """
    sizes = {"tp": tp, "pcp": pcp, "pp": pp, "dp": dp}
    world, sizes["replica"] = _world_and_rest(world_size, sizes)
    inner = _decode(tp, pcp, axis_size("dcp", dcp))
    outer = {name: sizes[name] for name in ("pp", "dp", "replica")}
    mesh = Mesh(rank_map=None, **sizes).with_view("decode", shared=tuple(outer), **inner, **outer)
    specs = kinds("tp pcp pp dp")
    over_both = min(tp, pcp) > 1 and dcp == tp * pcp
    order = [part * tp + shard for shard in range(tp) for part in range(pcp)] if over_both else None
    specs += [GroupSpec("dcp", view="decode", pick=order), GroupSpec("ep", "tp-pcp-dp")]
    specs += [GroupSpec("eplb", "tp-pcp-dp", share=False)] if eplb else []
    return Plan(mesh, specs, world_size=world, options=options)


def _world_and_rest(world_size: int | None, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the world, and what the sizes leave of it: nothing where no world is given."""
    engine = prod(axis_size(name, size) for name, size in sizes.items())
    world = engine if world_size is None else integer(world_size, "world_size", least=1)
    return world, divided(world, engine, "world_size", " x ".join(sizes))


def _decode(tp: int, pcp: int, dcp: int) -> dict[str, int]:
    """Return the axes by which decoding divides the ``tp x pcp`` ranks of a stage; adjacent first."""
    if pcp == 1:
        return {"dcp": dcp, "dtp": divided(tp, dcp, "tp", "dcp")}
    if dcp not in (1, pcp, tp * pcp):
        raise PlanError(
            f"dcp is {dcp} with tp {tp} and pcp {pcp}, but with pcp vLLM decodes over none, all of pcp, or all of "
            f"tp x pcp; use 1, {pcp} or {tp * pcp}",
            dcp=dcp,
            pcp=pcp,
        )
    return {"dtp": tp * pcp // dcp, "dcp": dcp}


@recipe
def sglang(
    world_size: int | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    attn_dp: int = 1,
    attn_cp: int = 1,
    ep: int = 1,
    moe_dp: int = 1,
    dcp: int = 1,
    shared_experts_tp: int | None = None,
    options: Options | None = None,
) -> Plan:
    """Plan the groups of an SGLang engine of ``tp x pp`` ranks, which is the ``world_size``.

    Attention cuts ``tp`` into ``attn_dp`` replicas (``--enable-dp-attention``) of ``attn_cp`` sequence parts, mixtures
    of experts cut it into ``moe_dp`` replicas of ``ep`` expert parts, and decoding cuts the KV cache by ``dcp``; what
    is left of each is tensor parallel. Where ``attn_cp`` is more than ``moe_dp``, the tokens of a sequence are shared
    before its experts: ``moe_dp`` are then the ranks of ``attn_cp``. The kinds ``dcp`` and ``shared_experts_tp`` are
    there where they were asked for.
    """
    world, rest = _world_and_rest(world_size, {"tp": tp, "pp": pp})
    if rest != 1:
        raise PlanError(
            f"world_size is {world}, but an SGLang engine has tp {tp} x pp {pp} = {tp * pp} ranks; leave "
            "world_size out, or change a size",
            world_size=world,
        )
    attention = divided(tp, axis_size("attn_dp", attn_dp) * axis_size("attn_cp", attn_cp), "tp", "attn_dp x attn_cp")
    moe_tp = divided(tp, axis_size("ep", ep) * axis_size("moe_dp", moe_dp), "tp", "ep x moe_dp")
    mesh = (
        Mesh(rank_map=None, tp=tp, pp=pp)
        .with_view("attention", shared=("pp",), attn_tp=attention, attn_cp=attn_cp, attn_dp=attn_dp, pp=pp)
        .with_view("experts", shared=("pp",), moe_tp=moe_tp, moe_ep=ep, moe_dp=moe_dp, pp=pp)
    )
    specs = [
        *kinds("tp pp"),
        *kinds("attn_tp attn_cp attn_dp", view="attention"),
        *kinds("moe_tp moe_ep", view="experts"),
    ]
    shared = attn_cp > moe_dp
    specs.append(GroupSpec("moe_dp", "attn_cp", view="attention") if shared else GroupSpec("moe_dp", view="experts"))
    if axis_size("dcp", dcp) > 1:
        mesh = mesh.with_view("decode", shared=("pp",), dcp=dcp, dtp=divided(tp, dcp, "tp", "dcp"), pp=pp)
        specs.append(GroupSpec("dcp", view="decode"))
    if shared_experts_tp is not None:
        width = axis_size("shared_experts_tp", shared_experts_tp)
        levels = (width, divided(attention, width, "attn_tp", "shared_experts_tp"))
        specs.append(GroupSpec("shared_experts_tp", "attn_tp", view="attention", levels=levels, level=0))
    return Plan(mesh, specs, world_size=world, options=options)
