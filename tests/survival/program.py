"""What each member of these tests runs: a training on whole numbers, checked in each step, and faults.

```
w (rows over the first axis)       z (the same, or rows over all: then others keep copies)    q (as z, in uneven parts)
total = sum of z over all ranks    w' = 5 w + total + step, z' = 3 z + row + total, q' = 2 q + total, modulo a prime
```
"""

import json
import os
import time
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from tests.sockets import kept, served_once
from tests.survival.faults import Faults, left_behind
from tests.survival.neighbours import Neighbours, stranger

import rankmesh as rm
from rankmesh.launch.table import torchrun_variables
from rankmesh.survival.peers import Peers

ROWS, STEPS, MANY, PRIME = 60, 8, 30, 1009
# The rows that a rank has, whatever the number of ranks is: the numbers do not depend on it.
INDEX = torch.arange(ROWS, dtype=torch.float64)


@cache
def reference():
    """The rows of w, z and q at the beginning of each step, on one process."""
    found = [(INDEX, 7 * INDEX, 11 * INDEX)]
    for step in range(MANY):
        w, z, q = found[-1]
        total = z.sum()
        found.append(((5 * w + total + step) % PRIME, (3 * z + INDEX + total) % PRIME, (2 * q + total) % PRIME))
    return found


class Numbers:
    """A rank's part of the state, in an epoch."""

    def __init__(self, job, columns=1, *, copied=True):
        mesh, self.job = job.plan.mesh, job
        first, *others = mesh.axes
        each = "-".join(mesh.axes) if copied else first
        self.replicas = 1 if copied else prod(mesh.axes[axis] for axis in others)
        how = {"shape": (ROWS, columns), "dtype": "float64"}
        self.shardings = {
            "w": rm.Sharding(mesh, (first, None), **how),
            "z": rm.Sharding(mesh, (each, None), **how),
            "q": rm.Sharding(mesh, (each, None), **how, parts={0: (7, 40, 13)}),
        }
        self.rows = {
            name: torch.cat([torch.arange(*box[0]) for box in one.of(job.rank).boxes])
            for name, one in self.shardings.items()
        }
        start = dict(zip("wzq", reference()[0], strict=True))
        self.tensors = {
            name: start[name][rows, None].repeat(1, columns).to(job.device) for name, rows in self.rows.items()
        }

    def step(self, step):
        """Do a step: a sum over each axis."""
        w, z, q = self.tensors.values()
        total = z.sum(0)
        for axis in self.job.plan.mesh.axes:
            (self._pass if axis == "pp" else self._reduce)(total, self.job.groups[axis])
        total /= self.replicas
        w.mul_(5).add_(total + step).remainder_(PRIME)
        z.mul_(3).add_(INDEX[self.rows["z"], None].to(z.device) + total).remainder_(PRIME)
        q.mul_(2).add_(total).remainder_(PRIME)

    @staticmethod
    def _reduce(total, group):
        dist.all_reduce(total, group=group.pg)

    @staticmethod
    def _pass(total, group):
        """Sum from stage to stage, and back, as a pipeline does."""
        before, after = group.ranks[: group.rank][-1:], group.ranks[group.rank + 1 :][:1]
        part = torch.zeros_like(total)
        for rank in before:
            dist.recv(part, rank, group=group.pg)
        total += part
        for rank in after:
            dist.send(total, rank, group=group.pg)
            dist.recv(total, rank, group=group.pg)
        for rank in before:
            dist.send(total, rank, group=group.pg)

    def check(self, step):
        """Raise ``AssertionError`` for a wrong number; of no type that the job takes for one of its own."""
        for (name, rows), right in zip(self.rows.items(), reference()[step], strict=True):
            if not (self.tensors[name].cpu() == right[rows, None]).all():
                raise AssertionError(f"wrong numbers in {name} at step {step}: {self.tensors[name][:, 0].tolist()}")


