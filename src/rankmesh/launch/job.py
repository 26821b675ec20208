"""The job that this process is in: torchrun's, Slurm's, or none.

```
torchrun   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
srun       SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NTASKS_PER_NODE or SLURM_TASKS_PER_NODE ("4", "4(x2),2");
           MASTER_ADDR falls back to the launching node, MASTER_PORT to 29500 + SLURM_JOB_ID % 1000
```
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import ConnectError

__all__ = ["JobRank", "backend_for", "initialise", "job_rank", "open_store"]


@dataclass(frozen=True)
class JobRank:
    """One process of a job, as its launcher says: global rank, world size, rank on this host, and the meeting place.

    ``local_world_size`` is how many ranks this host has.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def job_rank(environment: Mapping[str, str] = os.environ) -> JobRank | None:
    """The job of this process, None when it was started alone.

    Raises ``ConnectError`` for variables that are no numbers, that contradict each other, or that are missing.

    >>> job_rank({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}).rank
    3
    >>> job_rank({}) is None
    True
    """
    torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    if torchrun:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in environment and _number(environment, "SLURM_NTASKS", 1) > 1:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return None
    size = _number(environment, names[1], least=1)
    rank = _number(environment, names[0], most=size - 1)
    local = _number(environment, names[2], 0, most=size - 1)
    here = _number(environment, "LOCAL_WORLD_SIZE", size) if torchrun else _tasks_here(environment, size)
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise ConnectError(
            f"received a job of {size} ranks without MASTER_ADDR; the ranks meet at the host of rank 0; "
            "set MASTER_ADDR and MASTER_PORT, or start the ranks with torchrun"
        )
    port = 29500 + _number(environment, "SLURM_JOB_ID", 0) % 1000
    port = _number(environment, "MASTER_PORT", port, least=1, most=65535)
    return JobRank(rank, size, local, max(here, local + 1), address, port)


def _number(
    environment: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0, most: int = 2**31
) -> int:
    """A whole number of the environment; the default where it is not set, or set to nothing."""
    text = environment.get(name, "").strip()
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not least <= int(text) <= most:
        raise ConnectError(
            f"received {name}={text[:40]!r} in the environment; it is a whole number from {least} to {most}, set by "
            "the launcher; start the ranks with torchrun or srun, or unset it",
            variable=name,
            received=text,
        )
    return int(text)


def _tasks_here(environment: Mapping[str, str], size: int) -> int:
    """Slurm's tasks on the fullest host, so that every rank computes the same: ``4(x2),2`` is 4; else all tasks."""
    text = environment.get("SLURM_NTASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(size)
    hosts = [re.fullmatch(r"(\d{1,6})(?:\(x\d+\))?", part.strip(), re.ASCII) for part in text.split(",")]
    if not all(hosts):
        raise ConnectError(
            f"received the tasks per node {text[:80]!r} in the environment; Slurm writes 4 or 4(x2),2; "
            "start the ranks with srun, or unset SLURM_NTASKS_PER_NODE and SLURM_TASKS_PER_NODE",
            received=text,
        )
    return max(int(host[1]) for host in hosts if host)


def open_store(job: JobRank, timeout: timedelta) -> Store:
    """A connection to the job's store: torchrun's own where it serves one, else rank 0 serves it at MASTER_PORT.

    In rank 0 the world of ``initialise`` uses the same server.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            job.address,
            job.port,
            is_master=job.rank == 0 and not served,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise ConnectError(
            f"rank {job.rank} of {job.world_size}: no store could be reached at {job.address}:{job.port} "
            f"({_reason(error)}); check that rank 0 runs there, and that nothing else uses the port",
            rank=job.rank,
        ) from error


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
    os.environ.update(MASTER_ADDR=job.address, MASTER_PORT=str(job.port))
    try:
        dist.init_process_group(
            backend, init_method="env://", rank=job.rank, world_size=job.world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise ConnectError(
            f"rank {job.rank} of {job.world_size}: the world could not be initialised at {job.address}:{job.port} "
            f"({_reason(error)}); check that rank 0 runs there and that every rank of the job was started",
            rank=job.rank,
        ) from error
    return device


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
