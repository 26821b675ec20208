"""Sync: a trainer's weights reach engines whole, version by version, whatever happens to either."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests import limits
from tests.sweeping import ALL
from tests.transfer import brute, syncing
from tests.transfer.live import bytes_of
from tests.transfer.strategies import pairs
from tests.transfer.together import Together
from torch.distributed import HashStore

import rankmesh as rm
from rankmesh.rendezvous import StoreChannel
from rankmesh.transfer.sync import direct

WIRES = ("files", "gloo")


def test_small_tensors_travel_together(monkeypatch):
    """64 tensors of 300 kB, each contiguous on both sides: 5 messages of at most 4 MiB bring a version."""
    started, start = [], direct.start_each
    monkeypatch.setattr(direct, "start_each", lambda *given: (started.extend(given[2]), start(*given)))
    whole = {str(n): rm.Sharding(rm.Mesh(tp=1), None, (300, 500), "bfloat16") for n in range(64)}
    store, given_ = HashStore(), {name: torch.full((300, 500), float(name), dtype=torch.bfloat16) for name in whole}
    with rm.Sync(whole, whole, given_, at=store) as trainer, ThreadPoolExecutor() as pool:
        engine = rm.Sync(whole, whole, {name: torch.zeros_like(one) for name, one in given_.items()}, at=store)
        received = pool.submit(engine.receive)
        assert trainer.publish(1).failed == {}
        assert received.result(60).bytes == 64 * 300_000
        assert [len([one for one in started if one.sending is sends]) for sends in (True, False)] == [5, 5]
        assert all(torch.equal(one, given_[name]) for name, one in engine.tensors.items())
        engine.close()


# -- every element, of random layouts, and of what changed ------------------------------------------------------------


@st.composite
def _cases(draw):
    """Two layouts of up to 6 ranks, and for three further versions what each has changed: names with boxes or whole."""
    source, target = draw(pairs(max_size=6, max_offset=0, max_names=3))
    changes = []
    for _ in range(3):
        changed = {}
        for name in draw(st.lists(st.sampled_from(sorted(target)), unique=True)):
            shape = target[name].shape
            box = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape))
            changed[name] = draw(st.one_of(st.none(), st.lists(box, max_size=3)))
        changes.append(changed)
    skips = draw(st.sampled_from([None, 1, 2]))
    return source, target, changes, skips


@pytest.mark.parametrize("wire", [*WIRES, "together"])
@settings(
    max_examples=2 if ALL else 1,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases=st.lists(_cases(), min_size=4, max_size=4))
def test_random_layouts_and_changes(ranks, tmp_path_factory, wire, cases):
    """6 and 6 ranks: of four pairs of layouts, four versions each, every element is there, and no byte more travels."""
    folder = str(tmp_path_factory.mktemp("sync"))
    for result in ranks(12, _random, wire, folder, cases, world=None):
        assert result == []


def _whole(layouts, changes, version):
    """The whole tensors of a version: numbered elements, plus one for each time that one was changed."""
    found = {}
    for name, sharding in sorted(layouts[1].items()):
        whole = np.array(np.arange(int(np.prod(sharding.shape)), dtype=np.int64).reshape(sharding.shape) * 3)
        for changed in changes[:version]:
            for box in [[(0, n) for n in sharding.shape]] if changed.get(name, ()) is None else changed.get(name, ()):
                where = tuple(slice(*ends) for ends in box)
                whole[where] = (whole[where] + 1) % 120
        found[name] = np.asarray(whole % 120)
    return found


def _cut(whole, sharding, rank):
    """A rank's shard of a whole tensor, and where it is no padding."""
    index = brute.local(sharding, rank)
    if index is None:
        return None, None
    values = whole.reshape(-1)[np.clip(index, 0, None)] if whole.size else np.zeros_like(index)
    return torch.tensor(values).to(getattr(torch, sharding.dtype)), torch.from_numpy(np.asarray(index >= 0))


