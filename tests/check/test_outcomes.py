"""``rankmesh check`` that waits too long ends with a verdict: who is why, by the recordings of its ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import LONG

SABOTAGE = Path(__file__).with_name("sabotage.py")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")
pytestmark = pytest.mark.skipif("HANGS" not in os.environ, reason="make test-hangs runs it: it takes long")


def _checked(*arguments, how="loops"):
    """The data and the words of a check of 8 ranks in which rank 3 goes wrong at its third group."""
    command = [sys.executable, *arguments, str(SABOTAGE), how, "--timeout", "8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    return json.loads(done.stdout), done.stderr


def test_a_rank_that_loops():
    """8 ranks started here, one in a loop of Python: the data has the verdict, with its line; the words end with it."""
    data, message = _checked()
    assert data["ok"] is False
    assert data["verdict"].startswith("late: rank 3 behind by 1 call of ")
    assert "sabotage.py" in data["verdict"]
    assert message.rstrip().endswith(f"; by the recordings: {data['verdict']}")


def test_a_rank_that_is_stopped():
    """8 ranks started here, one is stopped: it is the one that is lost, and the verdict says that it is stopped."""
    data, _ = _checked(how="stops")
    assert [failure["rank"] for failure in data["failures"]] == [3]
    assert data["verdict"].startswith("dead: rank 3 left no recording (stopped by a signal); ")


def test_in_a_job():
    """8 ranks of torchrun, one in a loop of Python: the verdict is in the result that rank 0 writes."""
    data, _ = _checked(*LAUNCH)
    assert data["verdict"].startswith("late: rank 3 behind by 1 call of ")
    assert "sabotage.py" in data["verdict"]
