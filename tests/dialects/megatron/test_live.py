"""The Megatron dialect on real ranks: groups that work, cost nothing twice, and are gone when they are destroyed."""

import os
import time
from datetime import timedelta
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rankmesh as rm
from rankmesh.backend.registries import registries
from rankmesh.dialects.megatron import ParallelState, parallel_state
from rankmesh.dialects.megatron.hyper_comm_grid import HyperCommGrid
from rankmesh.errors import LayoutError


def total(group):
    """The sum of the global ranks of a group's members, by a collective over it."""
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value, group=group)
    return int(value)


def right(group):
    """Whether a collective over a group reaches its members."""
    return total(group) == sum(dist.get_process_group_ranks(group))


def _trained(me):
    ps, before, result = parallel_state, registries(), []
    for arguments in (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
        {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2], "hybrid_context_parallel": True},
        {"tensor_model_parallel_size": 2, "num_distributed_optimizer_instances": 2, "create_all_gather_group": True},
        {"gtp_remat_size": 2, "expert_gtp_remat_size": 4},
    ):
        ps.initialize_model_parallel(**arguments)
        groups = [group for group in ps._global_process_group_list if group is not None]
        works, initial = all(right(group) for group in groups), ps.rankmesh_state.initial
        ps.set_data_parallel_rank(5)
        ps.set_virtual_pipeline_model_parallel_world_size(2)
        ps.destroy_model_parallel()
        ps.destroy_model_parallel()
        result.append([works, {name: getattr(ps, name) for name in initial} == initial, ps.is_initialized()])
        me.meet(f"destroyed {len(result)}")
    return [result, registries() == before]


def test_every_group_of_every_layout_works_and_goes(ranks):
    """8 ranks: a collective over each group of four layouts; destroyed twice, no global and no entry is left."""
    assert ranks(8, _trained) == [[[[True, True, False]] * 4, True]] * 8


def _counterparts(me):
    ps = parallel_state
    ps.initialize_model_parallel(tensor_model_parallel_size=2, num_distributed_optimizer_instances=2)
    pairs = [
        (ps.get_data_parallel_group(), ps.get_data_parallel_group_gloo()),
        (
            ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
            ps.get_data_parallel_group_gloo(with_context_parallel=True, partial_data_parallel=True),
        ),
        (
            ps.get_expert_data_parallel_group(partial_expert_data_parallel=True),
            ps.get_expert_data_parallel_group_gloo(partial_expert_data_parallel=True),
        ),
    ]
    assert all(group is counterpart for group, counterpart in pairs)
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    return me.error(AssertionError, ps.get_data_parallel_group_gloo)["kind"]


def test_gloo_counterparts_of_gloo_groups_are_these_groups(ranks):
    """4 ranks: a gloo group is its own CPU counterpart; without gloo groups at initialisation there is none."""
    assert ranks(4, _counterparts) == ["NotInitialized"] * 4


def _mixed(me):
    me.world("cpu:gloo,cuda:gloo")
    ps = parallel_state
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    group, counterpart = ps.get_data_parallel_group(), ps.get_data_parallel_group_gloo()
    return [dist.get_backend(counterpart), group is counterpart, right(group), right(counterpart)]


def test_gloo_counterparts_of_other_groups_are_separate_groups(ranks):
    """4 ranks in a world of another backend: the CPU counterpart is a gloo group beside the group."""
    assert ranks(4, _mixed, world=None) == [["gloo", False, True, True]] * 4


def _two_states(me):
    first, second = ParallelState("encoder"), ParallelState("decoder")
    if me.rank < 2:
        first.initialize_model_parallel(tensor_model_parallel_size=2, local_world_size=2)
    else:
        second.initialize_model_parallel(pipeline_model_parallel_size=2, rank_offset=2, local_world_size=4)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=3)
    mine = first if me.rank < 2 else second
    found = [right(mine.get_model_parallel_group()), right(parallel_state.get_tensor_model_parallel_group())]
    found += [mine.get_data_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()]
    mine.destroy_model_parallel()
    return [*found, right(parallel_state.get_tensor_model_parallel_group())]


def test_states_over_parts_of_the_world(ranks):
    """6 ranks: an encoder on two, a decoder on four, and a third state over all of them, at the same time."""
    assert ranks(6, _two_states) == [[True, True, 1, 3, True]] * 2 + [[True, True, 2, 3, True]] * 4


def _disagree(me):
    size = 2 if me.rank else 4
    started = time.perf_counter()
    error = me.error(rm.AgreementError, parallel_state.initialize_model_parallel, tensor_model_parallel_size=size)
    return [error["kind"], time.perf_counter() - started < 60, parallel_state.is_initialized()]


def test_ranks_that_differ_are_named(ranks):
    """4 ranks, one with another size: an error on each within seconds instead of a hang, and nothing is initialised."""
    assert ranks(4, _disagree) == [["AgreementError", True, False]] * 4


