"""Waiting for keys: until they are there, no longer than was said, and who the end of a wait is left to."""

import threading

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from rankmesh.rendezvous import waiting
from rankmesh.rendezvous.waiting import wait_for


def _stores(kind, folder):
    """Two connections to one store: who waits on one keeps it from everybody else."""
    if kind == "tcp":
        served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return served, TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)
    return (FileStore(str(folder / "store"), 1),) * 2 if kind == "file" else (HashStore(),) * 2


@pytest.mark.parametrize("last", [0.1, 30.0])
@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_keys_that_come_and_keys_that_do_not(tmp_path, monkeypatch, kind, last):
    """Two keys, one of which comes while they are waited for; most of the limit is left to the store, or none."""
    monkeypatch.setattr(waiting, "_LAST", last)
    store, other = (PrefixStore("job", each) for each in _stores(kind, tmp_path))
    store.set("one", "here")
    assert not wait_for(store, ["one", "two"], 0.3)
    writer = threading.Timer(0.2, other.set, ("two", "here"))
    writer.start()
    assert wait_for(store, ["one", "two"], 30)
    writer.join()
    assert wait_for(store, ["two"], 0)
    assert not wait_for(store, ["three"], 0)


def test_the_end_of_a_wait_is_not_left_to_a_tcp_store(monkeypatch):
    """Of a minute the store waits for half; of less than half a minute not at all; another kind waits for all of it."""
    requested = []

    def woken(_, __, seconds):
        requested.append(seconds)
        return True

    monkeypatch.setattr(waiting, "_woken", woken)
    tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert wait_for(PrefixStore("a", PrefixStore("b", tcp)), ["key"], 60)
    assert not wait_for(tcp, ["key"], 0.01)
    assert wait_for(HashStore(), ["key"], 60)
    assert requested == [30, 60]


def test_what_is_no_timeout_is_not_taken_for_one():
    """A store that fails is an error; only the end of the time means that nothing came."""

    class Broken:
        def wait(self, *_):
            raise RuntimeError("connection reset")

        check = wait

    with pytest.raises(RuntimeError, match="connection reset"):
        wait_for(Broken(), ["key"], 1)
