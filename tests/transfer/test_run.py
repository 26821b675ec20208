"""Transfers live: on gloo ranks and on simulated ones, every element arrives where the plan says."""

import torch.distributed as dist
from hypothesis import given, settings
from tests.transfer import live
from tests.transfer.strategies import pairs

from rankmesh import sim
from rankmesh.transfer import Transfer


def _moved(moves, rank, budget=1 << 20, **how):
    into = moves.allocate(rank)
    told = moves.run(live.shards(moves.source, rank), into, budget, **how)
    return told, into


@settings(max_examples=40)
@given(pairs(least=0))
def test_random_pairs_under_the_simulator(both):
    """Up to 18 simulated ranks: every pair of layouts, in messages of 64 bytes, arrives whole."""
    moves = Transfer(*both)

    def moved():
        rank = dist.get_rank()
        told, into = _moved(moves, rank, budget=40 * 64)
        return live.wrong(into, moves.target, rank), into.complete, told.memory

    for bad, complete, memory in sim.run(moved, max(2, moves.world_size)):
        assert (bad, complete) == ([], True)
        assert memory <= 40 * 64


def test_sixteen_ranks_to_eight(ranks):
    """16 ranks, gloo: TP4·PP2·DP2 to TP2·DP4, twice without planning again; a small budget holds."""
    for rank, (bad, memory, planned, sent, leftover) in enumerate(ranks(16, _refit)):
        assert bad == []
        assert memory <= 1 << 16
        assert planned == 1
        assert sent == live.refit().bytes_out(rank)
        assert leftover <= 1


def _refit(me):
    from rankmesh.transfer.live import run

    moves = live.refit()
    run.itinerary_of.cache_clear()
    for _ in range(2):
        told, into = _moved(moves, me.rank, budget=1 << 16)
    me.meet("all are through")
    keys = me.store.num_keys() if me.rank == 0 else 0
    bad = live.wrong(into, moves.target, me.rank)
    left = sum(me.store.check([f"world/rankmesh/job/transfer/{dist.group.WORLD.group_name}/{g}/end"]) for g in range(2))
    del keys
    return bad, told.memory, run.itinerary_of.cache_info().misses, told.bytes_out, left
