"""The laws of a diagnosis: over random programs in which one rank makes one mistake, no other rank is held at fault."""

import random
from collections import Counter
from itertools import islice

import pytest
from tests.doctor.planted import Planted
from tests.doctor.programs import Program, Run

import rankmesh as rm
from rankmesh.debug.doctor import diagnose

MESHES = [
    *({"tp": 2, "dp": 2}, {"tp": 2, "dp": 3}, {"tp": 4, "dp": 2}, {"tp": 3, "dp": 3}, {"dp": 4}, {"tp": 2}),
    *({"tp": 2, "dp": 2, "pp": 2}, {"tp": 2, "pp": 2}, {"tp": 1, "dp": 2, "pp": 2}),
]
MISTAKES = ("skip", "swap", "size")


def program(random):
    """A program of 1 to 5 steps of 1 to 4 calls; the last stage may make one or two more in groups of its own."""
    mesh = rm.Mesh(**random.choice(MESHES))
    kinds = [*(axis for axis, size in mesh.axes.items() if size > 1), "world"]
    inner = [kind for kind in kinds if kind not in ("world", "pp")]
    step = tuple((random.choice(kinds), random.choice([4, 4, 8])) for _ in range(random.randint(1, 4)))
    more = random.randint(0, 2) if mesh.axes.get("pp", 1) > 1 else 0
    return Program(mesh, step, tuple((random.choice(inner), 16) for _ in range(more)), random.randint(1, 5))


def runs(seed, mistake, *, goes_on=False):
    """A hundred programs with a mistake that hangs them, and the rank that makes it."""
    chosen = random.Random(seed)  # noqa: S311  - programs, no secrets
    found = 0
    while found < 100:
        one = program(chosen)
        culprit = chosen.randrange(one.mesh.size)
        calls = one.calls(culprit)
        place = chosen.randrange(len(calls) - (mistake == "swap" and len(calls) > 1))
        run = Run(one, culprit, mistake, place, goes_on=goes_on)
        if run.blocked:
            found += 1
            yield culprit, run


@pytest.mark.few(3)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", range(3))
def test_no_innocent_rank_is_at_fault(mistake, seed):
    """2 to 9 ranks, one of which skips, swaps or mismatches a call: it is named, or nobody is held at fault."""
    results = Counter(diagnose(run.recorded(live=True)).at_fault == (culprit,) for culprit, run in runs(seed, mistake))
    for culprit, run in runs(seed, mistake):
        found = diagnose(run.recorded(live=True))
        assert found.causes, run.made
        assert found.at_fault in ((), (culprit,)), (found.verdict, run.made)
    assert results[True] >= {"skip": 60, "swap": 40, "size": 30}[mistake]


@pytest.mark.few(2)
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_programs_do_after_a_call_has_failed_accuses_nobody(mistake, goes_on):
    """The same where calls have timed out, whether programs end by that or catch it and make other calls."""
    for culprit, run in runs(7, mistake, goes_on=goes_on):
        found = diagnose(run.recorded(live=False))
        assert found.causes, run.made
        assert found.at_fault in ((), (culprit,)), (found.verdict, run.made)


@pytest.mark.parametrize("mistake", ["extra", "missing", "different", "repeated", "group"])
def test_the_rank_with_a_planted_call_is_named_or_nobody(mistake):
    """4 to 8 ranks, equal sizes, one or two threads: of 67 jobs that hang, at most 3 are of an unknown culprit."""
    hanging = (job for job in (Planted(seed, mistake) for seed in range(1000)) if job.hangs)
    known = 0
    for number, job in enumerate(islice(hanging, 67)):
        found = diagnose(job.recorded(stacks=number % 3 > 0))
        assert found.causes, job.made
        is_named = found.causes[0].ranks == (job.culprit,)
        assert is_named or (found.at_fault == () and found.causes[0].cause == "crosswise"), (found.verdict, job.made)
        known += is_named
    assert known >= (64 if mistake != "group" else 40)
