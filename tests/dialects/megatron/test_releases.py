"""Following a release, as install() does; ``tests/peers`` compares with the releases themselves."""

import inspect

import pytest
import torch.distributed as dist
from tests.dialects.dry import members
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.dialects.megatron import hyper_comm_grid, parallel_state, process_groups_config, releases


def _in_pieces(me):
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    releases.follow(parallel_state, (0, 20))
    ps, collections = parallel_state, process_groups_config
    ps.initialize_model_parallel(2, gtp_remat_size=2)
    grid = hyper_comm_grid.HyperCommGrid([2], ["tp"])
    found = {
        "pieces": members(collections.resolve_gtp_remat_group(None, is_expert=False)),
        "of experts": members(collections.resolve_gtp_remat_group(None, is_expert=True)),
        "its own": collections.resolve_gtp_remat_group(collections.ProcessGroupCollection(gtp_remat=None), False),
        "part": members(ps.get_data_parallel_group(True, True, True)),
        "replicas": members(ps.get_data_parallel_group(True, False)),
        "experts": members(ps.get_expert_data_parallel_group(partial_expert_data_parallel=True)),
        "six": ps.get_all_ranks(),
        "on the CPU": [ps._DATA_PARALLEL_GROUP_GLOO, ps._EXPERT_DATA_PARALLEL_GROUP_GLOO],
        "outside": [grid.create_pg("tp"), grid.get_pg("tp")],
    }  # fmt: skip
    ps.destroy_model_parallel()
    releases.follow(parallel_state, None)
    return {**found, "again": list(inspect.signature(ps.get_data_parallel_rank).parameters)[1]}


def test_weights_in_pieces(ranks):
    """Rank 7 of 8 as of 0.20: groups, flags in its order, six places, no CPU groups, None where it gives None."""
    (found,) = ranks(1, _in_pieces, world=None)
    assert found.pop("again") == "partial_data_parallel"
    assert found == {
        "pieces": [5, 7],
        "of experts": [7],
        "its own": None,
        "part": [1, 3, 5, 7],
        "replicas": [3, 7],
        "experts": [1, 3, 5, 7],
        "six": "1_1_3_0_0_0",
        "on the CPU": [None, None],
        "outside": [None, None],
    }


@pytest.mark.parametrize("release", [*releases.KNOWN, (0, 21), (0, 12)])
def test_every_release_can_be_followed_and_left(release):
    """The nearest release stands for one that is not known; afterwards the drop-ins are their own again."""
    before = set(vars(parallel_state))
    releases.follow(parallel_state, release)
    assert before <= set(vars(parallel_state))
    releases.follow(parallel_state, None)
    assert before <= set(vars(parallel_state))
    assert parallel_state.is_unitialized.__module__ == parallel_state.__name__


def _refused(name, value, when):
    """What a write raised."""
    try:
        setattr(parallel_state, name, value)
    except Exception as error:  # noqa: BLE001  - none may be raised
        return [f"{when}, {name} = {value!r}: {error!r}"]
    return []


def _assigned(me):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    wrong = []
    for release in (None, *releases.KNOWN):
        releases.follow(parallel_state, release)
        for initialised in (False, True):
            if initialised:
                parallel_state.initialize_model_parallel(2, pipeline_model_parallel_size=2)
            for name in [name for name in vars(parallel_state) if name[0] == "_" and name.isupper()]:
                before = getattr(parallel_state, name)
                for value in (dist.group.WORLD, None, object(), [9, 8], 7, before):
                    wrong += _refused(name, value, f"as of {release}")
            if initialised:
                parallel_state.destroy_model_parallel()
    releases.follow(parallel_state, None)
    return wrong


def test_a_write_to_any_global_never_raises(ranks):
    """Rank 3 of 8, every release: groups, None, lists and other objects are taken, initialised or not."""
    assert ranks(1, _assigned, world=None) == [[]]


def _as_a_bridge_does(me):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    releases.follow(parallel_state, (0, 19))
    ps, world = parallel_state, dist.group.WORLD
    for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP",
                 "_EXPERT_DATA_PARALLEL_GROUP"):  # fmt: skip
        setattr(ps, name, world)
    found = [ps.get_tensor_model_parallel_rank(), ps.get_data_parallel_group(with_gtp_remat=False) is world]
    found.append(me.error(AssertionError, ps.get_data_parallel_rank)["kind"])  # its group is another global's
    ps._DATA_PARALLEL_GROUP_WITH_GTP_REMAT = world
    found.append(ps.get_data_parallel_rank())
    return found


def test_groups_that_are_assigned_without_initialisation(ranks):
    """As of 0.19: a group is written to some globals; getters of these answer, those of others raise when asked."""
    assert ranks(1, _as_a_bridge_does, world=None) == [[3, True, "NotInitialized", 3]]
