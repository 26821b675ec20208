"""What each rank of these tests runs: a short training under one layout."""

import os
import re
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from examples.train_gpt.gpt.layout import Refused, Sizes, of
from examples.train_gpt.gpt.loop import GROUPS, Run, Trainer
from examples.train_gpt.gpt.model import Shape
from examples.train_gpt.gpt.optimizer import MOMENTS
from examples.train_gpt.gpt.survive import survive
from tests.sockets import kept, served_once
from tests.survival.faults import Faults, left_behind

import rankmesh as rm
from rankmesh.core.source import read_plan
from rankmesh.survival import Job

SHAPE = Shape(layers=4, hidden=16, heads=2, experts=4, top=2, sequence=16, batch=8)
# Every step is clipped, so that a wrong norm shows in the losses.
TINY = Run(SHAPE, steps=4, rate=0.01, clip=0.25, dtype="float64")
# Data-parallel sizes of 4, 3, 2 and 1 divide the batch.
SURVIVES = replace(TINY, shape=replace(SHAPE, batch=24), steps=6)


@contextmanager
def trainer(world_size, layout, message="rankmesh", run=TINY):
    """A trainer under a layout, in a world that exists."""
    sizes = Sizes.parse(layout, world_size)
    run.shape.check(sizes)
    with GROUPS[message](sizes) as groups:
        yield Trainer(run, groups, torch.device("cpu"))


def arguments_of(steps):
    """Loss and norm of each step, as plain data."""
    return [(step.loss, step.norm) for step in steps]


def train(me, layout, message="rankmesh", dtype="float64"):
    """A whole training."""
    with trainer(me.size, layout, message, replace(TINY, dtype=dtype)) as here:
        return arguments_of(here.steps())


def train_one(me, hidden, heads, sequence, steps):
    """A whole training of the command's defaults but for these sizes."""
    run = Run(Shape(hidden=hidden, heads=heads, sequence=sequence), steps=steps, dtype="float64")
    with trainer(1, "", run=run) as here:
        return arguments_of(here.steps())


def train_in_words(me, *cases):
    """One training after the other, each a layout in somebody's words."""
    return [train(me, layout, message) for message, layout in cases]


def train_and_save(me, layout, folder, steps):
    """The first steps of a run, and a checkpoint."""
    with trainer(me.size, layout, run=replace(TINY, steps=steps)) as here:
        result = arguments_of(here.steps())
        here.save(Path(folder), steps)
        return result


def resume(me, layout, folder):
    """The steps that are left, and a checkpoint after them."""
    with trainer(me.size, layout) as here:
        result = arguments_of(here.steps(here.resume(Path(folder))))
        here.save(Path(folder), TINY.steps)
        return result


def restarted(me, parts):
    """Loss and norm of each step on rank 0, where each part, (steps, layout), starts from the state after the last."""
    found, state, before = [], {}, None
    for steps, layout in parts:
        plan = read_plan(f"megatron:{layout}").replace(world_size=None)
        has_rank = me.rank < plan.mesh.size
        with rm.connect(plan) if has_rank else nullcontext() as groups:
            here = Trainer(SURVIVES, of(groups), torch.device("cpu")) if has_rank else None
            shardings = [here and here.shardings]
            dist.broadcast_object_list(shardings)
            into = here.state() if here else {}
            if before is not None:
                rm.Transfer(before, shardings[0]).run(state, into)
            start = len(found)
            if here and start:
                here.restore(start)
            found += arguments_of(here.step(index) for index in range(start, start + steps)) if here else [None] * steps
            state, before = here.state() if here else {}, shardings[0]
    return found


def shard_sizes(me, layout):
    """The elements that this rank holds of each weight and moment; every moment is part of Adam's own tensor."""
    with trainer(me.size, layout) as here:
        next(here.steps())
        state, adams = here.state(), [share.adam.state[share.part] for share in here.optimizer.shares]
        memory = {adam[moment].untyped_storage().data_ptr() for adam in adams for moment in MOMENTS}
        assert memory == {one.untyped_storage().data_ptr() for name, one in state.items() if name.endswith(MOMENTS)}
        return {name: sharding.of(me.rank).size for name, sharding in here.shardings.items()}


def survives(me, port, folder, deaths, layout, spares, shrink, changes=(), redundancy=1):
    """One member of a training in a job that survives: sizes and steps, on the first rank; and what it leaves.

    ``sizes`` has, of each epoch in which it had a rank, the step at which that began and its data-parallel size;
    ``oldest`` the first epoch of which the store of this member had keys then.
    """
    me.launched(port)
    time.sleep(0.1)  # and its connection is there
    served_once()
    before, dying, sizes, oldest = kept(), Faults(me.rank, deaths, folder), {}, {}
    step, hold = Trainer.step, Job.hold

    def dies(self, index):
        dying.step(index)
        return step(self, index)

    def hooked(self, *state):
        hold(self, *state)
        sizes[self.epoch] = self.step, self.plan.mesh.axes["dp"]
        oldest[self.epoch] = _oldest_key(self)

    Trainer.step, Job.hold = dies, hooked
    found = survive(SURVIVES, layout, spares, shrink, 5.0, lambda *_: None, dict(changes), redundancy)
    outcome = None if found is None else [str(found[0]), arguments_of(found[1])]
    return {"outcome": outcome, "sizes": sizes, "oldest": oldest, **left_behind(folder, before), "pid": os.getpid()}


def _oldest_key(job):
    """The first epoch of which there are keys in the store that this process serves, as far as torch lists them."""
    store = job._session.driver.peers._server
    keys = store.list_keys() if hasattr(store, "list_keys") else []
    return min((int(found[1]) for key in keys if (found := re.search(r"epoch/(\d+)", key))), default=job.epoch)


def refused_checkpoints(me, folder):
    """What is said to resuming from nothing, as another model, and from a checkpoint that has lost a file."""
    place = Path(folder)
    with trainer(1, "") as here:
        output = [me.error(Refused, here.resume, place / "nothing")]
        next(here.steps())
        here.save(place, 1)
    with trainer(1, "", run=replace(TINY, shape=replace(SHAPE, layers=2))) as here:
        output.append(me.error(Refused, here.resume, place))
    (place / "step-000001" / "rank-00000.safetensors").unlink()
    with trainer(1, "") as here:
        output.append(me.error(Refused, here.resume, place))
    return [error["message"] for error in output]
