"""Sync when something fails: a rank that is killed at any moment, a reader beside a receiver, what is refused."""

import os
import signal
import threading
import time

import pytest
import torch
from tests import limits
from tests.sockets import free_port
from tests.sweeping import ALL
from tests.transfer import syncing

import rankmesh as rm
from rankmesh.errors import AgreementError, ConnectError, PlanError, TransferError
from rankmesh.transfer.sync.direct import GlooGroup

WIRES = ("files", "gloo")
TIMEOUT = 4.0
# The parts of the calls of version 2 after which a rank is killed: one, and with make test-sweeps SWEEP=all many.
MOMENTS = tuple(step / 24 for step in range(25)) if ALL else (0.6,)
VICTIMS = {"trainer": 1, "engine": 3}  # of 2 trainer ranks, and two engines of 2


def _layouts():
    return syncing.model(rm.Mesh(tp=2), rm.Mesh(tp=2))


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("wire", [*WIRES, "together"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_rank_costs_the_others_nothing(outcomes, tmp_path, wire, victim):
    """SIGKILL of one rank in the middle of version 2: the others end in time, each engine with one version, whole."""

    def run(name, event):
        folder = tmp_path / name
        folder.mkdir()
        ended = outcomes(6, _killed, wire, str(folder), VICTIMS[victim], event, world=None)
        assert not [one for one in ended if one.hung], f"{name}: hung"
        return ended

    calls = run("all", 0)[VICTIMS[victim]].value["calls"]
    assert calls > 50
    killed = 0
    for part in MOMENTS:
        ended = run(f"{part:.3f}", 1 + int(part * (calls - 1)))
        dead = VICTIMS[victim]
        killed += ended[dead].value is None
        left = {rank: one.value for rank, one in enumerate(ended) if rank != dead}
        what = f"{part}: {left}"
        assert all(left.values()), [str(one) for one in ended if one.value is None]
        assert all(one["seconds"] < 4 * TIMEOUT + limits.AT_ONCE for one in left.values()), what
        for engine in ((2, 3), (4, 5)):
            versions = {left[rank]["version"] for rank in engine if rank in left}
            assert len(versions) == 1, what
            assert None not in versions, what
            assert all(left[rank]["wrong"] == [] for rank in engine if rank in left), what
        if victim == "engine":
            assert left[0]["published"] == left[1]["published"] == [1, 2, 3], what
            assert left[4]["version"] == 3, what
            assert left[2]["version"] in (1, 2, 3), what
    assert killed  # a rank that has to look less often makes fewer calls, and is not killed at a late one


def _killed(me, wire, folder, victim, event):
    """Three versions; the victim counts its calls in the second one, or is killed at one of them."""
    layouts = _layouts()
    how = {"engines": 2, "timeout": TIMEOUT, "budget": syncing.BUDGET, **syncing.how(wire)}
    engine, rank, tensors, sync = syncing.begin(me, layouts, syncing.at(me, wire, folder), **how)
    found = {"version": None, "wrong": [], "published": [], "errors": [], "calls": 0, "seconds": 0.0}
    _step(sync, engine, 1, found, tensors, layouts, rank)
    me.meet("version 1")
    count = syncing.stop_at(event) if me.rank == victim else [0]
    _step(sync, engine, 2, found, tensors, layouts, rank)
    syncing.stop_counting()
    found["calls"] = count[0]
    _step(sync, engine, 3, found, tensors, layouts, rank)
    if engine is not None:
        found["version"] = sync.version
        found["wrong"] = syncing.wrong(sync.tensors, layouts, rank, sync.version or 0)
    return found


def _step(sync, engine, version, found, tensors, layouts, rank):
    started = time.monotonic()
    try:
        if engine is None:
            syncing.fill(tensors, layouts, rank, version)
            sync.publish(version)
            found["published"].append(version)
        else:
            while (sync.version or 0) < version and time.monotonic() - started < 2 * TIMEOUT:
                sync.receive(wait=TIMEOUT / 2)
    except (AgreementError, TransferError, ConnectError) as error:
        found["errors"].append(f"{type(error).__name__}: {error}")
    found["seconds"] = max(found["seconds"], time.monotonic() - started)


def test_members_of_a_group_wait_for_each_other_as_long_as_the_timeout(ranks):
    """An engine comes to its group 1.5 s after the trainer, with a timeout of 4 s: it gets the version."""
    assert ranks(2, _late, world=None) == [{}, 1]


def _late(me):
    one = rm.Mesh(dp=1)
    layouts = tuple({"w": rm.Sharding(one, (None,), (8,))} for _ in range(2))
    engine, _ = syncing.part(me, layouts)

    def connect(*given):
        time.sleep(0.0 if engine is None else 1.5)
        return GlooGroup(*given)

    with rm.Sync(*layouts, {"w": torch.zeros(8)}, at=me.store, timeout=TIMEOUT, connect=connect) as sync:
        got = sync.publish(1).failed if engine is None else sync.receive().version
        me.meet("over")
    return got


def test_the_rank_that_serves_the_store_leaves_last(ranks):
    """Trainer rank 0 closes when its part is sent; rank 1 asks the store that it serves 0.5 s later, and sends, too."""
    assert ranks(3, _leaves_first, free_port(), world=None) == [{}, {}, [1, []]]


def _leaves_first(me, port):
    layouts = syncing.model(rm.Mesh(tp=2), rm.Mesh(tp=1))

    class Slow(GlooGroup):
        def __init__(self, store, *given):
            super().__init__(store, *given)
            if me.rank == 1:
                time.sleep(0.5)
                assert not store.check(["anything"])

    engine, rank, _, sync = syncing.begin(me, layouts, f"127.0.0.1:{port}", timeout=20, connect=Slow)
    with sync:
        if engine is None:
            got = dict(sync.publish(1).failed)
        else:
            got = [sync.receive().version, syncing.wrong(sync.tensors, layouts, rank, 1)]
    me.meet("over")
    return got


def test_a_stopped_engine_is_left_out(ranks):
    """SIGSTOP of an engine rank: the other engine gets version 2, and version 3 waits for the stopped one no more."""
    found = ranks(6, _stopped, world=None)
    for published, seconds in found[:2]:
        assert published == [1, 2, 3]
        assert seconds < limits.AT_ONCE
    assert found[4] == found[5] == [3, []]


def _stopped(me):
    layouts, how = _layouts(), {"engines": 2, "timeout": TIMEOUT, "budget": syncing.BUDGET}
    engine, rank, tensors, sync = syncing.begin(me, layouts, me.store, **how)
    found = {"published": [], "errors": [], "seconds": 0.0}
    _step(sync, engine, 1, found, tensors, layouts, rank)
    me.store.set(f"pid/{me.rank}", str(os.getpid()))
    me.meet("version 1")
    if engine == 0:
        if rank == 0:
            while not found["errors"]:
                _step(sync, engine, 2, found, tensors, layouts, rank)
            me.store.wait(["over"])
            os.kill(int(me.store.get("pid/3")), signal.SIGCONT)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        return None
    _step(sync, engine, 2, found, tensors, layouts, rank)
    found["seconds"] = 0.0
    _step(sync, engine, 3, found, tensors, layouts, rank)
    if me.store.add("through", 1) == 4:
        me.store.set("over", "")
    me.store.wait(["over"])
    if engine is None:
        return [found["published"], found["seconds"]]
    return [sync.version, syncing.wrong(sync.tensors, layouts, rank, 3)]


@pytest.mark.few(1)
@pytest.mark.parametrize("wire", WIRES)
def test_a_reader_never_sees_half_a_version(ranks, tmp_path, wire):
    """A thread that reads an engine's weights under the lock, all the time, sees each tensor of one version."""
    found = ranks(2, _beside, wire, str(tmp_path), world=None)
    assert found[1]["torn"] == []
    assert found[1]["seen"] >= 2


def _beside(me, wire, folder):
    one = rm.Mesh(dp=1)
    layouts = tuple({f"w{i}": rm.Sharding(one, (None,), (200_000,)) for i in range(8)} for _ in range(2))
    engine, _ = syncing.part(me, layouts)
    tensors = {name: torch.zeros(200_000) for name in layouts[0]}
    sync = rm.Sync(*layouts, tensors, at=syncing.at(me, wire, folder))
    torn, seen, over = [], set(), threading.Event()

    def read():
        while not over.is_set():
            with sync.lock:
                ends = {float(v) for tensor in sync.tensors.values() for v in (tensor[0], tensor[-1], tensor[77_777])}
            seen.update(ends)
            if len(ends) > 1:
                torn.append(sorted(ends))

    reader = threading.Thread(target=read)
    if engine is not None:
        reader.start()
    for version in range(1, 16):
        if engine is None:
            for tensor in tensors.values():
                tensor.fill_(version)
            sync.publish(version)
        else:
            sync.receive()
        me.meet(f"version {version}")
    over.set()
    if engine is not None:
        reader.join()
    sync.close()
    me.meet("closed")
    return {"torn": torn[:3], "seen": len(seen)}


def test_what_does_not_fit_is_refused(ranks, tmp_path):
    """A trainer rank with a wrong tensor, another version, an unknown name, a box outside: errors, then a version."""
    for rank, found in enumerate(ranks(4, _refused, str(tmp_path), world=None)):
        if rank < 2:
            assert found["tensor"].startswith("nothing was moved, since rank 1: ")
            assert "trainer '0.up' is torch.float64" in found["tensor"]
            assert "came with another version" in found["version"]
            assert "changed names 'absent'" in found["name"]
            assert "as a box of '0.norm' of shape (32,)" in found["box"]
            assert "version 5 is not above 5" in found["again"]
        else:
            assert found == [5, []]


def _refused(me, folder):
    layouts = _layouts()
    engine, rank = syncing.part(me, layouts)
    place = f"{folder}/sync"
    if engine is not None:
        sync = rm.Sync(*layouts, syncing.empty(layouts, rank), at=place, timeout=20)
        sync.receive()
        found = [sync.version, syncing.wrong(sync.tensors, layouts, rank, 5)]
        me.meet("over")
        return found
    tensors = syncing.values(layouts, rank, 5)
    broken = {**tensors, "0.up": tensors["0.up"].double()} if rank == 1 else tensors
    found = {"tensor": me.error(TransferError, rm.Sync(*layouts, broken, at=place, timeout=20).publish, 1)["message"]}
    sync = rm.Sync(*layouts, tensors, at=place, timeout=20)
    found["version"] = me.error(AgreementError, sync.publish, 3 + rank)["message"]
    sync.publish(5)
    found["name"] = me.error(PlanError, sync.publish, 6, ["absent"])["message"]
    found["box"] = me.error(PlanError, sync.publish, 6, {"0.norm": [((0, 33),)]})["message"]
    found["again"] = me.error(PlanError, sync.publish, 5)["message"]
    me.meet("over")
    sync.close()
    return found


@pytest.mark.parametrize("wire", WIRES)
def test_nothing_is_left(ranks, tmp_path, wire):
    """After many versions and the end: descriptors, threads, files and keys of the store are as before."""
    for before, after, grown in ranks(6, _left, wire, str(tmp_path), world=None):
        assert after["descriptors"] <= before["descriptors"]
        assert after["threads"] <= before["threads"]
        assert grown == 0
    assert list(tmp_path.iterdir()) == []


def _left(me, wire, folder):
    layouts = _layouts()
    engine, rank = syncing.part(me, layouts)
    tensors = syncing.values(layouts, rank, 1) if engine is None else syncing.empty(layouts, rank)

    def some(versions):
        sync = rm.Sync(*layouts, tensors, at=syncing.at(me, wire, folder), engines=2, timeout=20)
        for version in versions:
            _step(sync, engine, version, {"published": [], "errors": [], "seconds": 0.0}, tensors, layouts, rank)
            me.meet(f"version {version}")
        if engine is not None:
            sync.close()
        me.meet(f"left {versions}")
        sync.close()
        me.meet(f"closed {versions}")

    some(range(1, 3))
    before = me.resources()
    me.meet("counted")
    keys = _keys(me, "keys")
    me.meet("keys")
    some(range(3, 9))
    after = me.resources()
    me.meet("counted again")
    grown = _keys(me, "over") - keys
    me.meet("over")
    # The test's own meetings leave two keys each: 6 versions, leaving, closing, and two more.
    return before, after, grown - 2 * 10 if me.rank == 0 else 0


def _keys(me, meeting):
    """How many keys the store has, as rank 0 counts once all others wait at the next meeting."""
    if me.rank:
        return 0
    limits.until(lambda: me.store.add(f"meet/{meeting}", 0) == me.size - 1)
    return me.store.num_keys()
