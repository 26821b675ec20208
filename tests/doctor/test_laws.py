"""The laws of a diagnosis: over random programs in which one rank makes one mistake, no other rank is held at fault."""

from collections import Counter
from itertools import islice
from random import Random

import pytest
from tests.doctor.programs import planted, sized

from rankmesh.debug.doctor import diagnose

MISTAKES = ("skip", "swap", "size")


def hanging(seed, mistake, *, goes_on=False):
    """A hundred programs with a mistake that hangs them."""
    chosen = Random(seed)  # noqa: S311  - programs, no secrets
    return islice((job for job in iter(lambda: sized(chosen, mistake, goes_on=goes_on), None) if job.hangs), 100)


@pytest.mark.few(3)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", range(3))
def test_no_innocent_rank_is_at_fault(mistake, seed):
    """2 to 9 ranks, one of which skips, swaps or mismatches a call: it is named, or nobody is held at fault."""
    results = Counter[bool]()
    for job in hanging(seed, mistake):
        found = diagnose(job.recorded())
        assert found.causes, job.made
        assert found.at_fault in ((), (job.culprit,)), (found.verdict, job.made)
        results[found.at_fault == (job.culprit,)] += 1
    assert results[True] >= {"skip": 60, "swap": 40, "size": 30}[mistake]


@pytest.mark.few(2)
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_programs_do_after_a_call_has_failed_accuses_nobody(mistake, goes_on):
    """The same where calls have timed out, whether programs end by that or catch it and make other calls."""
    for job in hanging(7, mistake, goes_on=goes_on):
        found = diagnose(job.recorded(live=False))
        assert found.causes, job.made
        assert found.at_fault in ((), (job.culprit,)), (found.verdict, job.made)


@pytest.mark.parametrize("mistake", ["extra", "missing", "different", "repeated", "group"])
def test_the_rank_with_a_planted_call_is_named_or_nobody(mistake):
    """4 to 8 ranks, equal sizes, one or two threads: of 67 jobs that hang, at most 3 are of an unknown culprit."""
    jobs = (job for job in (planted(seed, mistake) for seed in range(1000)) if job.hangs)
    known = 0
    for number, job in enumerate(islice(jobs, 67)):
        found = diagnose(job.recorded(stacks=number % 3 > 0))
        assert found.causes, job.made
        is_named = found.causes[0].ranks == (job.culprit,)
        assert is_named or (found.at_fault == () and found.causes[0].cause == "crosswise"), (found.verdict, job.made)
        known += is_named
    assert known >= (64 if mistake != "group" else 40)
