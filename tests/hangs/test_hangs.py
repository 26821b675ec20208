"""Real hangs: of every program the rank, the group and the cause are named, from recordings and in a new run.

``make test`` reads the recordings that are kept and runs one program; ``make test-hangs`` runs them all, and
``HANGS=dies,is_stopped`` runs these. In a job that survives, ``evict=True``, each of them leaves out nobody else.
"""

import json
import os
import subprocess
import sys

import pytest
from tests.hangs.keep import HERE, KEPT, KEPT_ON_NCCL, KEPT_TIMED_OUT
from tests.hangs.programs import HANGS, ON_NCCL
from tests.hangs.running import SEPARATE
from tests.hangs.timed_out import TIMED_OUT

from rankmesh.debug.doctor import CAUSES, doctor
from rankmesh.readers.source import read

# What a few seconds allow; the others run where they are asked for.
FEW = ("skips_a_call",)
ASKED = os.environ.get("HANGS", "")
CHOSEN = sorted(HANGS) if ASKED == "all" else [name for name in ASKED.split(",") if name] or FEW
# In jobs that survive each program takes longer: of some programs, one in four.
EVICTED = CHOSEN if ASKED == "all" else CHOSEN[::4]


def _found(folder, hang):
    return doctor(folder, read(hang.spec).plan if hang.spec else None)


def _check(found, hang):
    """The first cause is the one that is known, and says the call."""
    assert found.causes, found.to_dict()
    first = found.causes[0]
    assert first.cause == hang.cause, found.verdict
    assert first.group.label in hang.group.split("|"), found.verdict
    ranks = sorted({rank for cause in found.causes if cause.cause == hang.cause for rank in cause.ranks})
    assert tuple(ranks) == hang.ranks, found.verdict
    assert first.operation == hang.operation
    assert first.call > 0
    of_all = hang.cause in ("crosswise", "stuck") or len(hang.ranks) == hang.size
    assert of_all or set(found.waiting) - set(hang.ranks)


def test_every_cause_has_its_hang():
    """There are more than fifteen hangs, some for every cause, each with its recordings."""
    assert {hang.cause for hang in HANGS.values()} == set(CAUSES)
    assert len(HANGS) > 15
    assert {folder.name for folder in KEPT.iterdir()} == set(HANGS)


# Of processes over gloo; of ranks that shared a GPU, whose calls the device had not come to; and, without a watch,
# what torch wrote once the errors were caught.
ALL = [(KEPT, HANGS), (KEPT_ON_NCCL, ON_NCCL), (KEPT_TIMED_OUT, TIMED_OUT)]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("place", "hang"), [(kept / name, hangs[name]) for kept, hangs in ALL for name in sorted(hangs)]
)
def test_kept_recordings(place, hang):
    """4 to 16 ranks: the first cause is the program's mistake; at fault are those that it makes late, of two none."""
    found = _found(place, hang)
    _check(found, hang)
    assert found.at_fault in ((), hang.ranks)
    assert bool(found.at_fault) is (hang.cause in ("dead", "absent", "late")) or hang.cause in ("different", "order")


def test_where_a_rank_first_left_the_order_of_its_peers():
    """8 ranks: one leaves out a call of many equal ones; the verdict has the lines where the orders part."""
    for name, words in (
        (
            "skips_among_equals",
            "the orders part at call 5 of world: ranks 0, 1, 2, 3, 4, 6, 7 made all_reduce at tests/",
        ),
        ("skips_among_equals", "rank 5 made 1 call less; operations differ at call 10 of world"),
        ("skips_one_of_many", "the orders part at call 4 of dp@pp1,tp1: rank 5 made all_reduce at tests/"),
        ("skips_in_plain_groups", "the orders part at call 3 of dp@pp1,tp1: rank 5 made all_reduce at tests/"),
    ):
        assert words in _found(KEPT_TIMED_OUT / name, TIMED_OUT[name]).verdict


@pytest.mark.parametrize("spec", ["", "tp=2,dp=2"])
def test_what_torch_itself_writes_of_nccl(spec):
    """4 ranks on a GPU, no watch: the files that torch left when its watchdog gave up name rank 3 and its group."""
    found = doctor(HERE / "recordings_torch_nccl", read(spec).plan if spec else None)
    first = found.causes[0]
    assert (first.cause, first.ranks, first.group.label, first.call) == ("late", (3,), "dp@tp1", 4)
    assert found.waiting == (0, 1, 2)


STATES = {"is_stopped": "stopped by a signal", "holds_the_interpreter": "alive and silent, at "}


@pytest.mark.parametrize(("name", "message"), STATES.items())
def test_what_an_unresponsive_rank_looks_like(name, message):
    """4 ranks, recorded: others of its host looked at the rank that could not speak, as the verdict says."""
    assert f"left no recording ({message}" in _found(KEPT / name, HANGS[name]).verdict


def _run(module, names, folder, limit):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, str(folder), *filter(_can_run, names)]
    subprocess.run(command, check=True, timeout=limit, env=environment, cwd=KEPT.parents[2])
    return folder


def _can_run(name):
    return name not in SEPARATE or os.geteuid() == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_new_runs(subtests, tmp_path):
    """4 to 16 ranks, the chosen programs, by one process that loads torch once: each is watched until its verdict."""
    _run("tests.hangs.running", CHOSEN, tmp_path, 550)
    for name in filter(_can_run, CHOSEN):
        with subtests.test(name):
            _check(_found(tmp_path / name, HANGS[name]), HANGS[name])


# Gloo ends the process that receives more than it asked for, whosever mistake it is.
ENDED_BY_GLOO = ("another_size", "another_dtype")


@pytest.mark.long
@pytest.mark.timeout(3100)
def test_no_innocent_rank_is_evicted(subtests, tmp_path):
    """4 to 20 ranks, run now with evict=True: only ranks at fault are left out, and the others go on and return."""
    _run("tests.hangs.evicting", EVICTED, tmp_path, 3000)
    for name in filter(_can_run, EVICTED):
        with subtests.test(name):
            _check_evicted(name, tmp_path / name)


def _check_evicted(name, folder):
    hang, about = HANGS[name], json.loads((folder / "job.json").read_text())
    reports = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")}
    everyone = set(range(about["members"]))
    assert everyone - set(about["ended"]) <= set(hang.ranks), about
    if name in SEPARATE:  # there is nobody left to go on with
        errors = {member: value.get("error", "") for member, value in reports.items()}
        assert all(error.startswith("ConnectError: the job ends") for error in errors.values()), errors
        return
    errors = {member: value["error"] for member, value in reports.items() if "error" in value}
    assert errors.keys() <= set(hang.ranks), errors
    ended = everyone - reports.keys() - set(hang.ranks)
    assert not ended or name in ENDED_BY_GLOO, ended
    returned = {member: value["result"] for member, value in reports.items() if value.get("result") is not None}
    assert set(returned.values()) == {3.0}
    assert all(reports[member]["epochs"][-1][0] >= 1 for member in returned), reports
    if hang.cause in ("dead", "late", "absent"):
        assert not returned.keys() & set(hang.ranks), reports
        assert everyone - set(hang.ranks) == returned.keys(), reports
    if hang.cause == "crosswise":  # nobody is at fault alone, and the same members take the step again
        assert not errors
        assert everyone.intersection(range(hang.size)) == returned.keys(), reports