def _random(me, wire, folder, cases):
    trains = me.rank < 6
    me.world(prefix="trainer" if trains else "engine", rank=me.rank % 6, size=6)
    bad = []
    for number, (source, target, changes, skips) in enumerate(cases):
        layouts, rank = (source, target), me.rank % 6
        side = layouts[0 if trains else 1]
        takes_part = any(rank in s.mesh for s in side.values())
        place = syncing.at(me, wire, f"{folder}/{number}")
        tensors = {}
        for name, sharding in side.items():
            if sharding.holds(rank):
                tensors[name] = torch.zeros(sharding.of(rank).shape, dtype=getattr(torch, sharding.dtype))
        sync = rm.Sync(*layouts, tensors, at=place, budget=64 * 64, timeout=30, **syncing.how(wire))
        for version in range(4):
            whole = _whole(layouts, changes, version)
            if takes_part and trains:
                for name, tensor in tensors.items():
                    tensor.copy_(_cut(whole[name], side[name], rank)[0])
                sync.publish(version, changes[version - 1] if version else None)
            elif takes_part and not (wire == "files" and version == skips):
                received = sync.receive()
                while received is not None and received.version < version:  # the one that was skipped, at first
                    received = sync.receive()
                if received is None or received.version != version:
                    bad.append([number, version, "version", str(received)])
                for name, tensor in sync.tensors.items():
                    expected, real = _cut(whole[name], side[name], rank)
                    if not torch.equal(bytes_of(tensor)[real], bytes_of(expected)[real]):
                        bad.append([number, version, name])
            me.meet(f"{number} {version}")
        sync.close()
        me.meet(f"{number} closed")
    return bad


# -- engines come and go -------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("wire", [*WIRES, "together"])
def test_engines_join_and_leave(ranks, tmp_path, wire):
    """Engine 0 takes versions 1 and 2, engine 1 joins at 2: each whole, in the fewest bytes; one group for each."""
    layouts = syncing.model()
    moves = rm.Transfer(layouts[0], syncing.model(engine=rm.Mesh(tp=2, offset=4))[1])
    assert moves.bytes == moves.lower_bound
    found = ranks(8, _join_and_leave, wire, str(tmp_path), world=None)
    for rank, versions in enumerate(((1, 2), (1, 2), (2, 3), (2, 3)), 4):
        assert found[rank] == [[version, moves.bytes_in(4 + rank % 2), []] for version in versions]
    for failed, connected, seconds in found[:4]:
        assert failed == [{}, {}, {}]
        assert connected == ([0, 0, 0] if wire == "files" else [1, 1, 0])
        assert seconds < limits.AT_ONCE
    assert not (tmp_path / "sync").exists()


def _join_and_leave(me, wire, folder):
    layouts, found, connected = syncing.model(), [], []

    class Connected(Together if wire == "together" else direct.GlooGroup):
        def __init__(self, *given):
            connected.append(given[1])
            super().__init__(*given)

    place = syncing.at(me, wire, folder)
    engine, rank, tensors, sync = syncing.begin(me, layouts, place, budget=syncing.BUDGET, connect=Connected)
    made, longest = [], 0.0
    for version in (1, 2, 3):
        if engine is None:
            if wire != "files":  # an engine that joins has asked
                assert limits.until(lambda number=version: len(_requests(me.store)) >= (2 if number == 2 else 1))
            syncing.fill(tensors, layouts, rank, version)
            before = len(connected)
            done = sync.publish(version)
            syncing.fill(tensors, layouts, rank, -1)
            longest = max(longest, done.seconds)
            found.append(dict(done.failed))
            made.append(len(connected) - before)
        elif version in ((1, 2), (2, 3))[engine]:
            received = sync.receive()
            while received.version < version:  # a folder has the version before until this one is announced
                received = sync.receive()
            found.append([received.version, received.bytes, syncing.wrong(sync.tensors, layouts, rank, version)])
        me.meet(f"version {version}")
        if engine == 0 and version == 2:
            sync.close()
        me.meet(f"after {version}")
    sync.close()
    me.meet("closed")
    return found if engine is not None else [found, made, longest]


def _requests(store):
    """The engines that ask, in the store that both sides share."""
    channel = StoreChannel(store, direct.PREFIX)
    return [text for texts in channel.posted("engines").values() for text in texts if channel.read(f"request/{text}")]
