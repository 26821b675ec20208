"""``rankmesh where``: what started this process, who it is, where the ranks meet, and the evidence for each."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rankmesh import __version__
from rankmesh.cli.columns import print_table
from rankmesh.cli.console import write, write_json
from rankmesh.cli.options import Json
from rankmesh.cli.shell import Answer, ExitCode
from rankmesh.errors import ConnectError, RankmeshError, first_line
from rankmesh.launch.address import resolved
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import MPI, NO_LAUNCHER

__all__ = ["Whereabouts", "command", "where"]
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "GLOO_", "RANKMESH", "CUDA_VISIBLE_DEVICES")
# Of Linux: the request for the IPv4 address of an interface, and the bytes of the address in its reply.
_SIOCGIFADDR, _ADDRESS = 0x8915, slice(20, 24)


@dataclass(frozen=True)
class Whereabouts:
    """This process as its launcher tells it, the devices that it sees (None: without torch), and what is missing.

    ``machine`` are facts for the report of a fault.
    """

    launch: Launch
    devices: tuple[str, ...] | None
    missing: str
    machine: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with stable keys."""
        names = ("launcher", "rank", "world_size", "local_rank", "local_world_size", "host", "meeting")
        return {
            **{name: getattr(self.launch, name) for name in names},
            "devices": None if self.devices is None else list(self.devices),
            "missing": self.missing or None,
            "evidence": dict(self.launch.evidence),
            "machine": dict(self.machine),
        }


def where(environment: Mapping[str, str] = os.environ) -> Whereabouts:
    """Locate this process in its job. Raise ``ConnectError`` if variables contradict each other or are missing.

    >>> where({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}).launch.meeting
    '127.0.0.1:29500'
    """
    launch = started_by(environment)
    missing = _missing(launch)
    if not missing and launch.address is not None and not launch.single_rank:
        try:
            launch = resolved(launch, environment=environment)
        except ConnectError as error:
            missing = f"the rendezvous address: {error.message}"
    return Whereabouts(launch, _devices(), missing, machine(environment))


def _devices() -> tuple[str, ...] | None:
    try:
        import torch
    except ModuleNotFoundError:
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count))


def _missing(launch: Launch) -> str:
    if launch.world_size == 1 or launch.address is not None:
        return ""
    if launch.launcher not in MPI:
        return "the rendezvous address: MASTER_ADDR is not set; set it to the host of rank 0, on all ranks"
    if importlib.util.find_spec("mpi4py") is None:
        return "the rendezvous address: MASTER_ADDR is not set, and mpi4py, which could tell, is not installed"
    return ""


def machine(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return facts of this machine for the report of a fault; without torch its entries are None.

    >>> sorted(machine())[:4]
    ['clock', 'cuda', 'groups', 'interfaces']
    """
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


def command(json: Json = False) -> Answer:
    """Show what started this process, its rank, host and devices, and the evidence for each.

    $ rankmesh where
    $ srun rankmesh where --json
    $ mpirun -np 4 rankmesh where
    """
    try:
        found = where()
    except ConnectError as error:
        _show_evidence(error, json)
        raise
    code = ExitCode.NO_JOB if found.missing else ExitCode.OK
    return Answer(found.to_dict, lambda: _print(found), code, f"missing is {found.missing}")


def _show_evidence(error: ConnectError, json: bool) -> None:
    evidence: Any = error.evidence
    if json:
        write_json({"missing": str(error), "evidence": dict(evidence)})
    elif evidence:
        print_table(("variable", "value"), evidence.items())


def _print(found: Whereabouts) -> None:
    launch = found.launch
    rows = {
        "launcher": launch.launcher,
        "rank": f"{launch.rank} of {launch.world_size}",
        "local rank": _local(launch),
        "host": launch.host,
        "devices": "unknown: torch is not installed" if found.devices is None else ", ".join(found.devices) or "no GPU",
        "meeting": launch.meeting or _unmet(found),
    }
    evidence = [", ".join(f"{name}={launch.evidence[name]}" for name in launch.facts.get(fact, ())) for fact in rows]
    evidence[0] = evidence[0] or ("no launcher's variables" if launch.launcher == NO_LAUNCHER else "")
    evidence[3] = evidence[3] or "what the machine calls itself"
    lines = [(*row, text or "-") for row, text in zip(rows.items(), evidence, strict=True)]
    print_table(("what", "this process", "evidence"), lines)
    about = found.machine
    versions = {
        "software": f"rankmesh {about['rankmesh']}, Python {about['python']}, {about['system']}",
        "torch": f"{about['torch']}, NCCL {about['nccl'] or 'none'}" if about["torch"] else "not installed",
        "groups": about["groups"] or "none without torch",
        "interfaces": ", ".join(f"{name} {address}" for name, address in about["interfaces"].items()) or "none",
        "limits": ", ".join(f"{name} {_many(number)}" for name, number in about["limits"].items()),
        "clock": about["clock"],
    }
    write("")
    print_table(("machine", "value"), versions.items())


def _many(number: int | None) -> str:
    return "unlimited" if number is None else f"{number:,}"


def _unmet(found: Whereabouts) -> str:
    if found.launch.world_size == 1:
        return "none: a world of one"
    return "not known" if found.missing else "mpi4py tells it"


def _local(launch: Launch) -> str:
    rank = "unknown" if launch.local_rank is None else str(launch.local_rank)
    return rank if launch.local_world_size is None else f"{rank} of {launch.local_world_size}"
