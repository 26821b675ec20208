"""Runs a program that hangs in a job that survives, ``evict=True``: who is left out, and how the others end.

``python -m tests.hangs.evicting FOLDER NAME...`` writes to FOLDER/NAME what each member says of itself.

A program that reduces over the default group runs without spares, which are in that group, too: axis dp shrinks. The
others run with as many spares as ranks are at fault. The mistake is made once: whoever goes on takes ordinary steps.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.hangs import programs
from tests.hangs.programs import ones
from tests.hangs.running import LOADED, SEPARATE, fork, in_a_separate_network, reap
from tests.sockets import free_port

import rankmesh as rm
from rankmesh.launch.table import torchrun_variables

# Seconds: of rm.survive, and in which all that is over. A call is overdue after 2.5 timeouts, and fails after five.
TIMEOUT, LIMIT = 3.0, 240.0
# These reduce over the default group, or make groups of all of its ranks.
OF_THE_DEFAULT_GROUP = frozenset(
    {
        *("skips_a_call", "ties_embeddings_in_the_world", "misses_a_monitored_barrier", "another_operation"),
        *("another_size", "another_dtype", "another_root", "another_order", "loses_the_network"),
        *("megatron_core", "nanotron", "device_mesh"),
    }
)


def evicted(name, folder):
    """Run a program in a job that survives until every member has ended, but those that never do; or time is up."""
    for module in LOADED.get(name, ()):
        importlib.import_module(module)
    hang = programs.HANGS[name]
    spares = 0 if name in OF_THE_DEFAULT_GROUP else len(hang.ranks)
    folder.mkdir(parents=True)
    port, began = free_port(), time.monotonic()
    running = {
        member: fork(_member, name, folder, member, hang.size, spares, port) for member in range(hang.size + spares)
    }
    members, ended = len(running), []
    busy = set(hang.ranks) if hang.cause in ("dead", "late") else set()
    while running.keys() - busy and time.monotonic() - began < LIMIT:
        time.sleep(0.05)
        for member, pid in list(running.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                ended.append(member)
                del running[member]
    seconds = time.monotonic() - began
    for pid in running.values():
        reap(pid)
    about = {"members": members, "ended": sorted(ended), "seconds": seconds}
    (folder / "job.json").write_text(json.dumps(about), encoding="utf-8")


def _member(name, folder, member, size, spares, port):
    log = os.open(folder / f"{member}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    world = size + spares
    os.environ.update(torchrun_variables(member, world, local_rank=member, local_world_size=world, port=port))
    epochs = []

    def train(job):
        epochs.append([job.epoch, job.rank])
        sums = torch.zeros(1)
        job.hold({"sums": sums}, {"sums": rm.Sharding(job.plan.mesh, None, (1,), "float32")})
        for step in range(job.step, 3):
            if step == 1 and job.epoch == 0:
                getattr(programs, name)(job.rank)
            dist.all_reduce(ones(), group=job.groups["dp"].pg)
            sums += 1
            job.commit(step + 1)
        return sums.item()

    found = {}
    try:
        how = {"spares": spares} if spares else {"shrink": "dp"}
        found["result"] = rm.survive(train, "dp=*", timeout=TIMEOUT, evict=True, **how)
    except (rm.RankmeshError, RuntimeError, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    draft = folder / f"{member}.draft"
    draft.write_text(json.dumps({**found, "epochs": epochs}), encoding="utf-8")
    draft.replace(folder / f"{member}.json")


def main():
    """Run the named programs, or all."""
    folder, *names = sys.argv[1:]
    for name in names or sorted(programs.HANGS):
        if name in SEPARATE and not in_a_separate_network("tests.hangs.evicting", folder, name):
            continue
        evicted(name, Path(folder) / name)
        print(name, (Path(folder) / name / "job.json").read_text(), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
