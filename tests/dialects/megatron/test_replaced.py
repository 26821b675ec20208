"""Functions that a program puts in place of torch's, or of the parallel state's: called, or refused."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankmesh.backend.default import is_torch_function
from rankmesh.dialects.megatron import ParallelState
from rankmesh.dialects.megatron.refusals import Refused


def _replaced(me):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    ps, found = ParallelState("replaced"), []
    for name in ("RankGenerator", "create_group", "get_nccl_options"):
        local = getattr(ps, name)
        setattr(ps, name, dict)
        found.append(me.error(Refused, ps.initialize_model_parallel)["replaced"])
        setattr(ps, name, local)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", dict)
        found.append(me.error(Refused, ps.initialize_model_parallel)["replaced"])
    found += [ps.is_initialized(), ps._GLOBAL_MEMORY_BUFFER]
    ps.default_embedding_ranks = lambda pp_ranks, split=None: pp_ranks[:1]
    ps.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    return [*found, ps._EMBEDDING_GLOBAL_RANKS, ps.is_rank_in_embedding_group()]


def test_replaced_functions_of_the_state(ranks):
    """Rank 3 of 8: what makes groups is refused and leaves nothing; what chooses ranks is called."""
    assert ranks(1, _replaced, world=None) == [
        ["RankGenerator", "create_group", "get_nccl_options", "torch.distributed.new_group", False, None, [3], True]
    ]


@pytest.mark.parametrize("name", ["new_group", "new_subgroups_by_enumeration"])
def test_torchs_own_functions_are_known(monkeypatch, name):
    """A function that is assigned to torch.distributed is not torch's own, and is again when it is put back."""
    assert is_torch_function(name)
    with monkeypatch.context() as patch:
        patch.setattr(dist, name, lambda *_, **__: None)
        assert not is_torch_function(name)
    assert is_torch_function(name)
