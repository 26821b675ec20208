"""Processes that hang, die or fail: each in an interpreter of its own, bounded from outside."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch.distributed")

SCRIPT = """
import json, os, time
from bench.processes import run_isolated, run_world
{body}
print(json.dumps([list(outcome.reports), outcome.failure]))
"""


def outcome(body):
    """What a fresh interpreter gets from processes that run ``body``."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_a_process_reports():
    """The report of a process is what its body returned; what it prints is dropped."""
    assert outcome("outcome = run_isolated(lambda: [print('noise'), {'a': 1}][1], limit=20)") == [[{"a": 1}], None]


def test_a_hung_process_is_ended():
    """A process that does not end is killed, and said to have hung."""
    assert outcome("outcome = run_isolated(lambda: time.sleep(600), limit=1)") == [[], "hung after 1 s"]


def test_a_process_that_dies_is_counted():
    """A process that ends without a word is a failure, at once."""
    assert outcome("outcome = run_isolated(lambda: os._exit(3), limit=30)") == [[], "1 of 1 processes died"]


def test_an_error_is_named():
    """The error of a process comes back with its type and first line."""
    assert outcome("outcome = run_isolated(lambda: {}['x'], limit=20)") == [[], "KeyError: 'x'"]


@pytest.mark.long
def test_one_hung_rank_does_not_hold_the_others():
    """A world with one rank that hangs ends at the limit; nobody is left."""
    found = outcome("outcome = run_world(4, lambda rank, store: time.sleep(600 * (rank == 2)) or {'r': rank}, limit=4)")
    assert found == [[], "hung after 4 s"]


@pytest.mark.long
def test_a_world_has_its_ranks():
    """Every rank of a world reports once."""
    reports, failure = outcome("outcome = run_world(4, lambda rank, store: {'rank': rank}, limit=30)")
    assert failure is None
    assert sorted(report["rank"] for report in reports) == [0, 1, 2, 3]
