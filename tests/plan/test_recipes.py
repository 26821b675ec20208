import tracemalloc

import pytest

from rankmesh import LayoutError, Mesh, Options, PlanError, UnknownAxis
from rankmesh.core import recipes

MEGATRON = [
    "dp_cp", "intra_dp_cp", "dp", "cp", "mp", "tp", "pp", "embd", "pos_embd", "tp_dp_cp", "tp_dp", "tp_cp",
    "ep", "ep_tp", "tp_ep_mp", "tp_ep_pp", "ep_dp", "intra_ep_dp", "inter_ep_dp", "intra_dist_opt_instance",
]  # fmt: skip


def test_megatron_kinds():
    """Megatron's groups under its short names, in the order in which it makes them."""
    assert list(recipes.megatron(64, tp=2, cp=2, pp=2, ep=4, etp=1).kinds) == MEGATRON


def test_megatron_optional_kinds():
    """Gloo twins, the gather communicator, hierarchical and hybrid context groups come when asked for."""
    plain = recipes.megatron(16, tp=2, cp=4)
    gloo = ["dp_cp_gloo", "intra_dp_cp_gloo", "dp_gloo", "ep_dp_gloo", "intra_ep_dp_gloo"]
    requested = {
        "gloo": (recipes.megatron(16, tp=2, cp=4, gloo=True), gloo),
        "all_gather": (recipes.megatron(16, tp=2, cp=4, all_gather=True), ["dp_cp_ag"]),
        "hierarchical_cp": (recipes.megatron(16, tp=2, cp=4, hierarchical_cp=(2, 2)), ["hcp_0", "hcp_1"]),
        "hybrid_cp": (recipes.megatron(16, tp=2, cp=4, hybrid_cp=True), ["hybrid_dp_cp_2", "hybrid_dp_cp_4"]),
    }
    for plan, added in requested.values():
        assert [name for name in plan.kinds if name not in plain.kinds] == added
        assert [name for name in plan.kinds if name in plain.kinds] == list(plain.kinds)


def test_megatron_gloo_counterparts():
    """A gloo twin has the members of its group and a backend of its own; the gather twin never shares."""
    plan = recipes.megatron(16, tp=2, cp=2, gloo=True, all_gather=True)
    for name in ("dp_cp", "intra_dp_cp", "dp", "ep_dp", "intra_ep_dp"):
        assert plan.groups(f"{name}_gloo") == plan.groups(name)
        assert plan.spec(f"{name}_gloo").options.backend == "gloo"
    local = plan.of(3)
    assert local["dp_cp_ag"].ranks == local["dp_cp"].ranks
    assert local["dp_cp_ag"].canonical == "dp_cp_ag"


def test_megatron_options():
    """The pipeline's backend, the timeout and the options of all groups reach them."""
    plan = recipes.megatron(8, pp=2, pp_backend="ucc", timeout=60, options=Options(backend="nccl", timeout=5))
    assert plan.spec("pp").options == Options(backend="ucc", timeout=60)
    assert plan.spec("tp").options == Options(backend="nccl", timeout=60)


def test_megatron_picks():
    """Embedding ranks can be chosen, as with Megatron's get_embedding_ranks."""
    plan = recipes.megatron(8, tp=2, pp=4, embedding=lambda r: [r[0], r[1]], position_embedding=[-1])
    assert plan.groups("embd").tolist() == [[0, 2], [1, 3]]
    assert plan.groups("pos_embd").tolist() == [[6], [7]]


def test_megatron_offset():
    """A rank offset moves every group and makes room in the world."""
    moved, plain = recipes.megatron(8, tp=2, pp=2, rank_offset=4), recipes.megatron(8, tp=2, pp=2)
    assert moved.world_size == 12
    for name in plain.kinds:
        assert (moved.groups(name).array == plain.groups(name).array + 4).all()


def test_world_and_data_size_follow_from_each_other():
    """Giving dp instead of the world, or both, makes the same plan."""
    plan = recipes.megatron(32, tp=2, cp=2, pp=2)
    assert recipes.megatron(dp=4, tp=2, cp=2, pp=2).mesh == plan.mesh
    assert recipes.megatron(32, dp=4, tp=2, cp=2, pp=2) == plan
    assert recipes.ezpz(16, tp=2, cp=2, pp=2).mesh == recipes.ezpz(tp=2, cp=2, pp=2, dp=2).mesh


