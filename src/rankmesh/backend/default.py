"""The default group of this process: the world that ``torch.distributed`` was initialised with."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankmesh.errors import ConnectError

__all__ = ["DefaultGroup", "default_group", "default_pg", "is_inherited", "is_torch_function"]

# The process groups of its parent that a forked child has copies of, without the threads that serve them.
_inherited: list[dist.ProcessGroup] = []


@dataclass(frozen=True)
class DefaultGroup:
    """The default group of this process, ``store`` is None where the backend keeps none (MPI)."""

    rank: int
    size: int
    store: Any
    backend: str
    timeout: timedelta
    bound_device: torch.device | None

    @property
    def splits(self) -> bool:
        """True if NCCL groups are split from the world's communicator, in which every rank of it takes part."""
        return self.bound_device is not None and "nccl" in self.backend

    def splits_for(self, backend: str | None) -> bool:
        """Return whether a group of this backend, the world's by default, is split from the world's communicator."""
        return self.splits and "nccl" in (backend or self.backend)

    @property
    def dry(self) -> bool:
        """True in a dry run: one process plays one rank of a world that does not exist."""
        return self.backend == "fake"


def _keep_inherited() -> None:
    """Keep the parent's groups and stores for good: freeing them ends connections that the parent still uses."""
    for pg, (_, store) in c10d._world.pg_map.items():
        _inherited.append(pg)
        for kept in (pg, store):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_keep_inherited)


def is_inherited() -> bool:
    """Return whether this process is a forked child whose initialised world is its parent's."""
    return dist.is_initialized() and any(pg is c10d._get_default_group() for pg in _inherited)


def default_pg(*, inherited: bool = False) -> dist.ProcessGroup:
    """Return the process group of the initialised world; raise ``ConnectError`` where there is none.

    Raises it in a forked child, too, unless the parent's world, ``inherited``, is asked for.
    """
    if is_inherited() and not inherited:
        raise ConnectError(
            f"process {os.getpid()} was forked by process {os.getppid()}, which is the rank of the world: its "
            "connections and threads cannot be used here; make this call there, or start this process with "
            "multiprocessing's 'spawn'"
        )

    if not dist.is_initialized():
        raise ConnectError(
            "torch.distributed is not initialised, and groups are made in its world; "
            "call rankmesh.init() or torch.distributed.init_process_group() first"
        )
    return c10d._get_default_group()


def default_group() -> DefaultGroup:
    """Describe the initialised world; raise ``ConnectError`` if there is none."""
    default = default_pg()
    backend, store = c10d._world.pg_map[default]
    if backend == dist.Backend.UNDEFINED:  # a world that was asked for no backend has torch's choice for each device
        backend = c10d._world.pg_backend_config[default]
    return DefaultGroup(
        rank=default.rank(),
        size=default.size(),
        store=store,
        backend=str(backend),
        timeout=_timeout_of(default, str(backend)),
        bound_device=default.bound_device_id,
    )


def _timeout_of(pg: dist.ProcessGroup, backend: str) -> timedelta:
    """Return the timeout that the world was initialised with; torch's default where the backend does not keep it."""
    for device in pg._device_types:
        options = getattr(pg._get_backend(device), "options", None)
        if options is not None:
            return options._timeout  # type: ignore[no-any-return]
    return c10d._get_default_timeout(c10d.Backend(backend))


def is_torch_function(function: str) -> bool:
    """Return whether a function of torch.distributed is the one that torch defines."""
    return getattr(dist, function) is getattr(c10d, function)
