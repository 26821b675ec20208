"""Workers: threads that make calls which may never return, and the end of the process while one is under way."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from rankmesh.errors import StoreLost
from rankmesh.rendezvous import ChannelLost, Round, StoreChannel
from rankmesh.rendezvous.waiting import Worker, answered_within

ENDS = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from rankmesh.rendezvous.waiting import Worker

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
idle, busy = Worker("idle"), Worker("busy")
idle.submit(lambda: None).result()

def call():
    try:
        store.wait(["never"], timedelta(seconds=1))
    finally:
        print("returned", flush=True)

busy.submit(call)
"""


def test_a_process_ends_after_the_calls_under_way():
    """A call of torch's store that returns while Python shuts down would end the process with SIGABRT."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "returned\n"), ended.stderr


def test_a_call_that_never_returns_does_not_keep_the_process():
    """The wait at the end has a limit."""
    stuck, worker = threading.Event(), Worker("stuck")
    worker.submit(stuck.wait)
    started = time.monotonic()
    Worker.end_all(0.1)
    assert time.monotonic() - started < 30
    stuck.set()


class _Connection:
    """What a call holds."""


def test_a_call_that_is_left_behind_frees_what_it_had():
    """Its error has the frames of the call, whose owner may have the future of it: a cycle that keeps a connection."""
    ends, worker, owner, connection = threading.Event(), Worker("left"), SimpleNamespace(), _Connection()
    kept = weakref.ref(connection)

    def call(connection, owner):
        ends.wait(60)
        raise RuntimeError(f"{connection} of {owner}")

    owner.made = worker.submit(partial(call, connection, owner))
    del connection
    with pytest.raises(ChannelLost):
        answered_within(owner.made, 0.01)
    gc.disable()
    try:
        ends.set()
        worker.submit(lambda: None).result(60)
        assert kept() is None
    finally:
        gc.enable()
        worker.close()


def test_a_round_whose_store_is_lost_ends_its_thread():
    """The call that fails has the round, which has the thread: nobody else ends it."""
    before = set(threading.enumerate())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Round(StoreChannel(store, "test"), "lost", range(2), 0, epoch=0)

    def fails():
        raise ChannelLost("by the test")

    with pytest.raises(StoreLost):
        one.ask(fails)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
