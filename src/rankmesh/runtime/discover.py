"""Discover: the cluster that the ranks of this world are on, found by asking each of them.

```
rank r    host name, boot, device, NVLink domain, Slurm's switches ── gather ── one cluster, the same on every rank
```
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from rankmesh.backend.default import default_group
from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.discovered import Witness, discovered
from rankmesh.core.options import time_limit
from rankmesh.errors import ConnectError
from rankmesh.launch.started import host_name
from rankmesh.launch.table import LAUNCHERS
from rankmesh.rendezvous import gather_work
from rankmesh.runtime.world import World

__all__ = ["discover", "witness"]

_BOOT, _MEMORY = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/ipc")


def discover(*, timeout: float | timedelta = 60.0) -> Cluster:
    """Discover the cluster of this world. Collective: every rank gets the same hosts, in natural order, and ranks.

    Each rank reports its host's name and boot, its device, its NVLink domain (if NVML is installed and reports one:
    ``pip install nvidia-ml-py``), and Slurm's address of its host in the network. Findings, such as two hosts with
    one name, are in ``notes``, and a warning on rank 0.

    Raises ``ConnectError`` outside of an initialised world, ``AgreementError`` naming the ranks that do not call it
    within ``timeout`` seconds.
    """
    here = default_group()
    if here.store is None:
        raise ConnectError("the world has no store, through which ranks exchange their hosts; use gloo or nccl")
    limit, world = time_limit(timeout), World.current()
    among = world.round("discover", range(here.size))
    seconds = limit.total_seconds()
    data = gather_work(among, lambda: asdict(witness(here.rank)), _concluded, seconds, "discover()", ConnectError)
    notes = tuple(data.pop("notes"))
    if here.rank == 0:
        for note in notes:
            warnings.warn(note, stacklevel=2)
    return replace(Cluster.from_dict(data), notes=notes)


def _concluded(witnesses: list[Any]) -> dict[str, object]:
    found = discovered([Witness(**{**each, "switches": tuple(each["switches"])}) for each in witnesses])
    return {**found.to_dict(), "notes": found.notes}


def witness(rank: int, environment: Mapping[str, str] = os.environ) -> Witness:
    """Return the facts about the host and the device of this process."""
    return Witness(
        rank=rank,
        host=host_name(environment),
        boot=_text(_BOOT),
        slot=_slot(environment, rank),
        memory=_link(_MEMORY),
        fabric=_fabric(),
        switches=_switches(environment),
        local_rank=_of_host(environment, "local_rank"),
        local_world_size=_of_host(environment, "local_size"),
        visible=environment.get("CUDA_VISIBLE_DEVICES", ""),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _slot(environment: Mapping[str, str], rank: int) -> int:
    """Return the device where one is in use, else the number on the host from the launcher, else the rank."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.current_device()
    found = _of_host(environment, "local_rank")
    return rank if found is None else found


def _of_host(environment: Mapping[str, str], what: str) -> int | None:
    """Return the local rank or the local world size from the first launcher that states it."""
    names = (getattr(row, what) for row in LAUNCHERS)
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)


def _switches(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Slurm's address of this host, ``spine.leaf1.node1``, without the host; the pattern names each word's kind."""
    words = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(words) != len(pattern):
        return ()
    return tuple(word for word, kind in zip(words, pattern, strict=True) if kind == "switch")


def _fabric() -> str:
    """Return the NVLink domain of this rank's device, its cluster and clique by NVML; empty where there is none."""
    if not torch.cuda.is_available():
        return ""
    with suppress(Exception):
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}".encode())
            info = pynvml.c_nvmlGpuFabricInfo_t()
            pynvml.nvmlDeviceGetGpuFabricInfo(handle, info)
            domain = bytes(info.clusterUuid).hex()
            return f"{domain}.{info.cliqueId}" if domain.strip("0") else ""
        finally:
            pynvml.nvmlShutdown()
    return ""
