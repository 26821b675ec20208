"""Transfers of tensors that live on GPUs, through NCCL."""

import pytest
import torch
import torch.distributed as dist
from tests.transfer import live

import rankmesh as rm
from rankmesh.transfer import Transfer


def _moves():
    source = live.model(rm.Mesh(tp=2, dp=2, pp=2), stages=2)
    return Transfer(source, live.model(rm.Mesh(tp=4)))


def _run(me, bound):
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl",
        rank=me.rank,
        world_size=me.size,
        store=dist.PrefixStore("world", me.store),
        device_id=device if bound else None,
    )
    moves = _moves()
    tensors = {name: tensor.cuda() for name, tensor in live.shards(moves.source, me.rank).items()}
    into = moves.allocate(me.rank, device="cuda")
    result = moves.run(tensors, into, budget=1 << 18)
    torch.cuda.synchronize()
    bad = live.wrong({name: tensor.cpu() for name, tensor in into.items()}, moves.target, me.rank)
    on = {str(tensor.device.type) for tensor in into.values()}
    dist.barrier()
    dist.destroy_process_group()
    return bad, into.complete, sorted(on), result.memory


@pytest.mark.parametrize("bound", [False, True])
def test_eight_ranks_to_four(ranks, bound):
    """8 ranks: TP2·PP2·DP2 to TP4 on GPUs; every element arrives, within the budget."""
    for rank, (bad, complete, on, memory) in enumerate(ranks(8, _run, bound, world=None, limit=90.0, timeout=60.0)):
        assert bad == []
        assert complete
        assert on == (["cuda"] if rank < 4 else [])
        assert memory <= 1 << 18
