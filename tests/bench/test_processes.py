"""Processes that hang, die or fail: in an interpreter of its own, which forks them, bounded from outside."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch.distributed")

SCRIPT = """
import json, os, time
from bench.processes import run_isolated, run_world
print(json.dumps([[list(outcome.reports), outcome.failure] for outcome in {outcomes}]))
"""


def ended(*calls):
    """What a fresh interpreter gets from processes: the reports and the failure of each call."""
    program = SCRIPT.format(outcomes=f"[{', '.join(calls)}]")
    command = [sys.executable, "-c", program]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout)


def test_one_process():
    """One reports, one hangs, one dies and one fails: what is printed is dropped, and nobody is left."""
    found = ended(
        "run_isolated(lambda: [print('noise'), {'a': 1}][1], limit=200)",
        "run_isolated(lambda: time.sleep(600), limit=1)",
        "run_isolated(lambda: os._exit(3), limit=200)",
        "run_isolated(lambda: {}['x'], limit=200)",
    )
    failures = ["hung after 1 s", "1 of 1 processes died", "KeyError: 'x'"]
    assert found == [[[{"a": 1}], None], *([[], failure] for failure in failures)]


@pytest.mark.nightly
def test_a_world():
    """Four gloo ranks: each reports once; with one that hangs, the world ends at the limit."""
    whole, hung = ended(
        "run_world(4, lambda rank, store: {'rank': rank}, limit=200)",
        "run_world(4, lambda rank, store: time.sleep(600 * (rank == 2)) or {'rank': rank}, limit=4)",
    )
    assert whole[1] is None
    assert sorted(report["rank"] for report in whole[0]) == [0, 1, 2, 3]
    assert hung == [[], "hung after 4 s"]
