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
from tests.limits import LONG

from rankmesh.rendezvous import ChannelLost, waiting
from rankmesh.rendezvous.waiting import Worker, answered_within, submit

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
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=LONG, check=False)
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


def test_calls_share_a_thread_but_none_waits_for_another(monkeypatch):
    """50 calls in turn are on one thread; beside 2 that do not return, the next are on a third, which is kept alone."""
    monkeypatch.setattr(waiting, "_idle", [])
    goes_on = threading.Event()

    def made_by():
        return submit(threading.current_thread, "called").result(60)

    first = made_by()
    assert {made_by() for _ in range(49)} == {first}
    stuck = [submit(lambda: goes_on.wait(60) and threading.current_thread(), "stuck") for _ in range(2)]
    third = made_by()
    assert third is made_by()
    goes_on.set()
    others = {one.result(60) for one in stuck}
    assert len(others | {third}) == 3
    assert first in others
    for one in others:
        one.join(60)
        assert not one.is_alive()
    assert third.is_alive()
    assert third.name == "rankmesh-idle"


FORKS = """
import os, sys
from rankmesh.rendezvous.waiting import submit

submit(int, "before").result()
child = os.fork()
if not child:
    os._exit(submit(lambda: 7, "after").result(30))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_threads_of_its_own():
    """The thread that waits for a call is not in the child."""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], timeout=LONG, check=False).returncode == 7
