"""The native stack of a rank that does not respond, by a tool that is installed, and its innermost frame."""

import json
import os
import subprocess
import sys
import tempfile
import time

import pytest
from tests import limits

from rankmesh.debug.doctor.stacks import threads_of
from rankmesh.debug.watch import host as on_host
from rankmesh.debug.watch.host import HostRanks, _began

PY_SPY = """Process 71: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 71 (active+gil): "MainThread"
    spin (kernels.c:3)
    ffi_call (libffi.so.8.1.2)
    load (/home/me/train.py:31)
    <module> (/home/me/train.py:40)
Thread 72 (idle): "rankmesh-watch"
    wait (threading.py:331)
"""
PYSTACK = """Traceback for thread 71 (python) [Has the GIL] (most recent call last):
    (C) File "???", line 0, in _start (/usr/bin/python3.11)
    (Python) File "/home/me/train.py", line 31, in load
        spin(25)
    (C) File "???", line 0, in ffi_call (/usr/lib/libffi.so.8.1.2)
    (C) File "/home/me/kernels.c", line 3, in spin (/home/me/kernels.so)
"""
IN_PYTHON = """Thread 71 (active+gil): "MainThread"
    load (/home/me/train.py:31)
"""


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        (PY_SPY, "spin (kernels.c:3)"),
        (PYSTACK, "spin (/home/me/kernels.c:3)"),
        (IN_PYTHON, ""),
        ("", ""),
        (PYSTACK.partition('    (C) File "???", line 0, in ffi')[0], ""),
    ],
)
def test_the_innermost_frame(text, frame):
    """Native, of either tool; none where a thread runs Python, or where nothing was printed."""
    assert next((thread.native_frame for thread in threads_of(text)), "") == frame


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A py-spy on the path, which runs the shell's lines that it is given."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(lines):
        (tmp_path / "py-spy").write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "py-spy").chmod(0o755)

    return write


def test_a_tool_that_takes_too_long(tool, monkeypatch):
    """It is ended at the limit, and there is no stack; nor of a tool that may not look."""
    monkeypatch.setattr(on_host, "LIMIT", 0.5)
    started = time.monotonic()
    for lines in ("exec sleep 60", "echo no; exit 1"):
        tool(lines)
        assert on_host.native_stack(1) == ""
    assert time.monotonic() - started < limits.AT_ONCE


def test_a_rank_that_holds_the_interpreter(tool, tmp_path, monkeypatch):
    """The others of the host see its native frame; the lowest of them looks, once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "stack").write_text(PY_SPY)
    tool(f'cat "{tmp_path}/stack"')
    ranks = HostRanks("session", 0)
    other = subprocess.Popen((sys.executable, "-c", "while True: pass"))
    try:
        about = {"pid": other.pid, "began": _began(other.pid), "signal": False}
        (next(tmp_path.glob("*/*session")) / "2.json").write_text(json.dumps(about))
        look = ranks.look({2})[2]
        assert look.state == "its process runs, in spin (kernels.c:3)"
        assert "load (/home/me/train.py:31)" in look.stacks
        (next(tmp_path.glob("*/*session")) / "1.json").write_text(json.dumps(about))
        monkeypatch.setattr(ranks, "_rank", 3)
        assert ranks.look({2}) == {}
    finally:
        other.kill()
        other.wait()
        ranks.close()


def test_a_real_tool():
    """Where py-spy is installed and may look: the frame of a process that waits in C."""
    sleeps = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(60)"))
    try:
        time.sleep(1)
        text = on_host.native_stack(sleeps.pid)
        if not text:
            pytest.skip("no py-spy or pystack here, or it may not look")
        assert threads_of(text)[0].native_frame
    finally:
        sleeps.kill()
        sleeps.wait()
