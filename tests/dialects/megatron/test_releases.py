"""Following a release, as install() does; ``tests/peers`` compares with the releases themselves."""

import inspect

import pytest
import torch.distributed as dist
from tests.dialects.dry import members

from rankmesh.dialects.megatron import hyper_comm_grid, parallel_state, process_groups_config, releases
from rankmesh.dialects.megatron.refusals import NotInitialized


def test_weights_in_pieces(begin):
    """Rank 7 of 8 as of 0.20: groups, flags in its order, six places, no CPU groups, None where it gives None."""
    begin(7, 8)
    releases.follow(parallel_state, (0, 20))
    ps, collections = parallel_state, process_groups_config
    ps.initialize_model_parallel(2, gtp_remat_size=2)
    assert members(collections.resolve_gtp_remat_group(None, is_expert=False)) == [5, 7]
    assert members(collections.resolve_gtp_remat_group(None, is_expert=True)) == [7]
    assert collections.resolve_gtp_remat_group(collections.ProcessGroupCollection(gtp_remat=None), False) is None
    assert members(ps.get_data_parallel_group(True, True, True)) == [1, 3, 5, 7]
    assert members(ps.get_data_parallel_group(True, False)) == [3, 7]
    assert members(ps.get_expert_data_parallel_group(partial_expert_data_parallel=True)) == [1, 3, 5, 7]
    assert ps.get_all_ranks() == "1_1_3_0_0_0"
    assert ps._DATA_PARALLEL_GROUP_GLOO is ps._EXPERT_DATA_PARALLEL_GROUP_GLOO is None
    grid = hyper_comm_grid.HyperCommGrid([2], ["tp"])
    assert grid.create_pg("tp") is grid.get_pg("tp") is None
    releases.follow(parallel_state, None)
    assert list(inspect.signature(ps.get_data_parallel_rank).parameters)[1] == "partial_data_parallel"


def test_a_write_to_any_global_never_raises(begin):
    """Rank 3 of 8, every release, and the nearest for others: groups, None, lists, objects are taken at any time."""
    begin(3, 8)
    names = set(vars(parallel_state))
    for release in (None, *releases.KNOWN, (0, 21), (0, 12), None):
        releases.follow(parallel_state, release)
        assert names <= set(vars(parallel_state))
        for initialised in (False, True):
            if initialised:
                parallel_state.initialize_model_parallel(2, pipeline_model_parallel_size=2)
            for name in [name for name in vars(parallel_state) if name[0] == "_" and name.isupper()]:
                before = getattr(parallel_state, name)
                for value in (dist.group.WORLD, None, object(), [9, 8], 7, before):
                    setattr(parallel_state, name, value)
            if initialised:
                parallel_state.destroy_model_parallel()
    assert parallel_state.is_unitialized.__module__ == parallel_state.__name__


def test_groups_that_are_assigned_without_initialisation(begin):
    """As of 0.19: a group is written to some globals; getters of these answer, those of others raise when asked."""
    begin(3, 8)
    releases.follow(parallel_state, (0, 19))
    ps, world = parallel_state, dist.group.WORLD
    for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP",
                 "_EXPERT_DATA_PARALLEL_GROUP"):  # fmt: skip
        setattr(ps, name, world)
    assert ps.get_tensor_model_parallel_rank() == 3
    assert ps.get_data_parallel_group(with_gtp_remat=False) is world
    with pytest.raises(NotInitialized):  # its group is another global's
        ps.get_data_parallel_rank()
    ps._DATA_PARALLEL_GROUP_WITH_GTP_REMAT = world
    assert ps.get_data_parallel_rank() == 3
