"""One process of a job that survives 30 steps: one line of JSON with what came of it.

With RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; it says when three steps are done.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

import rankmesh as rm


def train(job):
    """Count in each step the ranks that take part."""
    total = torch.zeros(1)
    job.hold({"total": total}, {"total": rm.Sharding(job.plan.mesh, None, (1,), "float32")})
    for step in range(job.step, 30):
        time.sleep(0.3)
        x = torch.ones(1)
        dist.all_reduce(x, group=job.groups["dp"].pg)
        total += x
        job.commit(step + 1)
        if step == 2:
            sys.stderr.write("three steps are done\n")
            sys.stderr.flush()
    return {"epoch": job.epoch, "dp": job.plan.mesh.axes["dp"], "seconds": dict(job.seconds)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(rm.survive(train, "dp=*", shrink="dp", timeout=20)))
