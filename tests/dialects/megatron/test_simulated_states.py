"""Parallel states of simulated ranks: whatever one rank makes, sets or destroys, the others have their own."""

import random

import pytest
import torch.distributed as dist

from rankmesh import sim
from rankmesh.dialects.megatron import ParallelState, parallel_state

SIZE = 8


def _rounds(seed, actor):
    """Initialised and set on every rank, destroyed by one after the other; what differs from a process of its own."""
    draw, wrong, rank = random.Random(seed), [], dist.get_rank()  # noqa: S311
    for step in range(3):
        tp = draw.choice((1, 2, 4))
        parallel_state.initialize_model_parallel(tp)
        actor.initialize_model_parallel(2)
        dist.barrier()
        parallel_state.set_tensor_model_parallel_rank(100 + rank)
        for index, leaving in enumerate(order := draw.sample(range(SIZE), SIZE)):
            dist.barrier()
            if leaving == rank:
                parallel_state.destroy_model_parallel()
                actor.destroy_model_parallel()
            dist.barrier()
            there = order.index(rank) > index
            expected = [there, there, 100 + rank, SIZE // tp, rank % 2] if there else [False, False]
            found = [parallel_state.is_initialized(), actor.is_initialized()]
            if there:
                found += [
                    parallel_state.get_tensor_model_parallel_rank(),
                    parallel_state.get_data_parallel_world_size(),
                    actor.get_tensor_model_parallel_rank(),
                ]
            wrong += [(step, leaving, expected, found)] if found != expected else []
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_destroy_in_any_order(seed):
    """8 simulated ranks: the default state, and one that was made before them and is named as theirs."""
    actor = ParallelState("actor")
    assert sim.run(lambda: _rounds(seed, actor), SIZE, modules=[actor]) == [[]] * SIZE
