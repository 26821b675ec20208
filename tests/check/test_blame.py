"""Who is to blame: a rank that is killed or stopped is named, it alone, in every phase, soon after the timeout."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import product

import pytest
from tests.check.phases import PHASES
from tests.limits import RESOLVER

TIMEOUT = 4
ASKED = os.environ.get("RANKMESH_TEST_SWEEP")
pytestmark = pytest.mark.skipif(not ASKED, reason="a sweep: make test-sweeps runs it")
# The probe, and what a loaded machine takes longer.
SOON = 20


def sweep(cases, size=None, **how):
    """What came of each case: checks alone, or as a job of ``size`` ranks."""
    requested = {"cases": cases, "arguments": ["tp=2,dp=*", "--timeout", str(TIMEOUT), *([] if size else ["-w", "6"])]}
    command = [sys.executable, "-m", "tests.check.phases", "many", json.dumps({**requested, "size": size, **how})]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **RESOLVER},
    ) as process:
        try:
            out, err = process.communicate(timeout=30 * len(cases))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, err
    return json.loads(out)


def _blamed(message):
    """The ranks that are named by what the command says at last."""
    named = re.search(r"^error: lost ranks? ([\d, ]+):", message, re.MULTILINE)
    if named is None:
        named = re.search(r"^error: rank \d+(?: of \d+)?: no response from rank (\d+)", message, re.MULTILINE)
    return named[1] if named else message


def _cases(ranks):
    """Each phase once, with the two signals and these victims in turn; where all are asked for, each with each."""
    signals = ("SIGKILL", "SIGSTOP")
    if ASKED == "all":
        return [[phase, str(rank), number] for phase, rank, number in product(PHASES, sorted(ranks), signals)]
    return [[phase, str(ranks[turn % len(ranks)]), signals[turn % 2]] for turn, phase in enumerate(PHASES)]


def _wrong(one):
    """What a case was to do and has not: be over in time, with status 5, and name its victim alone."""
    result = {_blamed(message) for message in one["words"] if "error:" in message}
    if one["seconds"] is None:
        return "the phase was never reached"
    if one["late"] or one["seconds"] > TIMEOUT + SOON:
        return f"took {one['seconds']:.1f} s"
    if result != {one["case"][1]}:
        return f"blames {result}"
    return "" if set(one["status"].values()) == {5} else f"ends with {one['status']}"


def check(outcomes):
    """Nothing is wrong with any case."""
    wrong = [(*one["case"], _wrong(one), one["words"]) for one in outcomes if _wrong(one)]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}: {wrong}"


@pytest.mark.timeout(900)
def test_ranks_that_are_started_here():
    """6 ranks: killed or stopped in each phase, ranks 0, 3 and 5 in turn; the victim alone is named, with status 5."""
    check(sweep(_cases([5, 0, 3])))


@pytest.mark.timeout(900)
def test_ranks_of_a_job():
    """4 ranks that nobody watches, one of which serves the store: the others name the victim, each with status 5."""
    check(sweep(_cases([1, 0, 3]), size=4))


def test_nobody_is_blamed():
    """6 ranks of which none is harmed: nobody is named, and the status is 0."""
    (outcome,) = sweep([["use", "9", "SIGKILL"]])
    assert outcome["status"] == {"0": 0}
