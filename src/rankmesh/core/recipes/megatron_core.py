"""Megatron-Core's groups: every group of ``parallel_state.initialize_model_parallel``, dense and expert.

```
order tp-cp-ep-dp-pp      mesh     tp, cp, dp, pp        attention and dense layers
                          expert   etp, ep, edp, pp      experts: the same ranks, the same pp
gtp=2, egtp=2             mesh     tp, gtp_remat, cp, dp, pp
                          expert   etp, ep, egtp_remat, edp, pp
```

With ``gtp`` (generalised tensor parallelism), the ranks along ``gtp_remat`` hold pieces of each weight and different
batches: ``dp`` are the replicas of a weight, ``dp_gtp`` all ranks with different data.

Names are the short keys of Megatron's NCCL configuration. Source: NVIDIA Megatron-Core 0.16.1, ``core.parallel_state``.

>>> plan = megatron(16, tp=2, pp=4)
>>> plan.groups("pp").tolist()
[[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
>>> plan.groups("dp").tolist()[:3]
[[0, 2], [1, 3], [4, 6]]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from rankmesh.core.axes import axis_names, axis_size, integer, items_of
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.picks import PickLike, ends, first
from rankmesh.core.plan import Plan
from rankmesh.core.recipes.sizes import divided, recipe, world_and_dp
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError, quoted

__all__ = ["DEFAULT_ORDER", "megatron", "megatron_mesh", "with_pieces"]

DEFAULT_ORDER = "tp-cp-ep-dp-pp"

_EXPERT_NAMES = {"tp": "etp", "ep": "ep", "gtp_remat": "egtp_remat", "dp": "edp", "pp": "pp"}


def megatron_mesh(world_size: int | None = None, **arguments: Any) -> Mesh:
    """Return the mesh of ``megatron``: ``tp cp dp pp``, with the view ``expert`` of ``etp ep edp pp``."""
    return megatron(world_size, **arguments).mesh


def _mesh(dense: Mapping[str, int], expert: Mapping[str, int], order: str, rank_offset: int) -> Mesh:
    """Return the mesh in Megatron's order with the view of the experts, whose pipeline groups are checked to be equal.

    ``order`` names the axes, fastest first; axes of size 1 may be left out. ``gtp_remat`` follows ``tp`` in the mesh,
    ``ep`` in the view.
    """
    names = [*(name for name in dense if name != "gtp_remat"), "ep"]
    sizes = {name: max(dense.get(name, 1), expert.get(name, 1)) for name in names}
    whole, pieces = _tokens(order, sizes, after="tp"), _tokens(order, sizes, after="ep")
    mesh = Mesh.of({name: dense[name] for name in whole if name in dense}, offset=rank_offset)
    view = {_EXPERT_NAMES[name]: expert[name] for name in pieces if name in expert}
    return mesh.with_view("expert", shared=("pp",), **view)


def _expert_dp(world: int, etp: int | None, tp: int, others: Mapping[str, int]) -> int:
    """Return the experts' data-parallel size: the world divided by their other sizes."""
    sizes = {"etp": tp if etp is None else etp, **others}
    block = prod(axis_size(name, size) for name, size in sizes.items())
    if world % block == 0:
        return world // block
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
    why, fix = "", f"use a multiple of {block} ranks, or change a size"
    ep = sizes["ep"]
    fits = tuple(size for size in range(ep - 1, 0, -1) if ep % size == 0 and world % (block // ep * size) == 0)
    if fits:
        also = f" ({', '.join(map(str, fits[1:]))} fit, too)" if fits[1:] else ""
        fix = f"set ep={fits[0]}, which fits{also}, or use a multiple of {block} ranks"
    if etp is None and tp > 1:
        why = ", as etp defaults to tp"
        fix = "set etp=1, which fits" if world % (block // tp) == 0 else f"set etp and {fix}"
    raise PlanError(
        f"world_size is {world}, but {shown} = {block} does not divide it{why}; {fix}",
        world_size=world,
        product=block,
        fits=fits,
    )


def _tokens(order: str, sizes: Mapping[str, int], *, after: str) -> tuple[str, ...]:
    """Return the axes in their order; ``gtp_remat`` follows ``after``, or tp, unless the order names it."""
    names = with_pieces(axis_names(str(order).lower()), after)
    for name in names:
        if name not in sizes and name != "gtp_remat":
            raise PlanError(
                f"order {quoted(order)} names {name!r}, none of {', '.join(sizes)}; remove it", order=order, axis=name
            )
    missing = [name for name in sizes if name not in names]
    for name in missing:
        if sizes[name] > 1:
            raise PlanError(
                f"order {quoted(order)} leaves out {name!r}, whose size is {sizes[name]}; add it",
                order=order,
                axis=name,
            )
    return (*names, *missing)


def with_pieces(names: tuple[str, ...], after: str) -> tuple[str, ...]:
    """Return the axes with ``gtp_remat`` behind another or behind tp, unless it is there; first where neither is."""
    if "gtp_remat" in names:
        return names
    anchor = after if after in names else "tp"
    place = names.index(anchor) + 1 if anchor in names else 0
    return (*names[:place], "gtp_remat", *names[place:])


@recipe
def megatron(
    world_size: int | None = None,
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    gtp: int = 1,
    egtp: int = 1,
    order: str = DEFAULT_ORDER,
    optimizer_instances: int = 1,
    hierarchical_cp: Sequence[int] | None = None,
    hybrid_cp: bool = False,
    all_gather: bool = False,
    gloo: bool = False,
    embedding: PickLike = ends,
    position_embedding: PickLike = first,
    pp_backend: str | None = None,
    timeout: float | None = None,
    rank_offset: int = 0,
    options: Options | None = None,
) -> Plan:
    """Plan every group that Megatron-Core makes.

    Args:
        world_size: ranks. Default None: the product of the other sizes.
        tp: ranks of a tensor-parallel group (default 1).
        cp: ranks of a context-parallel group (default 1).
        dp: ranks of a data-parallel group. Default None: what the other sizes leave of ``world_size``.
        pp: pipeline stages (default 1).
        ep: ranks of an expert-parallel group (default 1).
        etp: ranks of an expert's tensor-parallel group. Default None: ``tp``.
        gtp: ranks over which dense weights are sharded further (default 1). More than 1 needs one optimizer instance.
        egtp: ranks over which the experts' weights are sharded further (default 1), under the same condition.
        order: the axes, fastest first (default tp-cp-ep-dp-pp). Axes of size 1 may be left out.
        optimizer_instances: instances of the distributed optimizer in the data-parallel groups (default 1).
        hierarchical_cp: sizes of the levels of the context-parallel groups, adjacent ranks first (default None).
        hybrid_cp: add groups of each power of two inside ``dp_cp`` (default False).
        all_gather: add a second ``dp_cp`` communicator for overlapping gathers (default False).
        gloo: add the CPU counterparts of the data-parallel groups, except of sharded weights (default False).
        embedding: picks the pipeline stages that hold the embedding (default: the first and the last).
        position_embedding: picks the pipeline stages that hold the position embedding (default: the first).
        pp_backend: the backend of the pipeline groups. Default None: the world's backend.
        timeout: seconds that a collective may take. Default None: the world's limit.
        rank_offset: the first rank of the mesh (default 0).
        options: further options of every group.
    """
    remat = {"gtp": gtp} if gtp != 1 else {}
    expert_remat = {"egtp": egtp} if egtp != 1 else {}
    total, data = world_and_dp(world_size, dp, tp=tp, **remat, cp=cp, pp=pp)
    expert_dp = _expert_dp(total, etp, tp, {"ep": ep, **expert_remat, "pp": pp})
    dense = {"tp": tp, "cp": cp, "dp": data, "pp": pp, **({"gtp_remat": gtp} if remat else {})}
    experts = {"tp": tp if etp is None else etp, "ep": ep, "dp": expert_dp, "pp": pp}
    mesh = _mesh(dense, experts | ({"gtp_remat": egtp} if expert_remat else {}), order, rank_offset)
    sizes, expert = mesh.axes, mesh.view("expert").axes
    instances = axis_size("optimizer_instances", optimizer_instances)
    shards = (divided(sizes["dp"] * sizes["cp"], instances, "dp x cp", "optimizer_instances"), instances)
    expert_shards = (divided(expert["edp"], instances, "edp", "optimizer_instances"), instances)
    if instances > 1 and (gtp > 1 or egtp > 1):
        raise PlanError(
            f"optimizer_instances is {instances} with gtp {gtp} and egtp {egtp}, but Megatron shards weights with one "
            "optimizer instance; make one of them 1",
            instances=instances,
        )
    if instances > 1:
        mesh = mesh.split("edp", view="expert", edp_intra=expert_shards[0], edp_inter=instances)
    expert_gloo, gloo = gloo and gtp == egtp == 1, gloo and gtp == 1
    levels = items_of(() if hierarchical_cp is None else hierarchical_cp)
    if levels is None:
        raise PlanError(f"hierarchical_cp is {quoted(hierarchical_cp)}; list a size for each level, such as (2, 2)")
    hierarchy = tuple(integer(size, "hierarchical_cp", least=1) for size in levels)
    whole = ("gtp_remat",) if gtp > 1 else ()
    expert_whole = ("egtp_remat",) if egtp > 1 else ()
    specs = [
        *_data(shards, all_gather, gloo),
        *(_hybrid(sizes["dp"] * sizes["cp"]) if hybrid_cp else ()),
        GroupSpec("dp"),
        *([GroupSpec("dp_gloo", "dp", backend="gloo")] if gloo else []),
        GroupSpec("cp"),
        *(GroupSpec(f"hcp_{level}", "cp", levels=hierarchy, level=level) for level in range(len(hierarchy))),
        GroupSpec("mp", ("tp", *whole, "pp")),
        GroupSpec("tp"),
        GroupSpec("pp", backend=pp_backend),
        GroupSpec("embd", "pp", pick=embedding),
        GroupSpec("pos_embd", "pp", pick=position_embedding),
        GroupSpec("tp_dp_cp", ("tp", *whole, "dp", "cp")),
        GroupSpec("tp_dp", ("tp", *whole, "dp")),
        GroupSpec("tp_cp", "tp-cp"),
        *_expert(expert_shards, expert_gloo, expert_whole),
        *_remat(whole, expert_whole),
    ]
    inherited = Options(timeout=timeout).over(options or Options())
    world = (mesh.size + rank_offset) if world_size is None else world_size + rank_offset
    return Plan(mesh, specs, world_size=world, options=inherited)


def _data(shards: tuple[int, int], all_gather: bool, gloo: bool) -> Iterator[GroupSpec]:
    yield GroupSpec("dp_cp", "dp-cp")
    if all_gather:
        yield GroupSpec("dp_cp_ag", "dp-cp", overlap="all_gather")
    yield GroupSpec("intra_dp_cp", "dp-cp", levels=shards, level=0)
    if gloo:
        yield GroupSpec("dp_cp_gloo", "dp-cp", backend="gloo")
        yield GroupSpec("intra_dp_cp_gloo", "dp-cp", levels=shards, level=0, backend="gloo")


def _hybrid(size: int) -> Iterator[GroupSpec]:
    """Yield the groups of 2, 4, 8, ... up to half of dp_cp. Raises ``PlanError`` where one size does not fill it."""
    parts = [2**exponent for exponent in range(1, size.bit_length() - 1)]
    if size < 2 or size % 2 or any(size % part for part in parts):
        raise PlanError(
            f"dp x cp is {size}, which hybrid_cp cannot fill with groups of {', '.join(map(str, parts or [2]))} ranks; "
            "make dp x cp a power of two",
            size=size,
        )
    for part in parts:
        yield GroupSpec(f"hybrid_dp_cp_{part}", "dp-cp", levels=(part, size // part), level=0)


def _expert(shards: tuple[int, int], gloo: bool, whole: tuple[str, ...]) -> Iterator[GroupSpec]:
    inner = "edp" if shards[1] == 1 else "edp_intra"
    yield GroupSpec("ep", view="expert")
    yield GroupSpec("ep_tp", "etp", view="expert")
    yield GroupSpec("tp_ep_mp", "etp-ep", view="expert")
    yield GroupSpec("tp_ep_pp", "etp-ep-pp", view="expert")
    yield GroupSpec("ep_dp", "edp", view="expert")
    yield GroupSpec("intra_ep_dp", "edp", view="expert", levels=shards, level=0)
    yield GroupSpec("inter_ep_dp", "edp", view="expert", levels=shards, level=1)
    if gloo:
        yield GroupSpec("ep_dp_gloo", "edp", view="expert", backend="gloo")
        yield GroupSpec("intra_ep_dp_gloo", "edp", view="expert", levels=shards, level=0, backend="gloo")
    yield GroupSpec("intra_dist_opt_instance", ("etp", "ep", *whole, inner, "pp"), view="expert")


def _remat(whole: tuple[str, ...], expert_whole: tuple[str, ...]) -> Iterator[GroupSpec]:
    """Yield the groups along the axes of generalised tensor parallelism, and those that join these axes to others."""
    if whole:
        yield GroupSpec("gtp_remat", "gtp_remat")
        yield GroupSpec("dp_gtp", (*whole, "dp"))
        yield GroupSpec("dp_cp_gtp", (*whole, "dp", "cp"))
    if expert_whole:
        yield GroupSpec("expt_gtp_remat", "egtp_remat", view="expert")
        yield GroupSpec("ep_dp_gtp", (*expert_whole, "edp"), view="expert")
        yield GroupSpec("tp_ep_pp_gtp", ("etp", "ep", *expert_whole, "pp"), view="expert")
