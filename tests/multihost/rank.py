"""One rank, with the variables of a launcher, which writes one line of JSON with what came of it.

``python rank.py TIMEOUT`` joins the world by ``rm.init``, and sums. ``python rank.py`` is in a job that survives 30
steps, and says when three are done.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

import rankmesh as rm


def join(timeout):
    """Join, and what came of it."""
    began = time.monotonic()
    try:
        with rm.init("gloo", timeout=timeout), rm.connect("dp=2") as groups:
            x = torch.ones(1)
            dist.all_reduce(x, group=groups["dp"].pg)
            result = {"sum": x.item()}
    except rm.ConnectError as error:
        result = {"message": str(error)}
    return {**result, "seconds": time.monotonic() - began}


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
    joins = len(sys.argv) > 1
    result = join(float(sys.argv[1])) if joins else rm.survive(train, "dp=*", shrink="dp", timeout=20)
    sys.stdout.write(json.dumps(result))
