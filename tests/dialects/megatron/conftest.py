"""Dry worlds in the process of a test, which plays one rank, and the default parallel state in them."""

import pytest
import torch.distributed as dist
from tests.dialects import dry

from rankmesh.backend.meshes import forget_meshes
from rankmesh.dialects.megatron import parallel_state, releases


@pytest.fixture
def begin():
    """Begin a dry world: ``begin(rank, size)``. It ends with the test, and the default state is as at first."""
    yield dry.begin
    releases.follow(parallel_state, None)
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()


@pytest.fixture
def start(begin):
    """Begin a dry world, and initialise the default state in it; what it returns is that state."""

    def started(rank, size, **arguments):
        begin(rank, size)
        parallel_state.initialize_model_parallel(**arguments)
        return parallel_state

    return started
