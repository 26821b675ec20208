"""The whole sweep of tests/check/test_blame.py: every phase, several victims, both signals."""

from itertools import product

from tests.check.phases import PHASES
from tests.check.test_blame import check, sweep
from tests.launchers.conftest import needs

CASES = [list(case) for case in product(PHASES, ("0", "3", "5"), ("SIGKILL", "SIGSTOP"))]


def test_every_phase_here():
    """6 ranks: each phase, victims 0, 3 and 5, killed and stopped: the victim alone is named, in time."""
    needs("a sweep of 42 checks")
    check(sweep(CASES, at_once=4))


def test_every_phase_of_a_job():
    """4 ranks of a job: each phase, victims 0 and 3, killed and stopped: the others name the victim alone, in time."""
    needs("a sweep of 28 checks")
    check(sweep([case for case in CASES if case[1] != "5"], size=4, at_once=4))