def _timeouts(me):
    ps = parallel_state
    ps.initialize_model_parallel(tensor_model_parallel_size=2, distributed_timeout_minutes=3)
    tp, dp, single = (
        ps.get_tensor_model_parallel_group(),
        ps.get_data_parallel_group(),
        ps.get_context_parallel_group(),
    )
    found = [seconds(tp)]
    ps.update_pg_timeout(timedelta(seconds=50), tp)
    found += [seconds(tp), seconds(dp)]
    ps.update_pg_timeout(timedelta(seconds=40))
    found += [seconds(tp), seconds(dp), seconds(dist.group.WORLD)]
    ps.update_pg_timeout(timedelta(seconds=30), single)
    return found


def seconds(group):
    """The timeout that a gloo group has."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_timeouts(ranks):
    """4 ranks: the timeout asked for, then another for one group, then another for all and the world."""
    assert ranks(4, _timeouts) == [[180.0, 50.0, 180.0, 40.0, 40.0, 40.0]] * 4


def _made_by_hand(me):
    ps = parallel_state
    ps.initialize_model_parallel(context_parallel_size=4)
    group = ps.create_group(ranks=[0, 1, 2, 3], group_desc="MINE")
    local, counterparts = ps.create_hierarchical_groups(me.rank, [0, 1, 2, 3], [2, 2], create_gloo_process_groups=True)
    hybrid = ps.create_hybrid_dp_cp_groups(me.rank, [0, 1, 2, 3], None)
    gather, experts = ps.create_all_gather_groups(for_expert_parallelism=True, timeout=timedelta(seconds=33))
    assert {group, local[1]} <= set(ps._global_process_group_list)
    assert list(hybrid) == [2]
    assert all(right(one) for one in (group, *local, *counterparts, *hybrid.values(), gather, experts))
    ends = [me.rank - me.rank % 2, me.rank - me.rank % 2 + 1], [me.rank % 2, me.rank % 2 + 2]
    assert tuple(dist.get_process_group_ranks(one) for one in local) == ends
    assert len(counterparts) == 2
    ps.destroy_model_parallel()


def test_groups_that_callers_make(ranks):
    """4 ranks: single, hierarchical, hybrid and gather groups by the functions that Megatron has for them."""
    ranks(4, _made_by_hand)


def _world_first(me):
    found = []
    for attempt in range(2):
        me.world("gloo", prefix=f"world {attempt}")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        found.append(right(parallel_state.get_tensor_model_parallel_group()))
        me.meet(f"used {attempt}")
        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()
        found.append([parallel_state.is_initialized(), parallel_state.get_data_parallel_rank()])
    return found


def test_a_world_that_goes_before_its_groups(ranks):
    """2 ranks, twice: the world is destroyed first, the state afterwards, and both can be made again."""
    assert ranks(2, _world_first, world=None) == [[True, [False, 0]] * 2] * 2


# -- grids ----------------------------------------------------------------------------------------------------------


def _grid(me):
    before, rank = registries(), me.rank
    grid, counterpart = (HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) for _ in range(2))
    for each in (grid, counterpart):
        each.register_view("expert", [1, 4, 2], ["etp", "ep", "dp"], shared_dims=["dp"])
    tp = grid.create_pg("tp", timeout=timedelta(seconds=9), group_desc="MINE")
    both = grid.create_pg(["cp", "dp"])
    ep = grid.create_pg("ep", view="expert")
    dp = grid.create_pg("dp", view="expert")
    second = counterpart.create_pg("tp", timeout=timedelta(seconds=9))
    assert all(right(group) for group in (tp, both, ep, dp, second))
    assert second is not tp
    assert grid.get_pg("tp") is tp
    assert grid.get_pg("dp") is dp
    assert [str(key) for key in grid._pgs] == ["tp", "dp-cp", "('expert', ('ep',))", "dp"]
    assert (seconds(tp), tp.group_desc) == (9.0, "MINE")
    assert dist.get_process_group_ranks(tp) == [rank - rank % 2, rank - rank % 2 + 1]
    assert dist.get_process_group_ranks(both) == [rank % 2 + 2 * step for step in range(4)]
    assert dist.get_process_group_ranks(ep) == [rank - rank % 4 + step for step in range(4)]
    assert dist.get_process_group_ranks(dp) == [rank % 4, rank % 4 + 4]
    me.error(KeyError, grid.create_pg, "tp")
    me.error(KeyError, grid.create_pg, "ep", view="expert")
    me.error(KeyError, grid.get_pg, "cp")
    grid.destroy()
    counterpart.destroy()
    me.meet("destroyed")
    assert right(grid.create_pg("tp"))
    grid.destroy()
    assert registries() == before


def test_a_grid_with_a_view(ranks):
    """8 ranks: groups of a grid and of a view, a second grid of the same shape, destroyed and made again."""
    ranks(8, _grid)


def _offset(me):
    low, high = HyperCommGrid([2], ["dp"]), HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=2)
    made = {name: grid.create_pg("dp") for name, grid in (("low", low), ("high", high))}
    inside = [low.is_current_rank_in_grid(), high.is_current_rank_in_grid()]
    local = made["low"] if inside[0] else made["high"]
    other = high if inside[0] else low
    return [inside, right(local), made["high"] is None, me.error(LookupError, other.get_pg, "dp")["kind"]]


def test_grids_side_by_side(ranks):
    """6 ranks, grids over two and four of them: a rank outside gets None, and an error when it asks for the group."""
    found = ranks(6, _offset)
    assert found == [[[True, False], True, True, "NotHere"]] * 2 + [[[False, True], True, False, "NotHere"]] * 4


def _wrong_grids(me):
    me.error(LayoutError, HyperCommGrid, [2, 2], ["tp", "tp"])
    me.error(RuntimeError, HyperCommGrid, [2, 4], ["tp", "dp"])
    me.error(LayoutError, HyperCommGrid, [1], ["tp"], rank_offset=-1)
    grid = HyperCommGrid([2, 2], ["tp", "pp"])
    for shape, names, shared in (
        ([2, 3], ["ep", "pp"], []),  # of other ranks
        ([2, 2], ["pp", "ep"], ["pp"]),  # not equal
        ([2, 2], ["ep", "pp"], ["tp"]),  # not in the view
        ([2, 2], ["ep", "pp"], ["pp", "pp"]),
    ):
        me.error(LayoutError, grid.register_view, "expert", shape, names, shared_dims=shared)
    me.error(LayoutError, grid.create_pg, "dp")
    me.error(KeyError, grid.create_pg, "tp", view="expert")
    os.environ["WORLD_SIZE"] = "16"
    planned = HyperCommGrid([2, 8], ["tp", "dp"])
    me.error(RuntimeError, planned.create_pg, "tp")
    return planned.get_rank_enum("tp")[7]


def test_wrong_grids(ranks):
    """4 ranks: names twice, too many ranks, views that do not fit, and WORLD_SIZE that is not the world's size."""
    assert ranks(4, _wrong_grids) == [[14, 15]] * 4


