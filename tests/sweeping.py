"""Whether a test takes all cases or some: ``make test-sweeps SWEEP=all`` takes them all."""

import os

ALL = os.environ.get("RANKMESH_TEST_SWEEP") == "all"


def every(step, cases):
    """All cases in a sweep of all; else every ``step``-th, the first among them."""
    cases = list(cases)
    return cases if ALL else cases[::step]
