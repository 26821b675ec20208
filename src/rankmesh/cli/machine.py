"""Facts of a machine for the report of a fault: versions, how groups are made, interfaces, limits, the clock.

>>> sorted(machine())[:4]
['clock', 'cuda', 'groups', 'interfaces']
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from rankmesh import __version__
from rankmesh.errors import RankmeshError, first_line

__all__ = ["machine"]

_VARIABLES = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "GLOO_", "RANKMESH", "CUDA_VISIBLE_DEVICES")
# Of Linux: the request for the IPv4 address of an interface, and the bytes of the address in its reply.
_SIOCGIFADDR, _ADDRESS = 0x8915, slice(20, 24)


def machine(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what this process finds, as plain data; torch's part is None where it is not installed."""
    return {
        "rankmesh": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **_torch(),
        "interfaces": _interfaces(),
        "limits": {
            "open files": _limit(resource.RLIMIT_NOFILE),
            "locked memory": _limit(resource.RLIMIT_MEMLOCK),
            "processes": _limit(resource.RLIMIT_NPROC),
        },
        "shared_memory": _free("/dev/shm"),  # noqa: S108  - asked for its size
        "clock": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "variables": {
            name: value
            for name, value in sorted(environment.items())
            if name.startswith(_VARIABLES) and not name.endswith("KEY")
        },
    }


def _torch() -> dict[str, str | None]:
    """Return the versions of torch, CUDA and NCCL, and how this torch's groups are made."""
    try:
        import torch
    except ModuleNotFoundError:
        return {"torch": None, "cuda": None, "nccl": None, "groups": None}
    nccl = None
    with suppress(RuntimeError, AttributeError):
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl, "groups": _groups()}


def _groups() -> str:
    try:
        from rankmesh.backend.releases import missing

        reason = missing()
    except RankmeshError as error:
        return f"none: {first_line(error)}"
    return "by their members" if reason is None else f"through torch's public API: {reason}"


def _interfaces() -> dict[str, str]:
    """Return the network interfaces that have an IPv4 address: what GLOO_SOCKET_IFNAME may name."""
    found: dict[str, str] = {}
    try:
        from fcntl import ioctl
    except ModuleNotFoundError:
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # without an address
                answer = ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[_ADDRESS])
    return found


def _limit(which: int) -> int | None:
    """Return a limit of this process, None for none."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _free(place: str) -> int | None:
    """Return the free bytes of a file system, None where there is none."""
    try:
        found = os.statvfs(place)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