def regrouping(train):
    """Return a ``train`` that catches the error of a loss itself, and goes on with ``job.regroup``."""

    def train_on(job):
        while True:
            try:
                return train(job)
            except RuntimeError:  # noqa: PERF203  - a loop of attempts
                job.groups.abort()
                job.regroup()

    return train_on


def member(me, port, folder, faults, layout, how):
    """One member: how it ended, its rank if that was with the right numbers, and what it left behind.

    ``joins``: the last one starts later, "after" the plan has shrunk, or "before" a loss.
    """
    me.launched(port)
    time.sleep(0.1)  # and its connection is there
    columns, regroups, pause = how.pop("columns", 1), how.pop("regroups", False), how.pop("pause", 0.0)
    joins, beside, relayouts = how.pop("joins", ""), how.pop("beside", ""), dict(how.pop("relayouts", ()))
    folder, is_last = Path(folder), me.rank == me.size - 1
    if beside == "stranger" and is_last:
        contacts = [address.rsplit(":", 1) for address in (contact_of(folder) or [])[:-1]]
        return stranger([(host, int(port)) for host, port in contacts], seed=port)
    if beside == "stranger" or joins:
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(me.size - 1)
    if joins and is_last:
        for name in torchrun_variables(0, 1, local_rank=0, local_world_size=1, port=port):
            del os.environ[name]
        if (contact := contact_of(folder)) is None:
            return None  # the job ended before
        how["join"], os.environ["RANKMESH_JOB_KEY"] = contact
    served_once()
    before = kept()
    neighbours = Neighbours(folder, me.rank) if beside == "neighbours" else None
    faults = [{**one, "launcher": (me.port, port)} for one in faults]
    begins = any(one["at"] == "gather" for one in faults)
    dying = Faults(me.rank, faults, folder, since=None if begins else Peers.introduce)
    history = []

    def train(job):
        program = Numbers(job, columns, copied=how.get("redundancy"))
        job.hold(program.tensors, program.shardings)
        history.append([job.epoch, job.rank, job.step, job.plan.mesh.size, dict(job.seconds)])
        program.check(job.step)
        if job.rank == 0 and (beside or joins == "before" or (joins and job.epoch)):
            everyone = job._session.driver.peers.contacts.values()
            addresses = [f"{one.address}:{one.heartbeat}" for one in everyone] if beside else [job.address]
            (folder / "contact").write_text(f"{' '.join(addresses)} {job.key}\n", encoding="utf-8")
        batches = neighbours.loader() if neighbours else None
        for step in range(job.step, STEPS):
            if batches:
                next(batches)
            dying.step(step)
            time.sleep(pause)
            program.step(step)
            if dying.flips:
                dying.flips = False
                program.tensors["w"][-1, -1] += 1
            elif not how.get("guard"):
                program.check(step + 1)
            job.commit(step + 1)
            if step + 1 in relayouts:
                with suppress(rm.PlanError):  # of as many ranks as it does not fit
                    job.relayout(relayouts[step + 1])
        (folder / f"trained-{me.rank}").touch()
        try:
            program.check(STEPS)
        except AssertionError as error:  # where it stays so, the guard has not seen it
            return str(error)
        return job.rank

    outcome = {}
    try:
        outcome["result"] = rm.survive(regrouping(train) if regroups else train, layout, **how)
    except Exception as error:  # noqa: BLE001  - the test decides which are right
        outcome["error"] = f"{type(error).__name__}: {error}"
        outcome["kinds"] = [one.__name__ for one in type(error).__mro__]
    if neighbours:
        outcome |= neighbours.stop()
    return {**left_behind(folder, before), "initialised": dist.is_initialized(), "history": history, **outcome}


def contact_of(folder):
    """Where a rank of the job is reached, and the job's key, as soon as one has written it; None if none does."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with suppress(OSError):
            if (text := (folder / "contact").read_text(encoding="utf-8")).endswith("\n"):
                return text.split()
        time.sleep(0.02)
    return None


def text_of(outcomes):
    """For a failing test: how each member ended."""
    return json.dumps([[one.rank, one.code, one.value or one.error] for one in outcomes])[:8000]
