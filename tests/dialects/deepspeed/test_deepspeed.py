import pytest
from tests.dialects import dry

import rankmesh as rm
from rankmesh.dialects import deepspeed
from rankmesh.dialects.deepspeed import Mpu
from rankmesh.errors import PlanError


def test_groups_that_someone_else_owns():
    """Rank 3 of 8: an object over given groups leaves them; groups that DeepSpeed asks for must be among them."""
    with dry.world(3, 8):
        with rm.connect(deepspeed.plan(8, tp=4, pp=2)) as groups:
            mpu = Mpu(groups)
            mpu.close()  # not its own to destroy
            assert (mpu.get_global_rank(), mpu.get_model_parallel_world_size()) == (3, 8)
            assert mpu.groups is groups
        with rm.connect(rm.recipes.three_d(8, tp=2)) as groups, pytest.raises(PlanError) as caught:
            Mpu(groups)
    assert list(caught.value.missing) == ["sp", "sp_dp", "mp"]


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


def test_a_topology_has_three_axes():
    """Sequences are none of them: such a mesh is refused."""
    with pytest.raises(PlanError, match="whose axes are pp, dp and tp"):
        deepspeed.Topology(rm.Mesh(tp=2, sp=2, dp=2, pp=1))
