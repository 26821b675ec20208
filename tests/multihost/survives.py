"""One process of a job that survives: ``python survives.py TIMEOUT [STEPS]``; one line of JSON with what came of it.

With RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; it says when three steps are done.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

import rankmesh as rm


def train(job, steps):
    """Count in each step the ranks that take part."""
    total = torch.zeros(1)
    job.hold({"total": total}, {"total": rm.Sharding(job.plan.mesh, None, (1,), "float32")})
    for step in range(job.step, steps):
        time.sleep(0.3)
        x = torch.ones(1)
        dist.all_reduce(x, group=job.groups["dp"].pg)
        total += x
        job.commit(step + 1)
        if step == 2:
            sys.stderr.write("three steps are done\n")
            sys.stderr.flush()
    where = {"epoch": job.epoch, "began": job.step, "dp": job.plan.mesh.axes["dp"]}
    return {**where, "total": total.item(), "seconds": dict(job.seconds)}


if __name__ == "__main__":
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 12
    try:
        result = rm.survive(lambda job: train(job, steps), "dp=*", shrink="dp", timeout=float(sys.argv[1]))
    except rm.ConnectError as error:
        result = {"error": str(error)}
    sys.stdout.write(json.dumps(result))
