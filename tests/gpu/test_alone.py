"""One rank on the first GPU."""

import torch
import torch.distributed as dist

import rankmesh as rm


def _megatron(me):
    """All of Megatron's groups in a world of one: what is free on the device before and after they are used."""
    torch.cuda.set_device(0)
    me.world("nccl")
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with rm.connect(rm.recipes.megatron(1)) as groups:
        for group in groups.values():
            dist.all_reduce(one, group=group.pg)
        torch.cuda.synchronize()
        return before, torch.cuda.mem_get_info()[0]


def test_one_rank_takes_no_device_memory(ranks):
    """1 rank: all of Megatron's groups, used, allocate nothing on the device."""
    ((before, after),) = ranks(1, _megatron, world=None)
    assert before == after
