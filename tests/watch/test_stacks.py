"""The line of a call and of a rank is the program's, never one of torch, of rankmesh or of Python's own modules."""

import json
import threading
import time

import torch
from tests.limits import LONG, until

from rankmesh.debug.watch import stacks
from rankmesh.debug.watch.recorder import Recorder, _lines


def test_lines_reach_the_program_through_deep_modules():
    """A call below thirty frames of torch keeps its line of the program, sixteen frames, and the four outermost."""
    inner = [{"filename": f"/venv/site-packages/torch/nn/{n}.py", "line": n, "name": "f"} for n in range(30)]
    outer = [{"filename": "/home/me/train.py", "line": n, "name": "step"} for n in range(30)]
    for given, kept in ((inner + outer, 35), (outer, 20), (inner, 20), ([], 0)):
        table = {}
        assert bool(_lines(given, table)) is bool(given)
        assert [len(json.loads(text)) for text in table] == ([kept] if kept else [])


def _stands(target):
    """What a thread is in that only runs this function of a library."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    time.sleep(0)
    return stacks.in_call(thread.ident)[0]


def test_a_program_inside_the_library_has_no_site():
    """A thread with no frame of a program, as at the end of one, has no line: not that of a wait of the library."""
    over = threading.Event()
    try:
        assert _stands(over.wait)["site"] == ""
    finally:
        over.set()


def test_a_program_that_handles_the_error_of_a_call_does_not_run(ranks):
    """2 ranks: while an error of torch is handled, a recording has the error and no running program."""
    for during, after in ranks(2, _fails):
        assert during["failure"].startswith("RuntimeError: closed")
        assert during["in_call"]["running"] is False
        assert after["failure"] == ""


def _fails(me):
    recorder, found = Recorder(), []

    def look():
        found.append(recorder.document("a test", (0, 0, 0))["rankmesh"])  # it stood elsewhere before

    try:
        raise RuntimeError("closed")
    except RuntimeError:
        _on_a_thread(look)
    _on_a_thread(look)
    return found


def _on_a_thread(look):
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()


class _Data(torch.utils.data.Dataset):
    """Data that are read until somebody has seen that."""

    def __init__(self, seen):
        self.seen = seen

    def __len__(self):
        return 1

    def __getitem__(self, number):
        self.seen.acquire(timeout=LONG)
        return number


def _stood(target, *given):
    """What a thread of the program is seen to do, other than to compute."""
    thread = threading.Thread(target=target, args=given, daemon=True)
    thread.start()
    try:
        return until(lambda: stacks.stands(thread.ident)[0])
    finally:
        seen, *_ = given
        seen.release()
        thread.join(LONG)


def _waits(seen):
    event = threading.Event()
    while not seen.acquire(blocking=False):
        event.wait(0.5)


def _computes(seen):
    while not seen.acquire(blocking=False):
        sum(range(1000))


def test_what_a_program_does():
    """A program reads in its data set, waits where its line waits, and computes elsewhere."""
    seen = threading.Semaphore(0)
    data = _Data(seen)
    assert _stood(lambda _: list(torch.utils.data.DataLoader(data)), seen) == "reads"
    assert _stood(_waits, threading.Semaphore(0)) == "waits"
    thread = threading.Thread(target=_computes, args=(seen,), daemon=True)
    thread.start()
    assert until(lambda: stacks.stands(thread.ident)[1].endswith("in _computes"))
    assert stacks.stands(thread.ident)[0] == ""
    seen.release()
    thread.join(LONG)
