import pytest
from tests.dialects import dry

import rankmesh as rm
from rankmesh.dialects import deepspeed
from rankmesh.dialects.deepspeed import Mpu
from rankmesh.errors import PlanError


def _given(me):
    with rm.connect(deepspeed.plan(8, tp=4, pp=2)) as groups:
        mpu = Mpu(groups)
        mpu.close()  # not its own to destroy
        found = [mpu.get_global_rank() == me.rank, mpu.get_model_parallel_world_size(), mpu.groups is groups]
    with rm.connect(rm.recipes.three_d(8, tp=2)) as groups:
        return [*found, list(me.error(PlanError, Mpu, groups)["missing"])]


def test_groups_that_someone_else_owns(ranks):
    """8 ranks: an object over given groups leaves them; groups that DeepSpeed asks for must be among them."""
    assert ranks(8, _given) == [[True, 8, True, ["sp", "sp_dp", "mp"]]] * 8


def test_no_initialize_sequence_parallel():
    """DeepSpeed takes an object with this method for one that knows sequences alone, and asks it nothing else."""
    assert not hasattr(Mpu, "initialize_sequence_parallel")


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
