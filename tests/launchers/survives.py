"""A job of ``dp=*`` with a spare, whose second process is killed in a step; the others say what they returned."""

import os
import signal

import torch
import torch.distributed as dist

import rankmesh as rm

NAMES = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
ME = next(os.environ[name] for name in NAMES if name in os.environ)


def train(job):
    """Six steps."""
    w = torch.zeros(4, dtype=torch.float64)
    job.hold({"w": w}, {"w": rm.Sharding(job.plan.mesh, None, shape=(4,), dtype="float64")})
    for step in range(job.step, 6):
        if ME == "1" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.full((4,), step + 1.0, dtype=torch.float64)
        dist.all_reduce(x, group=job.groups["dp"].pg)
        w += x / job.groups["dp"].size
        job.commit(step + 1)
    return job.epoch, job.rank, w.sum().item()


result = rm.survive(train, "dp=*", spares=1, timeout=5)
os.write(1, f"survived {ME} {result}\n".encode())  # one line, whole
