"""Functions that a program puts in place of torch's, or of the parallel state's: called, or refused."""

import pytest
import torch.distributed as dist

from rankmesh.dialects.megatron import ParallelState
from rankmesh.dialects.megatron.refusals import Refused


def test_replaced_functions_of_the_state(begin, monkeypatch):
    """Rank 3 of 8: what makes groups is refused and leaves nothing; what chooses ranks is called."""
    begin(3, 8)
    ps, torchs = ParallelState("replaced"), "torch.distributed.new_group"
    names = {"RankGenerator": ps, "create_group": ps, "get_nccl_options": ps, torchs: dist}
    for name, owner in names.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name.rpartition(".")[2], dict)
            with pytest.raises(Refused) as caught:
                ps.initialize_model_parallel()
        assert caught.value.replaced == name
    assert not ps.is_initialized()
    assert ps._GLOBAL_MEMORY_BUFFER is None
    ps.default_embedding_ranks = lambda pp_ranks, split=None: pp_ranks[:1]
    ps.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert ps._EMBEDDING_GLOBAL_RANKS == [3]
    assert ps.is_rank_in_embedding_group()
    ps.destroy_model_parallel()
