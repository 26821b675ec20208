"""Workers: threads that make calls which may never return, and the end of the process while one is under way."""

import subprocess
import sys
import threading
import time

from rankmesh.rendezvous.waiting import Worker

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
