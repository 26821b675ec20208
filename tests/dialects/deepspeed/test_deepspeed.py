import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects import dry, leaks

import rankmesh as rm
from rankmesh.backend.registries import registries
from rankmesh.dialects import deepspeed
from rankmesh.dialects.deepspeed import Mpu
from rankmesh.errors import NotInitialized, PlanError

# Method family, and the axes that vary inside its groups.
FAMILIES = {
    "tensor_model_parallel": ("tp",),
    "slice_parallel": ("tp",),
    "sequence_parallel": ("sp",),
    "data_parallel": ("dp",),
    "sequence_data_parallel": ("sp", "dp"),
    "pipeline_model_parallel": ("pp",),
    "pipe_parallel": ("pp",),
    "model_parallel": ("tp", "pp"),
}
# Slowest first, as DeepSpeed's own grid: pipe, data, (sequence,) model.
ORDER = ("pp", "dp", "sp", "tp")

PROTOCOL = [f"get_{family}_{what}" for family in FAMILIES for what in ("rank", "world_size", "group")]
PROTOCOL += ["get_tensor_model_parallel_src_rank", "get_data_parallel_group_ranks", "get_global_rank"]


def enumerated(sizes):
    """Every group of each family, from a count through (pp, dp, sp, tp)."""
    groups = {family: {} for family in FAMILIES}
    for rank, coordinate in enumerate(itertools.product(*(range(sizes[axis]) for axis in ORDER))):
        for family, varying in FAMILIES.items():
            fixed = tuple(at for axis, at in zip(ORDER, coordinate, strict=True) if axis not in varying)
            groups[family].setdefault(fixed, []).append(rank)
    return {family: list(kind.values()) for family, kind in groups.items()}


def _seen(mpu):
    get = {name: getattr(mpu, name) for name in PROTOCOL}
    seen = {
        family: [
            dry.members(get[f"get_{family}_group"]()),
            get[f"get_{family}_rank"](),
            get[f"get_{family}_world_size"](),
        ]
        for family in FAMILIES
    }
    return {**seen, "others": [get[name]() for name in PROTOCOL[-3:]]}


def _check(seen, rank, sizes):
    local = {family: dry.row_of(rank, kind) for family, kind in enumerated(sizes).items()}
    for family, row in local.items():
        assert seen[family] == [row, row.index(rank), len(row)], family
    assert seen["others"] == [local["tensor_model_parallel"][0], local["data_parallel"], rank]


def _use(mpu):
    for family in FAMILIES:
        total = torch.ones(1)
        pg = getattr(mpu, f"get_{family}_group")()
        dist.all_reduce(total, group=pg)
        assert total.item() == dist.get_world_size(pg)


def _cycle():
    with Mpu.connect(tp=2, pp=2) as mpu:
        _use(mpu)


def _live(me):
    before = registries()
    with Mpu.connect(tp=2, sp=2, pp=2) as mpu, Mpu.connect(tp=2) as other:
        _use(mpu)
        _use(other)
        seen = [_seen(mpu), _seen(other)]
    gone = me.error(NotInitialized, mpu.get_data_parallel_group)["message"]
    with rm.connect(deepspeed.plan(8, tp=4, pp=2)) as groups:
        given_groups = Mpu(groups)
        given_groups.close()  # not its own to destroy
        _use(given_groups)
        seen.append(_seen(given_groups))
    with rm.connect(rm.recipes.three_d(8, tp=2)) as groups:
        partial = me.error(PlanError, Mpu, groups)["message"]
    back = registries() == before
    return [seen, gone, partial, back, leaks.left_by(me, _cycle)]


def test_eight_ranks(ranks):
    """8 ranks: two objects that own their groups and one over given groups, with collectives; nothing left."""
    for rank, (seen, gone, partial, back, left) in enumerate(ranks(8, _live)):
        _check(seen[0], rank, {"tp": 2, "sp": 2, "dp": 1, "pp": 2})
        _check(seen[1], rank, {"tp": 2, "sp": 1, "dp": 4, "pp": 1})
        _check(seen[2], rank, {"tp": 4, "sp": 1, "dp": 1, "pp": 2})
        assert "call Mpu.connect() first" in gone
        assert "the groups have no sp, sp_dp, mp" in partial
        assert (back, left) == (True, {})


