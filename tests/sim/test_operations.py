from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.sim.operations import PARTS, on_a_rank, plain, rank_values

from rankmesh import sim


@pytest.mark.parametrize("part", PARTS)
def test_same_as_gloo(ranks, part):
    """4 ranks: every operation gives on simulated ranks what it gives on real gloo ranks."""
    assert plain(sim.run(PARTS[part], 4)) == ranks(4, on_a_rank, part)


def _beyond_gloo():
    total, scaled = rank_values(2, dtype=torch.float64), rank_values(2, dtype=torch.float64)
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    whole = rank_values(2)
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    listed = [torch.zeros(rank + 1, dtype=torch.int64) for rank in range(dist.get_world_size())]
    dist.all_gather(listed, rank_values(dist.get_rank() + 1))
    pieces = [torch.zeros(dist.get_rank() + 1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_to_all(pieces, [rank_values(rank + 1) for rank in range(dist.get_world_size())])
    return [tensor.tolist() for tensor in (total, scaled, whole)], [tensor.tolist() for tensor in (*listed, *pieces)]


def test_beyond_gloo():
    """3 ranks: averages, scaled sums, uneven gathers and lists of pieces, which gloo does not have, are right."""
    sums, moved = sim.run(_beyond_gloo, 3)[1]
    assert sums == [[101.0, 102.0], [151.5, 153.0], [101, 102]]
    assert moved == [[1], [101, 102], [201, 202, 203], [1, 2], [101, 102], [201, 202]]


def _low_precision(large):
    number = torch.tensor([1.0 if dist.get_rank() == large else 2.0**-9], dtype=torch.bfloat16)
    dist.all_reduce(number)
    return float(number)


def test_sums_are_made_in_order_and_in_their_own_dtype():
    """4 ranks: 1 + tiny + tiny + tiny loses each tiny in bfloat16; with the 1 last they first add up to something."""
    assert sim.run(_low_precision, 4, 0) == [1.0] * 4
    assert sim.run(_low_precision, 4, 3) == [1.0 + 2.0**-7] * 4


ORDER = []


def _isends():
    other = 1 - dist.get_rank()
    works = []
    for _ in range(3):
        works.append(dist.isend(torch.zeros(1), other))
        ORDER.append(dist.get_rank())
    for work in works:
        dist.recv(torch.zeros(1), other)
        work.wait()


def test_a_seed_lets_others_run_at_every_call():
    """2 ranks: in a random order ranks change at calls that do not wait, too; in the deterministic one they do not."""
    found = {}
    for order in ("deterministic", *range(8)):
        ORDER.clear()
        sim.run(_isends, 2, order=order)
        found[order] = tuple(ORDER)
    assert found.pop("deterministic") == (0, 0, 0, 1, 1, 1)
    assert len(set(found.values()) - {(0, 0, 0, 1, 1, 1), (1, 1, 1, 0, 0, 0)}) > 2


def _results_come_with_the_wait():
    number = torch.ones(1)
    work = dist.all_reduce(number, async_op=True)
    dist.barrier()
    before = float(number)
    work.wait()
    return before, float(number), work.is_success(), work.result()[0] is number


def test_results_come_with_the_wait():
    """2 ranks: a result is not there before the wait, even when all ranks have made the call."""
    assert sim.run(_results_come_with_the_wait, 2) == [(1.0, 2.0, True, True)] * 2


def _polled():
    number = torch.full((1,), float(dist.get_rank()))
    work = dist.isend(number, 1) if dist.get_rank() == 0 else dist.irecv(number, 0)
    looks = 0
    while not work.is_completed():
        looks += 1
    return float(number), looks > 0


def test_a_rank_that_looks_lets_others_run():
    """2 ranks: polling a work ends, as the other rank runs meanwhile."""
    assert [value for value, _ in sim.run(_polled, 2)] == [0.0, 0.0]


def _untouched():
    number = torch.ones(2, requires_grad=True)
    before = number._version
    with torch.no_grad():
        dist.all_reduce(number)
    return number._version - before


def test_autograd_sees_no_write():
    """2 ranks: as with gloo, autograd does not count what a collective writes."""
    assert sim.run(_untouched, 2) == [0, 0]


def _slice():
    dist.all_reduce(torch.ones(4, 2)[:, 0])


def test_slices_are_refused():
    """2 ranks: a slice of a tensor, of which gloo silently moves the wrong elements, is refused on each rank."""
    with pytest.raises(sim.RanksFailed, match=r"strides \[2\].*contiguous") as caught:
        sim.run(_slice, 2)
    assert {type(error) for error in caught.value.failures.values()} == {ValueError}


def test_time_passes_when_nobody_can_run():
    """3 ranks that wait for a key that nobody sets: their limits, of most of an hour, end in order and at once."""
    ended = []

    def waits():
        limit = timedelta(seconds=[3000, 1000, 2000][dist.get_rank()])
        with pytest.raises(RuntimeError, match="wait timeout"):
            dist.distributed_c10d._get_default_store().wait(["never"], limit)
        ended.append(dist.get_rank())

    sim.run(waits, 3)
    assert ended == [1, 2, 0]


def test_a_wait_that_is_over_wakes_nobody():
    """A rank whose wait for a key has timed out is in a receive when the key comes: it gets what is sent to it."""

    def late():
        store, received = dist.distributed_c10d._get_default_store(), torch.zeros(1)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="wait timeout"):
                store.wait(["late"], timedelta(seconds=1))
            store.set("waited", "")
            dist.recv(received, 1)
        else:
            store.get("waited")
            store.set("late", "")
            with pytest.raises(RuntimeError, match="wait timeout"):
                store.wait(["never"], timedelta(seconds=1))
            dist.send(torch.ones(1), 0)
        return received.item()

    assert sim.run(late, 2) == [1.0, 0.0]
