"""What each member of a job with faults at named points runs: a training on whole numbers, checked in each step.

```
w (rows over the first axis)       z (the same, or rows over all: then others keep copies)    q (as z, in uneven parts)
total = sum of z over all ranks    w' = 5 w + total + step, z' = 3 z + row + total, q' = 2 q + total, modulo a prime
```
"""

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
from tests.survival.program import contact_of, regrouping

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
        self.tensors = {name: start[name][rows, None].repeat(1, columns) for name, rows in self.rows.items()}

    def step(self, step):
        """Do a step: a collective over each axis."""
        w, z, q = self.tensors.values()
        total = z.sum(0)
        for axis in self.job.plan.mesh.axes:
            dist.all_reduce(total, group=self.job.groups[axis].pg)
        total /= self.replicas
        w.mul_(5).add_(total + step).remainder_(PRIME)
        z.mul_(3).add_(INDEX[self.rows["z"], None] + total).remainder_(PRIME)
        q.mul_(2).add_(total).remainder_(PRIME)

    def check(self, step):
        """Raise ``AssertionError`` for a wrong number; of no type that the job takes for one of its own."""
        for (name, rows), right in zip(self.rows.items(), reference()[step], strict=True):
            if not (self.tensors[name] == right[rows, None]).all():
                raise AssertionError(f"wrong numbers in {name} at step {step}: {self.tensors[name][:, 0].tolist()}")


def member(me, port, folder, faults, layout, how):
    """One member: what it trained, how it ended, and what it left behind."""
    me.launched(port)
    columns, regroups, joins, pause = (how.pop(name) for name in ("columns", "regroups", "joins", "pause"))
    beside, relayouts = how.pop("beside", ""), dict(how.pop("relayouts", ()))
    if beside == "stranger" and me.rank == me.size - 1:
        contacts = [address.rsplit(":", 1) for address in (contact_of(Path(folder)) or [])[:-1]]
        return stranger([(host, int(port)) for host, port in contacts], seed=port)
    if beside == "stranger":
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(me.size - 1)
    if joins:
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(me.size - 1)
        if me.rank == me.size - 1:
            for name in torchrun_variables(0, 1, local_rank=0, local_world_size=1, port=port):
                del os.environ[name]
            if (contact := contact_of(Path(folder))) is None:
                return None  # the job ended before
            how["join"], os.environ["RANKMESH_JOB_KEY"] = contact
    served_once()
    before = kept()
    neighbours = Neighbours(Path(folder), me.rank) if beside == "neighbours" else None
    faults = [{**one, "launcher": (me.port, port)} for one in faults]
    dying = Faults(me.rank, faults, folder, since=Peers.introduce)
    epochs = []

    def train(job):
        program = Numbers(job, columns, copied=how.get("redundancy"))
        job.hold(program.tensors, program.shardings)
        epochs.append([job.epoch, job.rank, job.step, dict(job.seconds)])
        program.check(job.step)
        if job.rank == 0 and (joins or beside) and not job.epoch:
            everyone = job._session.driver.peers.contacts.values()
            addresses = [f"{one.address}:{one.heartbeat}" for one in everyone] if beside else [job.address]
            (Path(folder) / "contact").write_text(f"{' '.join(addresses)} {job.key}\n", encoding="utf-8")
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
        try:
            program.check(STEPS)
        except AssertionError as error:  # where it stays so, the guard has not seen it
            return str(error)
        return job.rank

    outcome = {}
    try:
        outcome["result"] = rm.survive(regrouping(train) if regroups else train, layout, **how)
    except Exception as error:  # noqa: BLE001  - the test decides which are right
        outcome["error"] = [[one.__name__ for one in type(error).__mro__], str(error)]
    if neighbours:
        outcome |= neighbours.stop()
    return {**left_behind(folder, before), "initialised": dist.is_initialized(), "epochs": epochs, **outcome}
