"""Functions that a program puts in place of torch's, or of the parallel state's: they are called, or refused."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.dialects.megatron import ParallelState, parallel_state


class Reloadable(dist.ProcessGroup):
    """A process group that can be freed and made again, as engines beside a trainer want."""

    def __init__(self, group, ranks):
        super().__init__(group.rank(), group.size())
        self.group, self.ranks = group, ranks

    def rank(self):
        """The rank in it."""
        return self.group.rank()

    def size(self):
        """Its size."""
        return self.group.size()


def reloadable(local, calls):
    """A function in place of new_group, whose groups of several ranks can be reloaded."""

    def new_group(ranks=None, **options):
        calls.append((tuple(ranks), options["group_desc"]))
        group = local(ranks, **options)
        return group if len(ranks) == 1 or dist.get_rank() not in ranks else Reloadable(group, ranks)

    return new_group


def total(group):
    """The sum of the global ranks of its members, by a collective."""
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value, group=group)
    return int(value)


def _torchs_new_group(me):
    local, calls, ps = dist.new_group, [], parallel_state
    dist.new_group = reloadable(local, calls)
    ps.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    tp, dp_cp = ps.get_tensor_model_parallel_group(), ps.get_data_parallel_group(with_context_parallel=True)
    gather, _ = ps.create_all_gather_groups()
    found = {
        "calls": sorted(ranks for ranks, desc in calls if desc == "TP"),
        "kinds": len({desc for _, desc in calls}),
        "types": [type(tp).__name__, type(dp_cp).__name__, type(gather).__name__],
        "works": [total(tp.group), total(dp_cp.group)],
        "numbers": [ps.get_tensor_model_parallel_rank(), ps.get_data_parallel_world_size(with_context_parallel=True)],
        "listed": [any(one is group for one in ps._global_process_group_list) for group in (tp, dp_cp, gather)],
    }
    ps.destroy_model_parallel()
    found["destroyed"] = [ps.is_initialized(), total(tp.group)]
    dist.new_group, count = local, len(calls)
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    found["again"] = [type(ps.get_tensor_model_parallel_group()) is Reloadable, len(calls) - count]
    ps.destroy_model_parallel()
    return found


def test_a_replaced_new_group_makes_every_group(ranks):
    """4 ranks: each calls it for every group of every kind, as Megatron-Core; the groups work and stay its own."""
    for rank, found in enumerate(ranks(4, _torchs_new_group)):
        pair = rank - rank % 2
        assert found["calls"] == [[0, 1], [2, 3]]
        assert found["kinds"] >= 18
        assert found["types"] == ["Reloadable"] * 3
        assert found["works"] == [2 * pair + 1, 2 * (rank % 2) + 2]
        assert found["numbers"] == [rank % 2, 2]
        assert found["listed"] == [True] * 3
        assert found["destroyed"] == [False, 2 * pair + 1]
        assert found["again"] == [False, 0]


def _of_the_state(me):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    found, made, requested = {}, [], []

    def create_group(ranks=None, **options):
        made.append((ranks, options["group_desc"], options["pg_options"]))
        return dist.new_group(ranks)

    def get_nccl_options(pg_name, nccl_comm_cfgs):
        requested.append(pg_name)
        return f"options of {pg_name}" if pg_name in nccl_comm_cfgs else None

    ps = ParallelState("replaced")
    ps.create_group, ps.get_nccl_options = create_group, get_nccl_options
    ps.default_embedding_ranks = lambda pp_ranks, split=None: pp_ranks[:1]
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "distributed_timeout_minutes": 3}
    ps.initialize_model_parallel(**layout, high_priority_stream_groups=["dp_cp"])
    found["made"] = [options for _, desc, options in made if desc in ("DP_CP", "TP")]
    found["asked"] = sorted(set(requested))[:4]
    found["members"] = dist.get_process_group_ranks(ps.get_tensor_model_parallel_group())
    found["embedding"] = ps._EMBEDDING_GLOBAL_RANKS
    found["outside"] = ps.is_rank_in_embedding_group()
    ps.destroy_model_parallel()
    other = ParallelState("other")
    other.RankGenerator = dict
    me.error(RuntimeError, other.initialize_model_parallel)
    found["nothing"] = [other.is_initialized(), other._GLOBAL_MEMORY_BUFFER]
    return found


def test_replaced_functions_of_the_state(ranks):
    """Rank 3 of 8: create_group, get_nccl_options and default_embedding_ranks are called; RankGenerator is refused."""
    (found,) = ranks(1, _of_the_state, world=None)
    assert found["made"] == ["options of dp_cp"] * 4 + [None] * 4
    assert found["asked"] == ["cp", "dp", "dp_cp", "embd"]
    assert found["members"] == [2, 3]
    assert found["embedding"] == [3]
    assert found["outside"] is True
    assert found["nothing"] == [False, None]


@pytest.mark.parametrize("name", ["new_group", "new_subgroups_by_enumeration"])
def test_torchs_own_functions_are_known(monkeypatch, name):
    """A function that is assigned to torch.distributed is not torch's own, and is again when it is put back."""
    from rankmesh.backend.default import is_torch_function

    assert is_torch_function(name)
    with monkeypatch.context() as patch:
        patch.setattr(dist, name, lambda *_, **__: None)
        assert not is_torch_function(name)
    assert is_torch_function(name)
