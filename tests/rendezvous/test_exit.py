"""The end of a process: whatever our threads are at, it ends as the program says, and not by a signal."""

import json
import subprocess
import sys

import pytest
from tests.limits import LONG
from tests.rendezvous import exits
from tests.sweeping import ALL

# Processes in each state: several in a sweep, as a thread that returns in the wrong moment ends some of them.
NUMBER = 4 if ALL else 1


@pytest.fixture(scope="module")
def ended():
    """The exit statuses of several processes in each state, which the program ends with 7."""
    program = [sys.executable, "-m", "tests.rendezvous.exits", str(NUMBER)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.few(4)
@pytest.mark.long
@pytest.mark.parametrize("state", [state.__name__ for state in exits.STATES])
def test_no_thread_ends_the_process(ended, state):
    """A thread that returns from C++ while Python shuts down would abort it: -6 in place of 7."""
    statuses, written = ended
    assert statuses[state] == [7] * NUMBER, written
