"""A job that survives on four hosts of some ranks each, of which some are lost: ``python -m tests.multihost.four_hosts
FOLDER RANKS TP LOSS...`` writes to FOLDER what each rank says of itself.

```
kill 2   every process of node3 is killed         cut 2   its link is taken down, and its processes live on
off 0    both: node1 has lost its power           halves  the trunk: node1 and node2 here, node3 and node4 there

drop 01|23       the hosts of each side drop what the others send
reject 0|123     they reject it, with a reset
one-way 01|23    the first side alone rejects it
```

Ranks are forked from a process without threads, and none outlives it.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import rankmesh as rm
from bench.emulated import emulated

RACKS, STEPS = (("node1", "node2"), ("node3", "node4")), 16
RESET = ("REJECT", "--reject-with", "tcp-reset")
# Seconds: of rm.survive, and until all is over.
TIMEOUT, LIMIT = 4.0, 200.0


def train(job, folder, rank):
    """Count in each step the ranks that take part."""
    tp, dp = job.groups["tp"], job.groups["dp"]
    count = torch.zeros(8 // tp.size)
    job.hold({"count": count}, {"count": rm.Sharding(job.plan.mesh, ("tp",), (8,), "float32")})
    for step in range(job.step, STEPS):
        time.sleep(0.2)
        x = torch.ones(1)
        for group in (tp, dp):
            dist.all_reduce(x, group=group.pg)
        count += x
        job.commit(step + 1)
        (folder / f"{job.epoch}-{step + 1}-{rank}").touch()
        if step + 1 == 3:  # whatever is lost is lost in a later one
            await_all(folder, f"{job.epoch}-3-*", job.plan.mesh.size, time.monotonic() + LIMIT)
    return {"epoch": job.epoch, "began": job.step, "count": count.tolist(), "dp": dp.size}


def await_all(folder, pattern, number, end):
    """Wait until so many ranks have left a mark, or time is up."""
    while len(list(folder.glob(pattern))) < number and time.monotonic() < end:
        time.sleep(0.02)


def _rank(cluster, folder, rank, tp):
    cluster.enter(rank)
    torch.set_num_threads(1)
    try:
        found = rm.survive(lambda job: train(job, folder, rank), f"tp={tp},dp=*", shrink="dp", timeout=TIMEOUT)
    except (rm.RankmeshError, RuntimeError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    found["ended"] = time.monotonic()
    draft = folder / f"rank-{rank}.draft"
    draft.write_text(json.dumps(found), encoding="utf-8")
    draft.replace(folder / f"rank-{rank}.json")


def _fork(cluster, folder, rank, tp):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _rank(cluster, folder, rank, tp)
        status = 0
    finally:
        os._exit(status)


def lose(cluster, running, loss):
    """Lose a host, or the trunk."""
    what, _, number = loss.partition(" ")
    if what == "halves":
        cluster.cut()
        return
    if "|" in number:
        sides = [[cluster.hosts[int(host)] for host in side] for side in number.split("|")]
        cluster.part(sides, ("DROP",) if what == "drop" else RESET, one_way=what == "one-way")
        return
    host = int(number)
    if what in ("cut", "off"):
        cluster.cut(cluster.hosts[host])
    if what in ("kill", "off"):
        for rank in range(cluster.ranks * host, cluster.ranks * (host + 1)):
            os.kill(running[rank], signal.SIGKILL)


def main():
    """Run the job, and lose what the command line names, one after the other, each in an epoch of its own."""
    folder, ranks, tp, *losses = sys.argv[1:]
    folder = Path(folder)
    with emulated(RACKS, ranks=int(ranks), link=1000, trunk=1000) as cluster:
        running, ended, end = {}, set(), time.monotonic() + LIMIT
        try:
            running.update({rank: _fork(cluster, folder, rank, tp) for rank in range(cluster.size)})
            lost, at = 0, []
            for epoch, loss in enumerate(losses):
                await_all(folder, f"{epoch}-{4 + 3 * epoch}-*", cluster.size - lost, end)
                at.append(time.monotonic())
                lose(cluster, running, loss)
                lost += cluster.ranks
            while len(ended) < len(running) and time.monotonic() < end:
                time.sleep(0.05)
                ended |= {rank for rank in running.keys() - ended if os.waitpid(running[rank], os.WNOHANG)[0]}
        finally:
            for rank in running.keys() - ended:
                with suppress(ProcessLookupError):
                    os.kill(running[rank], signal.SIGKILL)
                os.waitpid(running[rank], 0)
        (folder / "ended.json").write_text(json.dumps({"ranks": sorted(ended), "lost": at}), encoding="utf-8")


if __name__ == "__main__":
    main()
