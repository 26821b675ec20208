"""What the README promises before its first example; tests/docs follows its examples, commands and links."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def _spec():
    return re.search(r"^SPEC \?= (.*)$", MAKEFILE, re.MULTILINE)[1]


def _run(*arguments):
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "140"},
    )
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{arguments} was not done in time")
    assert process.returncode == 0, err
    return out


def test_the_demo_checks_its_layout():
    """16 ranks: `rankmesh check` of the demo's layout proves every group of every kind."""
    printed = _run(sys.executable, "-m", "rankmesh", "check", _spec())
    assert printed.splitlines()[-1] == "every group was proved: 125 groups of 20 kinds on 16 ranks (gloo)"
