"""What each member of these tests runs: a small training on tp, dp and pp, and deaths at moments that are named.

```
stage 0   w0, m0 (rows over tp, whole over dp)  ── activations ──>  stage 1   w1, m1  ── loss ──> all
```
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from tests.sockets import kept, served_once
from tests.survival.faults import Faults, left_behind

import rankmesh as rm
from rankmesh.launch.table import torchrun_variables

ROWS, COLUMNS, BATCH = 8, 4, 24


def started(stage, size=ROWS):
    """The first weights of a stage."""
    return torch.randn(size, COLUMNS, generator=torch.Generator().manual_seed(stage), dtype=torch.float64)


def batch(step):
    """The whole batch of a step."""
    return torch.randn(BATCH, COLUMNS, generator=torch.Generator().manual_seed(1000 + step), dtype=torch.float64)


def shardings(mesh, stages):
    """How the weights and the momentum of each stage are sharded."""
    return {
        f"{name}{stage}": rm.Sharding(mesh, ("tp", None), (ROWS, COLUMNS), "float64", {"pp": stage})
        for stage in range(stages)
        for name in "wm"
    }


class Model:
    """One rank's part of the model."""

    def __init__(self, job):
        self.groups, self.device, mesh = job.groups, job.device, job.plan.mesh
        where = mesh.coordinate(job.rank)
        self.stage, self.stages = where["pp"], mesh.axes["pp"]
        self.tp, self.dp = self.groups["tp"], self.groups["dp"]
        each = ROWS // self.tp.size
        self.w = started(self.stage)[where["tp"] * each : (where["tp"] + 1) * each].clone().to(self.device)
        self.m = torch.zeros_like(self.w)
        self.shardings = shardings(mesh, self.stages)
        self.tensors = {f"w{self.stage}": self.w, f"m{self.stage}": self.m}

    def step(self, step):
        """Train on the batch of a step; the loss, on every rank."""
        each = BATCH // self.dp.size
        x = batch(step)[self.dp.rank * each : (self.dp.rank + 1) * each].to(self.device)
        if self.stage:
            self._pass(x, src=0)
        y = x @ self.w.T  # this rank's rows of the product
        total = y.tanh().sum(1, keepdim=True)
        dist.all_reduce(total, group=self.tp.pg)
        x = x + total / ROWS
        if self.stage + 1 < self.stages:
            self._pass(x, dst=1)
        gradient = (1 - y.tanh() ** 2).T @ x / BATCH
        dist.all_reduce(gradient, group=self.dp.pg)
        self.m.mul_(0.9).add_(gradient)
        self.w.sub_(0.1 * self.m)
        loss = x.square().sum() / BATCH * (self.stage + 1 == self.stages)
        dist.all_reduce(loss, group=self.dp.pg)
        if self.stages > 1:
            dist.all_reduce(loss, group=self.groups["pp"].pg)
        return float(loss)

    def _pass(self, x, **to):
        """An activation to the next stage, or from the one before."""
        pp = self.groups["pp"]
        if "dst" in to:
            dist.send(x, pp.ranks[self.stage + 1], group=pp.pg)
        else:
            dist.recv(x, pp.ranks[self.stage - 1], group=pp.pg)


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


def member(me, port, folder, deaths, steps, layout, how):
    """One member: what train returned, and how it came about."""
    me.launched(port)
    time.sleep(0.1)  # and its connection is there
    slow, raises, strangers = how.pop("slow", 0.0), how.pop("raises", None), how.pop("strangers", False)
    if joins := how.pop("joins", ""):  # the last one starts later: once the plan has shrunk, or before a loss
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(me.size - 1)
        if me.rank == me.size - 1:
            for name in torchrun_variables(0, 1, local_rank=0, local_world_size=1, port=port):
                del os.environ[name]
            how["join"], os.environ["RANKMESH_JOB_KEY"] = contact_of(Path(folder))
    served_once()
    before, dying = kept(), Faults(me.rank, deaths, folder)
    history, losses = [], {}

    def train(job):
        model = Model(job)
        job.hold(model.tensors, model.shardings)
        history.append([job.epoch, job.rank, job.step, job.plan.mesh.axes["dp"], time.time(), dict(job.seconds)])
        if job.rank == 0 and (job.epoch or joins == "before"):
            (Path(folder) / "contact").write_text(f"{job.address} {job.key}\n", encoding="utf-8")
        for step in range(job.step, steps):
            dying.step(step)
            if [job.rank, step] == raises:
                raise RuntimeError("a bug of the program")
            time.sleep(slow)
            if strangers:
                disturb(job._session.driver.peers.contacts.values(), job.epoch)
            losses[step] = model.step(step)
            job.commit(step + 1)
            if len(history[-1]) == 6:
                history[-1].append(time.time())
        (Path(folder) / f"trained-{me.rank}").touch()
        return {name: tensor.tolist() for name, tensor in model.tensors.items()}

    outcome = {}
    try:
        outcome["result"] = rm.survive(regrouping(train) if how.pop("regroups", False) else train, layout, **how)
    except (rm.RankmeshError, ValueError, RuntimeError) as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    ended = {**left_behind(folder, before), "initialised": dist.is_initialized()}
    return {**ended, **outcome, "history": history, "losses": losses}


def disturb(contacts, epoch):
    """Send every member what ends a job, as somebody does who does not have its key."""
    end = {"what": "end", "epoch": str(epoch), "over": True, "suspects": [], "evicted": {"0": "a", "1": "b"}}
    for contact in contacts:
        with suppress(OSError), socket.create_connection((contact.address, contact.heartbeat), 10) as one:
            one.sendall(json.dumps(end).encode() + b"\n")


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
    """For a failing test: how each member ended, without what it has trained."""
    return json.dumps([[one.rank, one.code, _short(one.value) or one.error] for one in outcomes])[:8000]


def _short(value):
    return value and {name: part for name, part in value.items() if name not in ("result", "losses")}
