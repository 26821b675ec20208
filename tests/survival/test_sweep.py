"""Random jobs of simulated members: faults in any two of them, at any call; right numbers, or an error of ours.

``RANKMESH_SEEDS=17,42 pytest tests/survival/test_sweep.py`` repeats what failed: each failure names its seed.
"""

import errno
import os
import random
from collections import Counter

import pytest
from tests.survival.program import STEPS, Numbers
from tests.sweeping import ALL

import rankmesh as rm
from rankmesh import sim
from rankmesh.core import recipes
from rankmesh.sim.scheduler import Scheduler
from rankmesh.sim.simulation import current_context

CHOSEN = os.environ.get("RANKMESH_SEEDS", "")
# How many jobs: in make test, in make test-sweeps, with SWEEP=all.
JOBS = 1000 if ALL else 200 if os.environ.get("RANKMESH_TEST_SWEEP") else 12
LAYOUTS = ("tp=1,dp=2", "tp=1,dp=3", "tp=2,dp=2", "tp=2,dp=3")
KINDS = ("call", "call", "call", "call", "flip", "flip", "full", "full", "ask")


def drawn(seed):
    """A job: layout, spares, options of survive, the order of its members, and the faults of up to two of them."""
    pick = random.Random(seed)  # noqa: S311  - faults, no secrets
    layout, spares = pick.choice(LAYOUTS), pick.randint(0, 3)
    mesh = rm.Mesh.parse(layout)
    how = {"guard": pick.choice([None, 1, 2, 3]), "redundancy": pick.choice([0, 1])}
    how["shrink"] = "dp" if pick.random() < 0.4 else None
    found = []
    for member in pick.sample(range(mesh.size + spares), k=pick.choice([1, 2, 2])):
        for _ in range(pick.choice([1, 1, 2])):
            kind = pick.choice(KINDS)
            fault = {"member": member, "kind": kind, "step": pick.randrange(STEPS)}
            fault |= {"call": pick.randint(1, 900), "once": kind in ("flip", "ask") or pick.random() < 0.5}
            fault["layout"] = pick.choice([layout, "tp=1,dp=2", "tp=2,dp=1", "tp=1,dp=4", "tp=2,dp=2"])
            if kind != "flip" or how["guard"]:  # without a guard nothing compares numbers
                found.append(fault)
    order = pick.choice(["deterministic", pick.randrange(1000)])
    return layout, spares, how, order, found


def _training(found, redundancy):
    done = []

    def is_due(fault, job, step):
        """Whether a fault comes in this step, at a rank, whoever has it; one that comes once is not repeated."""
        if (fault["member"], fault["step"]) != (job.rank, step):
            return False
        is_first = id(fault) not in done
        done.append(id(fault))
        return is_first or not fault["once"]

    def train(job):
        program = Numbers(job, copied=redundancy)
        job.hold(program.tensors, program.shardings)
        for step in range(job.step, STEPS):
            for fault in found:
                # A wrong number without a replica is noticed by nobody.
                if fault["kind"] == "flip" and job.groups["dp"].size > 1 and is_due(fault, job, step):
                    program.tensors["w"].view(-1)[0] += 1
                elif fault["kind"] == "full" and is_due(fault, job, step):
                    raise OSError(errno.ENOSPC, "no space is left", f"/checkpoints/{step}")
                elif fault["kind"] == "ask" and is_due(fault, job, step):
                    _ask(job, fault["layout"])
            program.step(step)
            job.commit(step + 1)
        try:
            program.check(STEPS)
        except AssertionError as error:
            return str(error)
        return job.rank

    return train


def _losing(lose):
    """Have members end at their n-th call that others may notice, in simulated ranks."""
    check, counts, within = Scheduler.check, Counter(), []

    def checked(self, rank):
        check(self, rank)
        if within:
            return
        within.append(True)
        try:
            context = current_context()
        finally:
            within.pop()
        if context is not None and context.rank == rank:
            counts[rank] += 1
            if lose.get(rank) == counts[rank]:
                context.simulation.members.lost([rank])

    return checked


def _ask(job, layout):
    """What ``rankmesh ask`` sends to this member."""
    plan = recipes.axes(rm.Mesh.parse(layout))
    job._session.driver.peers._reply({"what": "relayout", "sizes": {"spec": layout, "plan": plan.to_json()}})


def _jobs():
    return [int(one) for one in CHOSEN.split(",")] if CHOSEN else range(JOBS)


@pytest.mark.parametrize("seed", _jobs())
def test_faults_in_any_two_members(seed, monkeypatch):
    """Deaths, wrong numbers, full disks and requests: nobody is left waiting, and what is returned is right."""
    layout, spares, how, order, found = drawn(seed)
    size = rm.Mesh.parse(layout).size + spares
    calls = {fault["member"]: fault["call"] for fault in found if fault["kind"] == "call"}
    monkeypatch.setattr(Scheduler, "check", _losing(calls))
    train = _training(found, how["redundancy"])
    values = sim.run(
        lambda: rm.survive(train, layout, spares=spares, **how),
        size,
        order=order,
        initialise=False,
        return_exceptions=True,
    )
    why = f"seed {seed}: {layout}, {spares} spares, {how}, order {order}, {found}: {values}"
    for value in values:
        if isinstance(value, BaseException):
            ours = isinstance(value, rm.RankmeshError) and not type(value).__module__.startswith("rankmesh.sim")
            full = isinstance(value, OSError) and any(fault["kind"] == "full" for fault in found)
            assert ours or full, why
    assert not any(isinstance(value, str) for value in values), why
    results = [value for value in values if isinstance(value, int)]
    assert len({*results}) == len(results), why
    assert results or any(isinstance(value, BaseException) for value in values), why
