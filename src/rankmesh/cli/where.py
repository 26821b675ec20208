"""``rankmesh where``: what started this process, who it is, where the ranks meet, and the evidence for each."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankmesh.cli.columns import Column, print_columns
from rankmesh.cli.console import out, write_json
from rankmesh.cli.machine import machine
from rankmesh.cli.options import Json
from rankmesh.cli.shell import ExitCode, Failed
from rankmesh.errors import ConnectError
from rankmesh.launch.address import resolved
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import MPI, NO_LAUNCHER

__all__ = ["EXAMPLES", "Whereabouts", "command", "where"]

EXAMPLES = """\
$ rankmesh where
$ srun rankmesh where --json
$ mpirun -np 4 rankmesh where
"""


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
    """Return where this process is. ``ConnectError`` for variables that contradict each other or tell too little.

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


def command(json: Json = False) -> None:
    """Show what started this process, its rank, host and devices, and the evidence for each."""
    try:
        found = where()
    except ConnectError as error:
        _show_evidence(error, json)
        raise
    if json:
        write_json(found.to_dict())
    else:
        _print(found)
    if found.missing:
        raise Failed(f"missing is {found.missing}", ExitCode.NO_JOB)


def _show_evidence(error: ConnectError, json: bool) -> None:
    evidence: Any = error.evidence
    if json:
        write_json({"missing": str(error), "evidence": dict(evidence)})
    elif evidence:
        print_columns(out(), [Column("variable", list(evidence)), Column("value", list(evidence.values()))])


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
    columns = [
        Column("what", list(rows)),
        Column("this process", list(rows.values())),
        Column("evidence", [line or "-" for line in evidence]),
    ]
    print_columns(out(), columns)
    about = found.machine
    versions = {
        "software": f"rankmesh {about['rankmesh']}, Python {about['python']}, {about['system']}",
        "torch": f"{about['torch']}, NCCL {about['nccl'] or 'none'}" if about["torch"] else "not installed",
        "groups": about["groups"] or "none without torch",
        "interfaces": ", ".join(f"{name} {address}" for name, address in about["interfaces"].items()) or "none",
        "limits": ", ".join(f"{name} {_many(number)}" for name, number in about["limits"].items()),
        "clock": about["clock"],
    }
    out().print()
    print_columns(out(), [Column("machine", list(versions)), Column("value", list(versions.values()))])


def _many(number: int | None) -> str:
    return "unlimited" if number is None else f"{number:,}"


def _unmet(found: Whereabouts) -> str:
    if found.launch.world_size == 1:
        return "none: a world of one"
    return "not known" if found.missing else "mpi4py tells it"


def _local(launch: Launch) -> str:
    rank = "unknown" if launch.local_rank is None else str(launch.local_rank)
    return rank if launch.local_world_size is None else f"{rank} of {launch.local_world_size}"