@pytest.mark.parametrize("order", ["TP-CP-EP-DP-PP", "tp-dp", "tp-cp-ep-dp", "pp-tp-dp-cp-ep"])
def test_orders(order):
    """Orders are read in any case, and size-1 axes may be left out."""
    plan = recipes.megatron(8, tp=2, order=order)
    assert plan.groups("dp").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def _least(received, what, least=1):
    return {"received": received, "what": what, "least": least}


REFUSED = [
    ({"world_size": 10, "tp": 4}, {"world_size": 10, "product": 4}),
    ({"world_size": 16, "tp": 2, "ep": 3}, {"world_size": 16, "product": 6, "fits": (1,)}),
    ({"world_size": 16, "dp": 4, "tp": 2}, {"world_size": 16, "dp": 4}),
    ({}, {}),
    ({"world_size": 0}, _least(0, "world_size")),
    ({"world_size": 8.0}, _least(8.0, "world_size")),
    ({"world_size": 8, "tp": 0}, _least(0, "size of axis 'tp'")),
    ({"world_size": 8, "ep": -1}, {"received": -1, "axis": "ep"}),
    ({"world_size": 8, "dp": 2.5}, _least(2.5, "size of axis 'dp'")),
    ({"world_size": 8, "tp": 2, "order": "tp-tp-dp"}, {"received": "tp-tp-dp", "axis": "tp"}),
    ({"world_size": 8, "tp": 2, "order": "tp-dp-xp"}, {"order": "tp-dp-xp", "axis": "xp"}),
    ({"world_size": 8, "tp": 2, "order": "dp-pp"}, {"order": "dp-pp", "axis": "tp"}),
    ({"world_size": 8, "ep": 2, "order": "tp-dp-pp"}, {"order": "tp-dp-pp", "axis": "ep"}),
    ({"world_size": 8, "optimizer_instances": 3}, {"total": 8, "parts": 3}),
    ({"world_size": 8, "ep": 4, "optimizer_instances": 4}, {"total": 2, "parts": 4}),
    ({"world_size": 8, "optimizer_instances": 0}, _least(0, "size of axis 'optimizer_instances'")),
    ({"world_size": 8, "cp": 4, "hierarchical_cp": (2, 3)}, {"sizes": (2, 3), "size": 4}),
    ({"world_size": 10, "hybrid_cp": True}, {"size": 10}),
    ({"world_size": 8, "cp": 2, "pp": 2, "order": "tp-pp-cp-ep-dp", "tp": 2, "etp": 1},
     {"view": "expert", "axis": "pp"}),
    ({"world_size": 8, "timeout": 0}, {"option": "timeout", "received": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "values"), REFUSED)
def test_megatron_bad_input(arguments, values):
    """Each size, order or option that cannot be is refused with its value."""
    with pytest.raises((PlanError, LayoutError)) as caught:
        recipes.megatron(**arguments)
    groups = {"mesh_groups", "view_groups"}
    assert {name: value for name, value in caught.value.values.items() if name not in groups} == values


@pytest.mark.parametrize("make", [recipes.nanotron, recipes.ezpz, recipes.three_d, recipes.torchtitan])
def test_small_recipes_refuse_what_does_not_divide(make):
    """A tensor size that does not divide the world is refused, never clamped."""
    with pytest.raises(PlanError, match="does not divide it; use a multiple of"):
        make(8, tp=3)
    with pytest.raises(PlanError, match="does not divide it; use a multiple of"):
        make(8, tp=16)


def test_small_recipes():
    """Axes in rank order, adjacent first, and the kinds of each system."""
    nanotron = recipes.nanotron(tp=2, cp=2, dp=2, pp=2, ep=2)
    assert list(nanotron.mesh.axes) == ["tp", "cp", "dp", "pp", "ep"]
    assert list(nanotron.kinds) == ["world", "tp", "cp", "dp", "pp", "ep", "mp", "dp_cp", "tp_ep"]
    assert nanotron.world_size == 32
    assert list(recipes.ezpz(16, tp=2, pp=2, cp=2).mesh.axes) == ["tp", "cp", "pp", "dp"]
    assert list(recipes.three_d(8, tp=2, pp=2).mesh.axes) == ["tp", "pp", "dp"]
    with pytest.raises(PlanError, match="local_world_size = 3 does not divide world_size = 8"):
        recipes.nanotron(8, local_world_size=3)


def test_torchtitan():
    """Data loading, shards, loss and experts of torchtitan's ParallelDims, written out for 16 ranks."""
    plan = recipes.torchtitan(16, dp_shard=2, cp=2, tp=2, pp=2, ep=4)
    assert plan.mesh.axes == {"tp": 2, "cp": 2, "dp_shard": 2, "dp_replicate": 1, "pp": 2}
    table = {
        "pp": (5, 13), "batch": (1, 5), "loss": (1, 3, 5, 7), "dp_replicate": (5,), "dp_shard": (1, 5),
        "fsdp": (1, 3, 5, 7), "cp": (5, 7), "tp": (4, 5), "ep": (4, 5, 6, 7), "efsdp": (1, 5), "etp": (5,),
    }  # fmt: skip
    assert {name: local.ranks for name, local in plan.of(5).items()} == table
    with pytest.raises(PlanError, match="etp is 4 with tp 2"):
        recipes.torchtitan(16, tp=2, etp=4)
    with pytest.raises(PlanError, match="etp x ep = 3 does not divide dp_shard x cp x tp = 16"):
        recipes.torchtitan(16, ep=3)


def test_axes_recipe():
    """A bare mesh gets a kind for each axis, unions, the ends of pp, and its views' own axes."""
    mesh = recipes.megatron_mesh(16, tp=2, cp=2, pp=2, ep=4, etp=1)
    plan = recipes.axes(mesh)
    assert {"tp", "cp", "dp", "pp", "dp_cp", "embd", "ep", "edp"} <= set(plan.kinds)
    with pytest.raises(UnknownAxis):
        plan.mesh.groups("xp")


def test_memory_of_a_very_large_plan():
    """One rank's complete plan in a world of 131,072 ranks stays under 10 MiB: nothing lists the world."""
    tracemalloc.start()
    try:
        plan = recipes.megatron(world_size=131_072, tp=8, cp=2, pp=8, ep=8, etp=1)
        local = plan.of(70_000)
        members = sum(group.size for group in local.values())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert members > 1024
    assert peak < 10 * 2**20


def test_axes_keeps_names_that_a_view_took():
    """A view with an axis called dp_cp keeps it; the usual union of that name is left out."""
    mesh = Mesh(dp=2, cp=2).with_view("other", dp_cp=4)
    assert list(recipes.axes(mesh).kinds) == ["dp", "cp", "dp_cp"]


def test_accelerate_keeps_one_axis_for_one_rank():
    """A world of one rank is a mesh of one replica."""
    assert recipes.accelerate(1).mesh.axes == {"dp_replicate": 1}


def test_deepspeed_groups():
    """AutoTP, ZeRO++ and MiCS on eight ranks: tp adjacent, partitions in blocks, replicas across the blocks."""
    plan = recipes.deepspeed(8, tp=2, hpz=4, mics=4)
    assert list(plan.kinds) == ["world", "dp", "tp", "hpz", "mics_shard", "mics_replicate"]
    assert plan.groups("tp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.groups("dp").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert plan.groups("hpz").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.groups("mics_replicate").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_deepspeed_experts():
    """AutoEP: experts over data-parallel ranks of one tp lane; with sequence parallelism, over adjacent ranks."""
    lanes = recipes.deepspeed(8, tp=2, ep=2)
    assert sorted(lanes.groups("ep").tolist()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(lanes.groups("edp").tolist()) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    adjacent = recipes.deepspeed(8, sp=2, ep=4)
    assert adjacent.groups("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert adjacent.groups("sp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("sizes", [{"tp": 2, "sp": 2}, {"hpz": 3}, {"mics": 16}, {"tp": 2, "ep": 8}])
def test_deepspeed_refuses(sizes):
    """Two inner axes at once, and partitions that do not divide the world."""
    with pytest.raises(PlanError):
        recipes.deepspeed(8, **sizes)
