"""Who is to blame: a rank that is killed or stopped is named, it alone, in every phase, soon after the timeout."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from tests.check.phases import PHASES

TIMEOUT = 2
pytestmark = pytest.mark.skipif(not os.environ.get("RANKMESH_TEST_SWEEP"), reason="a sweep: make test-sweeps runs it")
# The roll call, and what a loaded machine takes longer.
SOON = 10


def sweep(cases, size=None, **how):
    """What came of each case: checks alone, or as a job of ``size`` ranks."""
    asked = {"cases": cases, "arguments": ["tp=2,dp=*", "--timeout", str(TIMEOUT), *([] if size else ["-w", "6"])]}
    command = [sys.executable, "-m", "tests.check.phases", "many", json.dumps({**asked, "size": size, **how})]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, err
    return json.loads(out)


def _blamed(words):
    """The ranks that are named by what the command says at last."""
    named = re.search(r"^error: received no proof from ranks? ([\d, ]+):", words, re.MULTILINE)
    if named is None:
        named = re.search(r"^error: rank \d+(?: of \d+)?: nothing was heard of rank (\d+)", words, re.MULTILINE)
    return named[1] if named else words


def _cases(ranks):
    """Each phase once, with the two signals and these victims in turn; tests/launchers has all of them."""
    signals = ("SIGKILL", "SIGSTOP")
    return [[phase, str(ranks[turn % len(ranks)]), signals[turn % 2]] for turn, phase in enumerate(PHASES)]


def check(outcomes):
    """Every case ended in time, with status 5, and named its victim alone."""
    for one in outcomes:
        case, told = one["case"], [_blamed(words) for words in one["words"] if "error:" in words]
        assert one["seconds"] is not None, f"{case}: the phase was never reached: {one['words']}"
        assert not one["late"], one
        assert set(told) == {case[1]}, (case, one["words"])
        assert set(one["status"].values()) == {5}, one
        assert one["seconds"] < TIMEOUT + SOON, one


def test_ranks_that_are_started_here():
    """6 ranks: killed or stopped in each phase, ranks 0, 3 and 5 in turn; the victim alone is named, with status 5."""
    check(sweep(_cases([5, 0, 3])))


def test_ranks_of_a_job():
    """4 ranks that nobody watches, one of which serves the store: the others name the victim, each with status 5."""
    check(sweep(_cases([1, 0, 3]), size=4))


def test_nobody_is_blamed():
    """6 ranks of which none is harmed: nobody is named, and the status is 0."""
    (outcome,) = sweep([["use", "9", "SIGKILL"]])
    assert outcome["status"] == {"0": 0}
