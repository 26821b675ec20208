"""Transfers live: on gloo ranks and on simulated ones, every element arrives where the plan says."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from tests import limits
from tests.transfer import live
from tests.transfer.strategies import pairs

import rankmesh as rm
from rankmesh import sim
from rankmesh.backend import nccl
from rankmesh.errors import AgreementError, PlanError, TransferError
from rankmesh.rendezvous import StoreChannel
from rankmesh.transfer import Transfer
from rankmesh.transfer.live import run
from rankmesh.transfer.live.agreement import TransferAgreement
from rankmesh.transfer.live.exchange import GroupTransport


def _moved(moves, rank, budget=1 << 20, **how):
    into = moves.allocate(rank)
    result = moves.run(live.shards(moves.source, rank), into, budget, **how)
    return result, into


@given(pairs(least=0))
def test_random_pairs_under_the_simulator(both):
    """Up to 18 simulated ranks: every pair of layouts, in messages of 64 bytes, arrives whole."""
    moves = Transfer(*both)

    def moved():
        rank = dist.get_rank()
        result, into = _moved(moves, rank, budget=40 * 64)
        return live.wrong(into, moves.target, rank), into.complete, result.memory

    for bad, complete, memory in sim.run(moved, max(2, moves.world_size)):
        assert (bad, complete) == ([], True)
        assert memory <= 40 * 64


def test_sixteen_ranks_to_eight(ranks):
    """16 ranks, gloo: TP4·PP2·DP2 to TP2·DP4, twice without planning again; a small budget holds; progress is told."""
    for rank, (bad, memory, planned, sent, leftover, steps) in enumerate(ranks(16, _refit)):
        assert bad == []
        assert memory <= 1 << 16
        assert planned == 1
        assert sent == live.refit().bytes_out(rank)
        assert leftover <= 1
        arrived = live.refit().bytes_in(rank)
        assert steps == sorted(steps)
        assert steps[-1] == [arrived, arrived]


def _refit(me):
    moves = live.refit()
    run.schedule_of.cache_clear()
    steps = []
    for _ in range(2):
        steps.clear()
        result, into = _moved(moves, me.rank, budget=1 << 16, progress=lambda *step: steps.append(step))
    me.meet("all are through")
    bad = live.wrong(into, moves.target, me.rank)
    left = sum(me.store.check([f"world/rankmesh/job/transfer/{dist.group.WORLD.group_name}/{g}/end"]) for g in range(2))
    return bad, result.memory, run.schedule_of.cache_info().misses, result.bytes_out, left, steps


def test_failures_are_named_on_every_rank(ranks):
    """4 ranks, gloo, one world: a wrong tensor, another budget, another plan, a rank that raises; then a good run."""
    for rank, (wrong, differs, other, raises, good) in enumerate(ranks(4, _failures)):
        assert wrong["kind"] == "TransferError"
        assert wrong["ranks"] == [2]
        assert wrong["message"].startswith("nothing was moved, since rank 2: source '0.up' is torch.float64 [128, 64]")
        assert differs["kind"] == "AgreementError"
        assert differs["ranks"] == [1]
        assert "rank 1 came with another budget than the other ranks" in differs["message"]
        assert other["kind"] == "AgreementError"
        assert other["ranks"] == [1]
        assert "rank 1 came with another digest than the other ranks" in other["message"]
        assert other["untouched"]
        assert raises["kind"] == "TransferError"
        assert raises["ranks"] == [3]
        assert "rank 3: ValueError: the disk is full" in raises["message"]
        assert max(one["seconds"] for one in (wrong, differs, other, raises)) < limits.AT_ONCE
        sent = {move.name for move in _halves().of(rank).receives if move.source == 3}
        assert set(raises["incomplete"]) >= sent
        assert good == [[], True]


def _halves(near=False):
    """From which rank 3 sends to rank 2 alone; ``near``: with a cluster, which makes it another transfer."""
    cluster = rm.Cluster.parse("host=2,leaf=2") if near else None
    return Transfer(live.model(rm.Mesh(tp=2, dp=2)), live.model(rm.Mesh(tp=4)), cluster)


def _failures(me):
    moves = _halves()
    tensors = live.shards(moves.source, me.rank)
    into = moves.allocate(me.rank)
    for tensor in into.values():
        tensor.fill_(-1)
    bad = tensors | {"0.up": tensors["0.up"].double()} if me.rank == 2 else tensors
    wrong = me.error(TransferError, moves.run, bad, into)
    differs = me.error(AgreementError, moves.run, tensors, into, budget=1 << (20 + (me.rank == 1)))
    other = me.error(AgreementError, (_halves(near=True) if me.rank == 1 else moves).run, tensors, into)
    other["untouched"] = not into.complete and all((tensor == -1).all().item() for tensor in into.values())
    how = {"progress": _full} if me.rank == 3 else {}
    raises = me.error(TransferError, moves.run, tensors, into, budget=1 << 14, **how)
    assert into.incomplete == raises["incomplete"]
    moves.run(tensors, into)
    return wrong, differs, other, raises, (live.wrong(into, moves.target, me.rank), into.complete)


def _full(received, total):
    raise ValueError("the disk is full")


@pytest.mark.long
def test_a_rank_that_dies_or_stops_is_named_within_the_timeout(outcomes):
    """4 ranks, gloo, twice: one is killed, then one is stopped, between two rounds; the others name it."""
    for how in ("dies", "stops"):
        ended = outcomes(4, _lost, how)
        for rank in (0, 1, 3):
            result = ended[rank].value
            assert result is not None, ended[rank]
            assert result["ranks"] == [2]
            assert "rank 2 was lost" in result["message"]
            assert result["seconds"] < limits.AT_ONCE
            assert result["complete"] == (not result["incomplete"])
        assert any(ended[rank].value["incomplete"] for rank in (0, 1, 3))


def _lost(me, how):
    moves = _halves()
    into = moves.allocate(me.rank)
    pauses = iter([12.0])
    leave = (lambda *_: os._exit(1) if how == "dies" else time.sleep(next(pauses, 0.0))) if me.rank == 2 else None
    result = me.error(
        TransferError, moves.run, live.shards(moves.source, me.rank), into, budget=1 << 14, timeout=5.0, progress=leave
    )
    return result | {"complete": into.complete}


def test_a_rank_that_stays_away_is_missed(ranks):
    """3 ranks, gloo: one never calls run; the others name it after the timeout."""
    for rank, result in enumerate(ranks(3, _away)):
        if rank != 1:
            assert result["kind"] == "AgreementError"
            assert "since rank 1 did not come within 4 s" in result["message"]


def _away(me):
    both = {"w": rm.Sharding(rm.Mesh(dp=3), ("dp",), (6,))}
    moves = Transfer(both, both)
    tensors, into, result = live.shards(both, me.rank), moves.allocate(me.rank), None
    me.meet("all have loaded what a run takes")
    if me.rank != 1:
        result = me.error(AgreementError, moves.run, tensors, into, timeout=4.0)
    me.meet("all are through")
    return result


def test_the_rank_that_serves_the_store_waits_until_all_have_the_outcome(ranks):
    """2 ranks: rank 1 reads the outcome of a transfer 1 s later than rank 0, which ends its store with its part."""
    assert ranks(2, _ends_its_store, world=None) == [True, True]


def _ends_its_store(me):
    if me.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        me.store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(me.store.get("port")), wait_for_workers=False)
        read = StoreChannel.read
        StoreChannel.read = lambda channel, key: time.sleep(1.5 * key.endswith("/end/outcome")) or read(channel, key)
    agreement = TransferAgreement(store, "test", me.rank, (0, 1), timedelta(seconds=20), serves=me.rank == 0)
    agreement.start({"what": "a transfer"}, "")
    me.meet("started")
    if me.rank == 0:
        time.sleep(0.5)  # rank 1 has arrived, and waits
    agreed = agreement.end(None).agreed
    del agreement, store
    me.meet("over")
    return agreed


def test_a_group_of_its_own_ranks(ranks):
    """4 ranks, gloo: a transfer between ranks 1 and 3 over a group of these two; one without rank 3 is refused."""
    assert [value for value in ranks(4, _pair) if value is not None] == [[[], "rank 1"], [[], "rank 3"]]


def _pair(me):
    moves = Transfer(
        {"w": rm.Sharding(rm.Mesh(dp=1, offset=1), (None,), (6,))},
        {"w": rm.Sharding(rm.Mesh(dp=1, offset=3), (None,), (6,))},
    )
    group = dist.new_group([1, 3])
    other = dist.new_group([0, 1])
    if me.rank not in (1, 3):
        if me.rank == 0:
            me.error(TransferError, moves.run, {}, {}, group=other)
        return None
    if me.rank == 1:
        result = me.error(TransferError, moves.run, live.shards(moves.source, 1), {}, group=other)
        assert "rank 3 has a part in the transfer, but is not in the group" in result["message"]
    _, into = _moved(moves, me.rank, group=group)
    return live.wrong(into, moves.target, me.rank), f"rank {me.rank}"


def test_strides_and_shared_memory():
    """2 simulated ranks: tensors of any stride, and targets in the memory of sources: in place, and shifted by rows."""
    source = {
        "w": rm.Sharding(rm.Mesh(dp=2), (None, None), (6, 8)),
        "v": rm.Sharding(rm.Mesh(dp=2), ("dp", None), (8, 4)),
    }
    target = {
        "w": rm.Sharding(rm.Mesh(dp=2), (None, "dp"), (6, 8)),
        "v": rm.Sharding(rm.Mesh(dp=2), (None, None), (8, 4)),
    }
    moves = Transfer(source, target)

    def moved():
        rank = dist.get_rank()
        tensors = live.shards(source, rank)
        turned = torch.empty(8, 6).T.copy_(tensors["w"])
        shared = torch.empty(8, 4)
        shared[4 - 4 * rank :][:4] = tensors["v"]  # where the other rank's rows will be
        into = {"w": torch.empty(6, 16)[:, ::4], "v": shared}
        moves.run({"w": turned, "v": shared[4 - 4 * rank :][:4]}, into)
        in_place = turned[:, 4 * rank : 4 * rank + 4]
        memory = moves.run({"w": turned, "v": tensors["v"]}, {"w": in_place, "v": shared}).memory
        memory -= moves.run({"w": turned, "v": tensors["v"]}, {"w": in_place.clone(), "v": shared}).memory
        return live.wrong(into, target, rank), live.wrong({"w": in_place, "v": shared}, target, rank), memory

    assert sim.run(moved, 2) == [([], [], 0), ([], [], 0)], "what stays in its place is not copied"


def test_one_element_of_any_stride():
    """2 simulated ranks: torch counts one element as contiguous, whatever its stride is."""
    source = {"w": rm.Sharding(rm.Mesh(dp=2), ("dp",), (2,))}
    target = {"w": rm.Sharding(rm.Mesh(dp=2), (None,), (2,))}

    def moved():
        tensors = {"w": torch.empty(2)[::2].copy_(live.shards(source, dist.get_rank())["w"])}
        into = {"w": torch.empty(4)[::2]}
        Transfer(source, target).run(tensors, into)
        return live.wrong(into, target, dist.get_rank())

    assert sim.run(moved, 2) == [[], []]


def test_a_budget_that_holds_no_message():
    """Two messages of 64 bytes for each peer are the least."""

    def small():
        moves = live.refit()
        with pytest.raises(PlanError, match="give at least"):
            moves.run({}, {}, 100)

    sim.run(small, 2)


def _as_if_on_gpus(together):
    """Replace the transport of transfers by one that has buffers on the CPU and starts rounds as on GPUs."""
    connected = []

    class Transport(GroupTransport):
        parts = 0

        def staging(self, tensors):
            self.parts = len(tensors)
            return torch.device("cpu")

        def together(self, device):
            return together(self.parts)

        def meet(self):
            connected.append(1)
            dist.all_reduce(torch.zeros(1))

    run.GroupTransport = Transport
    return connected


def test_all_ranks_connect_where_rounds_start_together(ranks):
    """3 ranks, as if their tensors were on GPUs: also the one without a part makes the call that connects all."""
    assert ranks(3, _together) == [[1, []], [1, []], [1, []]]
    assert ranks(3, _together, False) == [[0, []], [0, []], [0, []]]


def _together(me, gpus=True):
    connected = _as_if_on_gpus(lambda parts: gpus and parts > 0)
    moves = Transfer(*({"w": rm.Sharding(rm.Mesh(dp=1, offset=offset), None, (1000, 3))} for offset in (0, 1)))
    whole = torch.arange(3000.0).view(1000, 3)
    into = {"w": torch.zeros(1000, 3)} if me.rank == 1 else {}
    moves.run({"w": whole} if me.rank == 0 else {}, into, budget=4096)
    return [len(connected), [] if me.rank != 1 or torch.equal(into["w"], whole) else ["w"]]


def test_a_transfer_ends_when_the_gpu_has_ended(ranks):
    """2 ranks, as if on GPUs, of which that of rank 1 stands still: no success, and the timeout holds on both."""
    for result in ranks(2, _gpu_stands_still):
        assert result["kind"] == "TransferError"
        assert result["ranks"] == [1]
        assert 1.0 < result["seconds"] < limits.AT_ONCE


def _stands_still(device, check):
    while True:
        check()
        time.sleep(0.01)


def _gpu_stands_still(me):
    _as_if_on_gpus(lambda parts: True)
    nccl.device_done = _stands_still if me.rank == 1 else lambda device, check: None
    moves = Transfer(*({"w": rm.Sharding(rm.Mesh(dp=1, offset=offset), None, (8,))} for offset in (0, 1)))
    tensors, into = ({"w": torch.ones(8)} if me.rank == rank else {} for rank in (0, 1))
    me.meet("all have loaded what a run takes")
    return me.error(TransferError, moves.run, tensors, into, timeout=1.0)


def test_what_is_copied_counts_once_the_gpu_has_done_it(monkeypatch):
    """1 simulated rank, as if on a GPU that stands still: copies that end nowhere are an error at the timeout."""
    monkeypatch.setattr(nccl, "device_done", _stands_still)
    one = {"w": rm.Sharding(rm.Mesh(dp=1), None, (8,))}

    def copied():
        with pytest.raises(TransferError, match=r"the GPU did not finish within 0\.1 s"):
            Transfer(one, one).run({"w": torch.ones(8)}, {"w": torch.zeros(8)}, timeout=0.1)

    sim.run(copied, 1)


def test_calls_that_started_together_end_together(monkeypatch):
    """A batch is waited for once; one that the GPU does not finish in time fails for each of its messages."""
    calls = []

    def works(device, check):
        calls.append(device)
        if len(calls) != 2:
            time.sleep(0.02)
            check()

    monkeypatch.setattr(nccl, "device_done", works)
    batch = nccl.Batch([], torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"the GPU did not finish within 0\.01 s"):
        batch.wait(timedelta(seconds=0.01))
    for _ in range(2):
        batch.wait(timedelta(seconds=0.01))
    assert len(calls) == 2
