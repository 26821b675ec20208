from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tests.dialects import dry

import rankmesh.dialects.ezpz as tp
from rankmesh.errors import AlreadyInitialized, NotInitialized

GLOBALS = {
    "tensor": ("_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
    "context": ("_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
    "pipeline": ("_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    "data": ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
}


@pytest.fixture(autouse=True)
def _none_left():
    yield
    tp.destroy_tensor_parallel()


def group_and_members(axis):
    """The group and the ranks that the getters give."""
    return getattr(tp, f"get_{axis}_parallel_group")(), getattr(tp, f"get_{axis}_parallel_ranks")()


def test_getters_give_what_was_assigned():
    """Groups in the globals of ezpz: together they are an initialised state; destroying it forgets them."""
    groups = {axis: object() for axis in GLOBALS}
    for axis, (group, ranks) in GLOBALS.items():
        assert not tp.tensor_parallel_is_initialized()
        setattr(tp, group, groups[axis])
        with pytest.raises(NotInitialized, match="not initialized"):
            getattr(tp, f"get_{axis}_parallel_ranks")()
        setattr(tp, ranks, [3, 4])
        assert group_and_members(axis) == (groups[axis], [3, 4])
    assert tp.tensor_parallel_is_initialized()
    assert tp.get_tensor_parallel_src_rank() == 3
    tp.destroy_tensor_parallel()
    assert not tp.tensor_parallel_is_initialized()
    assert [getattr(tp, name) for names in GLOBALS.values() for name in names] == [None] * 8
    with pytest.raises(NotInitialized, match="not initialized"):
        tp.get_context_parallel_group()


def test_a_world_that_a_test_plays_is_asked_for_its_groups(monkeypatch):
    """Rank 5 of 8 without a world: each group is asked of new_group, by every rank; the own ones are held."""
    requested = []

    def new_group(ranks, backend=None, timeout=None):
        requested.append((tuple(ranks), backend))
        return SimpleNamespace(ranks=ranks)

    played = {"is_initialized": lambda: True, "get_world_size": lambda _=None: 8, "get_rank": lambda _=None: 5}
    for name, function in {**played, "new_group": new_group}.items():
        monkeypatch.setattr(dist, name, function)
    tp.initialize_tensor_parallel(2, 2, data_parallel_backend="mine")
    assert len(requested) == len(set(requested)) == 4 + 8 + 4 + 4
    assert sorted(ranks for ranks, backend in requested if backend) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    for axis, ranks in {"tensor": [4, 5], "context": [5], "pipeline": [5, 7], "data": [1, 5]}.items():
        group, members = group_and_members(axis)
        assert group.ranks == members == ranks
    with pytest.raises(AlreadyInitialized, match="already initialized"):
        tp.initialize_tensor_parallel(2)


@pytest.mark.parametrize("rank", range(4))
def test_globals_are_the_groups_that_were_made(rank):
    """4 ranks: the globals give the live groups; one that is assigned replaces one until it is deleted."""
    pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    with dry.world(rank, 4):
        tp.initialize_tensor_parallel(2)
        for (group, ranks), expected in zip(GLOBALS.values(), (pair, [rank], [rank], across), strict=True):
            assert dry.members(getattr(tp, group)) == getattr(tp, ranks) == expected
        made = tp._TENSOR_PARALLEL_GROUP
        tp._TENSOR_PARALLEL_GROUP = "a stand-in"
        assert group_and_members("tensor") == ("a stand-in", pair)
        del tp._TENSOR_PARALLEL_GROUP
        assert tp.get_tensor_parallel_group() is made
        tp.destroy_tensor_parallel()


def _of_tensors():
    return [tp.get_tensor_parallel_world_size(), tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_src_rank()]


@pytest.mark.parametrize("rank", [0, 1])
def test_without_groups_a_model_has_one_part(rank):
    """2 ranks: size 1, rank 0 and this rank as source, 0 without a world."""
    with dry.world(rank, 2):
        assert _of_tensors() == [1, 0, rank]
    assert _of_tensors() == [1, 0, 0]
