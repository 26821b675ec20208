"""What only a GPU can show; every test is skipped, with the reason, where torch sees none."""

import time

import pytest
import torch
import torch.distributed as dist

import rankmesh as rm
from rankmesh.groups import torch_private

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="no GPU, or a torch without NCCL"
)


@pytest.fixture
def world():
    """A world of one rank on the first GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_one_rank_takes_no_device_memory(world):
    """1 rank: all of Megatron's groups, used, allocate nothing on the device."""
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with rm.connect(rm.recipes.megatron(1)) as groups:
        for group in groups.values():
            dist.all_reduce(one, group=group.pg)
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] == before


def test_nccl_options_are_in_effect(world):
    """What a group asks of NCCL is what its backend says it has."""
    wanted = rm.Options(nccl={"min_ctas": 2, "max_ctas": 4}, high_priority=True)
    default = torch_private.default_group()
    making = torch_private.Making(torch_private.GlooDevices(), default.store, time.monotonic() + 60)
    pg = torch_private.create(
        making,
        ranks=[0],
        rank=0,
        name="options",
        desc="options",
        backend="nccl",
        timeout=default.timeout,
        lazy=False,
        options=torch_private.nccl_options(wanted, "nccl"),
    )
    options = pg._get_backend(torch.device("cuda")).options
    assert (options.config.min_ctas, options.config.max_ctas, options.is_high_priority_stream) == (2, 4, True)
    torch_private.destroy(pg)
