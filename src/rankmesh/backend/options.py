"""Backends and NCCL's options, as this torch defines them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rankmesh.core.options import Options
from rankmesh.errors import ConnectError, PlanError, quoted

__all__ = ["check_backend", "config", "kinds_of", "nccl_options", "options_of"]


@cache
def config(backend: str) -> tuple[dict[str, str], str]:
    """Return the backend of each device type, and torch's text of them, which torch parses for each group."""
    config = c10d.BackendConfig(c10d.Backend(backend))
    return dict(config.get_device_backend_map()), str(config)


def kinds_of(backend: str) -> frozenset[str]:
    """Return the backends that this one stands for: gloo and nccl for ``cpu:gloo,cuda:nccl``."""
    return frozenset(config(backend)[0].values())


@cache
def check_backend(backend: str) -> None:
    """Refuse a backend that this torch does not know, or was built without (``PlanError``, ``ConnectError``)."""
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        known = [word for word in dist.Backend.backend_list if word != dist.Backend.UNDEFINED]
        if name not in known and name != "fake":
            raise PlanError(
                f"unknown backend {quoted(backend)}; this torch knows {', '.join(known)}; use one of them, or a pair "
                "such as 'cpu:gloo,cuda:nccl'",
                backend=backend,
            )
        if not _BUILT.get(name, dist.is_available)():
            raise ConnectError(
                f"backend {quoted(backend)} is not available, as this torch was built without {name}; use another "
                "backend, or install a torch that has it",
                backend=backend,
            )


_BUILT = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
}


def nccl_options(wanted: Options, backend: str) -> Any:
    """``ProcessGroupNCCL.Options`` for these options, None where nothing is asked of NCCL, and in a dry run.

    Raises ``PlanError`` for NCCL options on a backend that has none, and for a field unknown to this torch.
    """
    asked = dict(wanted.nccl or ())
    if backend == "fake" or (not asked and wanted.high_priority is None and wanted.sharp is None):
        return None
    if "nccl" not in backend:
        raise PlanError(
            f"NCCL options ({wanted}) have no effect on a group of backend {backend!r}; "
            "remove them, or give the group backend='nccl'",
            backend=backend,
        )
    check_backend(backend)
    options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=bool(wanted.high_priority))
    if wanted.sharp is not None:
        asked["collnet_enable"] = int(wanted.sharp)
    known = sorted(name for name in dir(options.config) if not name.startswith("_"))
    for name, value in asked.items():
        if name not in known:
            raise PlanError(
                f"unknown NCCL option {quoted(name)}; this torch knows {', '.join(known)}; use one of them",
                option=name,
                known=known,
            )
        try:
            setattr(options.config, name, value)
        except TypeError as error:
            raise PlanError(
                f"NCCL option {name!r} is {quoted(value)}; give a value of the type that this torch takes: {error}",
                option=name,
                received=value,
            ) from error
    return options


def options_of(given: object) -> Options:
    """Return ``ProcessGroupNCCL.Options`` as ``Options``: the fields that differ from NCCL's defaults."""
    check_backend("nccl")
    plain = c10d.ProcessGroupNCCL.Options()
    if not isinstance(given, type(plain)):
        raise PlanError(f"pg_options is {quoted(given)}; give ProcessGroupNCCL.Options, or none", received=given)
    fields = [name for name in dir(plain.config) if not name.startswith("_")]
    changed = {
        name: getattr(given.config, name)
        for name in fields
        if getattr(given.config, name) != getattr(plain.config, name)
    }
    high_priority = given.is_high_priority_stream or None
    timeout = None if given._timeout == plain._timeout else given._timeout
    return Options(nccl=changed or None, high_priority=high_priority, timeout=timeout)
