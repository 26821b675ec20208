"""A publish or a receive that is interrupted, as by Ctrl+C: none of its threads goes on with the weights."""

import threading
import time

import pytest
import torch
from torch.distributed import HashStore

import rankmesh as rm
from rankmesh.transfer.sync import direct, stored

# More than the buffers of a connection hold, so that sending waits for an engine that does not receive.
COUNT = 1 << 25
SECONDS = 3600.0


@pytest.fixture
def kept():
    """What a test keeps, so that no thread ends for want of it; fail where one is still busy a minute later."""
    kept = []
    yield kept
    end = time.monotonic() + 60
    while any(one.name == "rankmesh-sync" for one in threading.enumerate()):
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.01)


def _interrupt(*_):
    raise KeyboardInterrupt


def _sync(at):
    whole = {"w": rm.Sharding(rm.Mesh(tp=1), None, (COUNT,))}
    return rm.Sync(whole, whole, {"w": torch.zeros(COUNT)}, at=at, timeout=SECONDS)


def test_an_interrupted_receive_stops_looking(kept, tmp_path, monkeypatch):
    """A folder without a trainer, at which an engine would look for an hour."""
    engine = _sync(tmp_path / "weights")
    kept.append(engine)
    monkeypatch.setattr(stored, "answered_within", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.receive()


@pytest.mark.parametrize("under_way", [False, True])
def test_an_interrupted_publish_stops_sending(kept, monkeypatch, under_way):
    """An engine that has a version asks for the next, and does not receive it; before or while it is sent."""
    store = HashStore()
    trainer, engine = _sync(store), _sync(store)
    kept += [trainer, engine]
    received = threading.Thread(target=engine.receive)
    received.start()
    trainer.publish(1)
    received.join(60)
    assert engine.version == 1
    engine.receive(wait=0)
    sending, send = threading.Event(), direct.Exchange.all

    def begins(exchange, *steps):
        sending.set()
        send(exchange, *steps)

    monkeypatch.setattr(direct.Exchange, "all", begins)
    monkeypatch.setattr(direct, "wait", lambda _: _interrupt() if not under_way or sending.wait(60) else None)
    with pytest.raises(KeyboardInterrupt):
        trainer.publish(2)
