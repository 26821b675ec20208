"""Sync between GPUs, over NCCL."""

import time

import torch
from tests import limits
from tests.transfer import syncing

import rankmesh as rm
from rankmesh.transfer.sync import direct

TIMEOUT = 8.0


def _tensors(layouts, engine, rank):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    made = syncing.values(layouts, rank, 0) if engine is None else syncing.empty(layouts, rank)
    return {name: tensor.cuda() for name, tensor in made.items()}


def _wrong(sync, layouts, rank, version):
    return syncing.wrong({name: tensor.cpu() for name, tensor in sync.tensors.items()}, layouts, rank, version)


def _three(me):
    layouts = syncing.model(rm.Mesh(tp=2), rm.Mesh(tp=2))
    engine, rank = syncing.part(me, layouts)
    tensors, found = _tensors(layouts, engine, rank), []
    how = {"budget": syncing.BUDGET, "timeout": 60, "connect": direct.NcclGroup}
    with rm.Sync(*layouts, tensors, at=me.store, **how) as sync:
        for version in (1, 2, 3):
            if engine is None:
                syncing.fill(tensors, layouts, rank, version)
                found.append(dict(sync.publish(version).failed))
            else:
                received = sync.receive()
                found.append([received.version, _wrong(sync, layouts, rank, version)])
            me.meet(f"version {version}")
    me.meet("closed")
    return found


def test_versions_travel_between_gpus(ranks):
    """A trainer of 2 ranks and an engine of 2 that share the GPUs: three versions over NCCL, every element."""
    found = ranks(4, _three, world=None, limit=120.0)
    assert found[:2] == [[{}, {}, {}]] * 2
    assert found[2:] == [[[1, []], [2, []], [3, []]]] * 2


def _lost(me):
    layouts = syncing.model(rm.Mesh(tp=2), rm.Mesh(tp=2))
    engine, rank = syncing.part(me, layouts)
    tensors = _tensors(layouts, engine, rank)
    how = {"budget": syncing.BUDGET, "timeout": TIMEOUT, "connect": direct.NcclGroup}
    sync = rm.Sync(*layouts, tensors, at=me.store, **how)
    if engine is not None:
        version = sync.receive().version
        me.meet("version 1")
        if rank == 1:  # it asks, and stands still
            direct.Requester.receive = lambda *_: me.meet("over")
        error = me.error(rm.RankmeshError, sync.receive)
        if rank == 0:
            me.meet("over")
        return version, error["seconds"]
    syncing.fill(tensors, layouts, rank, 1)
    sync.publish(1)
    me.meet("version 1")
    syncing.fill(tensors, layouts, rank, 2)
    started = time.monotonic()
    failed = sync.publish(2).failed
    seconds = time.monotonic() - started
    torch.cuda.synchronize()
    me.meet("over")
    return len(failed), seconds


def test_a_lost_engine_costs_a_timeout(ranks):
    """One of an engine's two ranks stands still in version 2: the trainer is back in time, and its GPU is free."""
    found = ranks(4, _lost, world=None, limit=120.0)
    for _, seconds in found[:2]:
        assert seconds < 2 * TIMEOUT + limits.AT_ONCE
    assert [one[0] for one in found[2:]] == [1, 1]
