"""The job that this process is in: torchrun's, Slurm's, or none.

```
torchrun   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
srun       SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; MASTER_ADDR falls back to the launching node
```
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rankmesh.errors import ConnectError

__all__ = ["JobRank", "backend_for", "initialise", "job_rank"]


@dataclass(frozen=True)
class JobRank:
    """One process of a job, as its launcher says: global rank, world size, rank on this host, and the meeting place."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def job_rank(environment: Mapping[str, str] = os.environ) -> JobRank | None:
    """The job of this process, None when it was started alone.

    >>> job_rank({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}).rank
    3
    >>> job_rank({}) is None
    True
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    else:
        return None
    rank, size, local, local_size = (environment.get(name) for name in names)
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if address is None:
        raise ConnectError(
            f"received a job of {size} ranks without MASTER_ADDR; the ranks meet at the host of rank 0; "
            "set MASTER_ADDR and MASTER_PORT, or start the ranks with torchrun"
        )
    port = environment.get("MASTER_PORT") or str(29500 + int(environment.get("SLURM_JOB_ID", "0")) % 1000)
    return JobRank(int(rank or 0), int(size or 1), int(local or 0), int(local_size or size or 1), address, int(port))


def backend_for(job: JobRank) -> str:
    """``nccl`` where every rank of this host has a device of its own, else ``gloo``."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= job.local_world_size
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


def initialise(job: JobRank, backend: str, timeout: timedelta) -> str:
    """Initialise the default group of this rank; the device that its tensors live on."""
    device = "cpu"
    if "nccl" in backend:
        torch.cuda.set_device(job.local_rank)
        device = f"cuda:{job.local_rank}"
    os.environ.setdefault("MASTER_ADDR", job.address)
    os.environ.setdefault("MASTER_PORT", str(job.port))
    try:
        dist.init_process_group(
            backend, init_method="env://", rank=job.rank, world_size=job.world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ConnectError(
            f"rank {job.rank} of {job.world_size}: the world could not be initialised at {job.address}:{job.port} "
            f"({reason}); check that rank 0 runs there and that every rank of the job was started",
            rank=job.rank,
        ) from error
    return device
