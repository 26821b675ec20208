"""Transfers of tensors that live on GPUs, through NCCL."""

import pytest
import torch
import torch.distributed as dist
from tests import limits
from tests.transfer import live

import rankmesh as rm
from rankmesh.errors import TransferError
from rankmesh.transfer import Transfer


def _moves():
    source = live.model(rm.Mesh(tp=2, dp=2, pp=2), stages=2)
    return Transfer(source, live.model(rm.Mesh(tp=4)))


def _world(me, bound):
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl",
        rank=me.rank,
        world_size=me.size,
        store=dist.PrefixStore("world", me.store),
        device_id=device if bound else None,
    )


def _run(me, bound):
    _world(me, bound)
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


# Cycles for which a GPU is kept busy: 12 s or more on each that there is.
_BUSY = 12 * 2_000_000_000


def _busy(me):
    _world(me, bound=False)
    moves = Transfer(*({"w": rm.Sharding(rm.Mesh(dp=1, offset=offset), None, (8,))} for offset in (0, 1)))
    tensors, into = ({"w": torch.ones(8, device="cuda")} if me.rank == rank else {} for rank in (0, 1))
    moves.run(tensors, into)  # all have connected
    if me.rank == 0:
        torch.cuda._sleep(_BUSY)
    result = me.error(TransferError, moves.run, tensors, into, timeout=2.0)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return result


def test_the_timeout_holds_while_a_gpu_is_busy(ranks):
    """2 ranks, of which the GPU of the one that sends is busy for 12 s: both give up at the timeout, and say who."""
    for result in ranks(2, _busy, world=None, limit=120.0, timeout=60.0):
        assert result["kind"] == "TransferError"
        assert 2.0 <= result["seconds"] < limits.AT_ONCE