def test_a_replaced_torch_function_is_asked(monkeypatch):
    """No world: whoever replaces new_subgroups_by_enumeration gets Megatron's arguments, and gives the group."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    group = Mock(spec=dist.ProcessGroup)
    requested = Mock(return_value=(group, None))
    monkeypatch.setattr("torch.distributed.new_subgroups_by_enumeration", requested)
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], backend="nccl")
    assert grid.create_pg(["tp", "cp"], group_desc="MINE") is grid.get_pg(["cp", "tp"]) is group
    requested.assert_called_once_with([[0, 1, 2, 3], [4, 5, 6, 7]], backend="nccl", group_desc="MINE")
    assert list(grid._pgs) == ["cp-tp"]


def test_a_registered_view_is_a_copy(monkeypatch):
    """No world: numpy's integers are sizes; the view is kept by name, and later changes of the lists are not seen."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    shape, names = [np.int64(4), np.int64(2)], ["ep", "pp"]
    grid.register_view("expert", shape, names, shared_dims=["pp"])
    shape.append(3)
    names.append("more")
    view = grid._views["expert"]
    assert (view.name, view.shape, view.dim_names, view.shared_dims) == ("expert", [4, 2], ["ep", "pp"], ["pp"])
    assert grid.get_rank_enum("pp") == grid.get_rank_enum("pp", view="expert") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="'expert' of this grid is already registered"):
        grid.register_view("expert", [8], ["ep"])
    with pytest.raises(ValueError, match="shape must be positive ints"):
        grid.register_view("other", [8, 0], ["ep", "etp"])
    with pytest.raises(KeyError, match=r"\['ep'\] for view 'expert' hasn't been created"):
        grid.get_pg(["ep"], view="expert")


def test_destroy_takes_groups_that_others_made(monkeypatch):
    """Groups that a replaced torch function gave are destroyed by torch; what this rank is not in is left alone."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    destroyed = Mock()
    monkeypatch.setattr("torch.distributed.destroy_process_group", destroyed)
    group, grid = Mock(spec=dist.ProcessGroup), HyperCommGrid([2, 4], ["tp", "dp"])
    grid._pgs = {"tp": group, "dp": dist.GroupMember.NON_GROUP_MEMBER, "dp-tp": None}
    grid.destroy()
    destroyed.assert_called_once_with(group)
    assert grid._pgs == {}


def test_grids_enumerate_as_the_peer(monkeypatch):
    """Shapes, names and requests in every order: the lists of ranks are megatron-core's."""
    pytest.importorskip("einops")
    peer = pytest.importorskip("megatron.core.hyper_comm_grid")
    monkeypatch.setenv("WORLD_SIZE", "200")
    for shape, names in (([2, 3, 4, 5], ["tp", "cp", "pp", "dp"]), ([3, 1, 2], ["a", "b", "c"])):
        ours, theirs = HyperCommGrid(shape, names, 7), peer.HyperCommGrid(shape, names, 7)
        for first in names:
            assert ours._order_dims(first) == theirs._order_dims(first)
            for second in names:
                dims = list(dict.fromkeys([first, second]))
                assert ours._gen_rank_enum(dims) == theirs._gen_rank_enum(dims)
                assert ours.get_rank_enum(dims) == theirs.get_rank_enum(dims)
                assert ours._order_dims(dims) == theirs._order_dims(dims)