def _properties(me):
    @dry.PROPERTIES
    @given(st.fixed_dictionaries(dict.fromkeys(ORDER, st.integers(1, 4))), st.data())
    def check(sizes, data):
        world = sizes["tp"] * sizes["sp"] * sizes["pp"] * sizes["dp"]
        rank = data.draw(st.integers(0, world - 1))
        with dry.world(rank, world), Mpu.connect(tp=sizes["tp"], sp=sizes["sp"], pp=sizes["pp"]) as mpu:
            _check(_seen(mpu), rank, sizes)

    check()


def test_any_rank_of_any_world(ranks):
    """Dry worlds of up to 256 ranks: every method of the protocol as a count through the axes gives it."""
    ranks(1, _properties, world=None)


def _refused(me):
    output = [me.error(AssertionError, Mpu.connect, tp=3)["message"]]
    dist.destroy_process_group()
    return [*output, me.error(NotInitialized, Mpu.connect)["message"]]


def test_refusals(ranks):
    """2 ranks: a size that does not divide the world, and no world."""
    for sizes, absent in ranks(2, _refused):
        assert "world_size is 2, but tp 3" in sizes
        assert "init_process_group" in absent


def test_no_initialize_sequence_parallel():
    """DeepSpeed takes an object with this method for one that knows sequences alone, and asks it nothing else."""
    assert not hasattr(Mpu, "initialize_sequence_parallel")
    assert all(callable(getattr(Mpu, name)) for name in PROTOCOL)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 4}, {"sp": 2}, {"sp": 8}, {}])
def test_the_recipe_says_the_same(sizes):
    """What the configuration's recipe and the mpu's plan both name are the same groups."""
    ours, recipe = deepspeed.plan(8, **sizes), rm.recipes.deepspeed(8, **sizes)
    shared = ours.kinds.keys() & recipe.kinds.keys()
    assert shared == {"dp", *(sizes or {"tp"})}
    for name in shared:
        assert ours.groups(name).tolist() == recipe.groups(name).tolist()


def _grid(me):
    with Mpu.connect(tp=2, pp=2) as mpu:
        topology = mpu.topology()
        place = topology.get_coord(me.rank)
        return [
            [mpu.pipe_parallel_size, mpu.data_parallel_size, mpu.model_parallel_size, mpu.slice_parallel_size],
            [mpu.stage_id, mpu.get_stage_id()] == [place.pipe] * 2,
            [mpu.data_parallel_id, mpu.get_data_parallel_id()] == [place.data] * 2,
            [mpu.is_first_stage, mpu.is_last_stage] == [place.pipe == 0, place.pipe == 1],
            [mpu.pp_group, mpu.dp_group, mpu.slice_group]
            == [dry.members(group) for group in (mpu.pp_proc_group, mpu.dp_proc_group, mpu.slice_proc_group)],
            mpu.stage_to_global(place.pipe) == me.rank,
            mpu.stage_to_global(1, data=0, model=0),
            mpu.p2p_groups[:2],
        ]


def test_the_mpu_is_a_grid_of_pipelines(ranks):
    """8 ranks: what DeepSpeed's PipelineModule and its engine ask of their grid."""
    assert ranks(8, _grid) == [[[2, 2, 2, 2], True, True, True, True, True, 4, [[0, 4], [1, 5]]]] * 8


def test_a_topology_has_three_axes():
    """Sequences are none of them: such a mesh is refused."""
    with pytest.raises(PlanError, match="whose axes are pp, dp and tp"):
        deepspeed.Topology(rm.Mesh(tp=2, sp=2, dp=2, pp=1))
    assert deepspeed.Topology(rm.Mesh(tp=2, sp=1, dp=2, pp=2)).get_rank_repr(5) == "model_01"
