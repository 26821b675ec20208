"""Started: the launcher of this process found in its environment, checked, as one value.

```
environment ──> row of the table ──> Launch(launcher, rank, world_size, local_rank, ..., meeting, evidence)
                                     or ConnectError: what contradicts itself, what is missing
```
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

from rankmesh.core.host_names import host_list, task_counts
from rankmesh.errors import ClusterError, ConnectError, first_line, quoted
from rankmesh.launch.table import ENVIRONMENT, LAUNCHERS, NO_LAUNCHER, PORT, Launcher

__all__ = ["Launch", "host_name", "started_by"]


@dataclass(frozen=True)
class Launch:
    """One process, as its launcher describes it: which rank of how many, where, and the variables with the evidence.

    ``local_rank`` and ``local_world_size`` are None where the launcher does not state them, ``address`` where the ranks
    still have to find one for their rendezvous. ``evidence`` holds every variable that was read, with its value;
    ``facts`` the variables by what they state: launcher, rank, local rank, host, meeting.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    host: str = ""
    address: str | None = None
    port: int = PORT
    evidence: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def single_rank(self) -> bool:
        """True if there are no other ranks."""
        return self.world_size == 1

    @property
    def attempt(self) -> str:
        """Tells a launcher's attempts apart, which share a store: torchrun starts all ranks again when one fails."""
        return "/".join(self.evidence.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))

    @property
    def meeting(self) -> str | None:
        """The rendezvous address as ``address:port``, None where there is none yet."""
        if self.address is None:
            return None
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


_MOST = 2**31


class Variables:
    """An environment, the variables that were read until now, and what each was read for (``about``).

    >>> read = Variables({"RANK": "3", "EMPTY": ""})
    >>> read.number("RANK", most=7), read.number("EMPTY", 0), read.evidence
    (3, 0, {'RANK': '3'})
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.evidence: dict[str, str] = {}
        self.facts: dict[str, list[str]] = {}
        self.about = "launcher"

    def __contains__(self, name: str) -> bool:
        """Return whether the variable is set to something; asking leaves no evidence."""
        return bool(self._environment.get(name, "").strip())

    def holds(self, name: str, text: str) -> bool:
        """Return whether a variable is set to this; asking leaves no evidence."""
        return self._environment.get(name, "").strip() == text

    def text(self, name: str) -> str | None:
        """Return a variable without the spaces around it, None where it is not set, or set to nothing."""
        if name not in self:
            return None
        self.evidence[name] = self._environment[name]
        known = self.facts.setdefault(self.about, [])
        if name not in known:
            known.append(name)
        return self._environment[name].strip()

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = _MOST) -> int:
        """Return a whole number; the default where there is none. ``ConnectError`` for anything else."""
        text = self.text(name)
        if text is None and default is not None:
            return default
        if text is None or not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not least <= int(text) <= most:
            received = self._environment.get(name, "")
            raise ConnectError(
                f"{name}={quoted(received.strip())} in the environment is not a whole number from {least} to {most}; "
                "start the ranks with torchrun or srun, which set it, or unset it",
                variable=name,
                received=received,
            )
        return int(text)

    def optional(self, name: str, *, least: int = 0, most: int = _MOST) -> int | None:
        """Return a whole number, None where the variable is not set."""
        return self.number(name, least=least, most=most) if name in self else None

    def counts(self, name: str) -> tuple[int, ...] | None:
        """Return the tasks of each host, as Slurm counts them: ``4(x2),2`` is (4, 4, 2)."""
        text = self.text(name)
        try:
            return task_counts(text) if text else None
        except ClusterError as error:
            raise ConnectError(
                f"{name}={quoted(text)} in the environment is not a list of tasks per node, which Slurm writes as 4 or "
                "4(x2),2; start the ranks with srun, or unset it",
                variable=name,
                received=text,
            ) from error


# What srun sets for each task of a step; the script that sbatch runs has SLURM_PROCID=0 without any of them.
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR")


def started_by(environment: Mapping[str, str] = os.environ, host: str | None = None) -> Launch:
    """Read from the environment how this process was started; ``host`` is the machine's own name.

    Raises ``ConnectError`` for variables that are not numbers, are missing, or contradict each other; its
    ``evidence`` holds what was read until then.

    >>> slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0",
    ...          "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "123"}
    >>> me = started_by(slurm)
    >>> me.launcher, me.rank, me.world_size, me.local_rank, me.local_world_size, me.meeting
    ('slurm', 5, 8, 1, 4, 'node3:29623')
    >>> started_by({}).launcher, started_by({}).world_size
    ('none', 1)
    """
    read = Variables(environment)
    row = next((row for row in LAUNCHERS if _is_marked(row, read)), None)
    try:
        return _without_launcher(read, host) if row is None else _read(row, read, host)
    except ConnectError as error:
        # `rankmesh where` shows what was read until then.
        raise ConnectError(error.message, **error.values, evidence=read.evidence) from error


def _without_launcher(read: Variables, host: str | None) -> Launch:
    """Return a world of one; refuse one variable of two, which would make every rank a world of its own."""
    for name, value, other in (("RANK", "0", "WORLD_SIZE"), ("WORLD_SIZE", "1", "RANK")):
        if name in read and other not in read and not read.holds(name, value):
            raise ConnectError(
                f"{name}={read.text(name)} is set without {other}; set both, start the ranks with torchrun or srun, or "
                f"unset {name}",
                variable=other,
            )
    return Launch(NO_LAUNCHER, 0, 1, 0, 1, _host(read, host), None)


def _is_marked(row: Launcher, read: Variables) -> bool:
    if not all(mark in read for mark in row.marks):
        return False
    return row.name != "slurm" or any(name in read for name in _STEP) or not read.holds("SLURM_PROCID", "0")


def _read(row: Launcher, read: Variables, host: str | None) -> Launch:
    for mark in (*row.marks, "TORCHELASTIC_RESTART_COUNT"):
        read.text(mark)
    read.about = "rank"
    size = _size(row, read)
    _check_pods(row, read)
    rank = _rank(row, read, size)
    if row.rank != "RANK" and "RANK" in read and "WORLD_SIZE" in read and _numbers_more(row, read, rank, size):
        return _read(ENVIRONMENT, read, host)
    read.about = "local rank"
    local = read.optional(row.local_rank, most=size - 1) if row.local_rank else None
    here = _local_size(row, read, size)
    _check_local(row, read, rank, local, here)
    read.about = "meeting"
    address, port = _rendezvous(row, read, size, here)
    read.about = "host"
    host = _host(read, host)
    facts = {fact: tuple(names) for fact, names in read.facts.items()}
    return Launch(row.name, rank, size, local, here, host, address, port, read.evidence, facts)


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return this host's name as its launcher writes it, else its own name.

    >>> host_name({"SLURMD_NODENAME": "node3"})
    'node3'
    """
    return _host(Variables(environment), None)


def _host(read: Variables, host: str | None) -> str:
    return read.text("SLURMD_NODENAME") or host or socket.gethostname()


def _size(row: Launcher, read: Variables) -> int:
    for name in (row.size, *(("SLURM_NTASKS",) if row.name == "slurm" else ())):
        if name in read:
            return read.number(name, least=1)
    if row.name == "kubernetes" and "PROCESSES_IN_JOB" in read and "JOB_COUNT" in read:
        return read.number("PROCESSES_IN_JOB", least=1) * read.number("JOB_COUNT", least=1)
    found = ", ".join(f"{mark}={read.text(mark)}" for mark in row.marks if mark in read)
    raise ConnectError(
        f"{row.name} set {found} without {row.size}, so this rank does not know how many there are; set {row.size} to "
        "the number of ranks, on all of them, or start them with torchrun",
        variable=row.size,
        launcher=row.name,
    )


def _rank(row: Launcher, read: Variables, size: int) -> int:
    if row.rank != "JOB_COMPLETION_INDEX" or "JOB_INDEX" not in read:
        return read.number(row.rank, most=size - 1)
    each = read.number("PROCESSES_IN_JOB", size, least=1, most=size)
    inside = read.number(row.rank, most=each - 1)
    return read.number("JOB_INDEX", most=size // each - 1) * each + inside


def _check_pods(row: Launcher, read: Variables) -> None:
    """Refuse a pod that is to start several ranks without torchrun, which reads the same variables."""
    each = read.text("PET_NPROC_PER_NODE") if row.name == "kubernetes" else None
    if each not in (None, "1"):
        raise ConnectError(
            f"PET_NPROC_PER_NODE={each} asks for several ranks in this pod, but torchrun did not start it; run "
            "torchrun train.py, which reads the variable, or set one process a pod",
            variable="PET_NPROC_PER_NODE",
            received=each,
        )


def _local_size(row: Launcher, read: Variables, size: int) -> int | None:
    if row.name == "slurm":
        return _tasks_here(read, size)
    if row.local_size and row.local_size in read:
        return read.number(row.local_size, least=1, most=size)
    return 1 if row.name == "kubernetes" else None


def _tasks_here(read: Variables, size: int) -> int | None:
    """Return Slurm's tasks on this host, of the step if there is one; of the fullest host if this one is not known."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        counts = read.counts(name) if name in read else None
        if counts:
            node = read.optional("SLURM_NODEID")
            return counts[node] if node is not None and node < len(counts) else min(max(counts), size)
    return None


def _check_local(row: Launcher, read: Variables, rank: int, local: int | None, here: int | None) -> None:
    if local is not None and here is not None and local >= here:
        raise ConnectError(
            f"{_named(read, row.local_rank)} contradicts {here} ranks on this host, which are numbered 0 to "
            f"{here - 1}; start the ranks with one launcher, or correct the two",
            received=local,
            local_world_size=here,
        )
    if local is not None and local > rank:
        raise ConnectError(
            f"{_named(read, row.local_rank)} contradicts {_named(read, row.rank)}: a rank has no larger number on its "
            "host than in the world; start the ranks with one launcher, or correct the two",
            received=local,
            rank=rank,
        )


def _numbers_more(row: Launcher, read: Variables, rank: int, size: int) -> bool:
    """Return whether ``RANK`` and ``WORLD_SIZE`` number the ranks that each task of a launcher starts.

    When they are the launcher's they do not; anything else is refused, with both values.
    """
    given, of = read.number("RANK"), read.number("WORLD_SIZE", least=1)
    each = of // size
    if (given, of) == (rank, size) or (
        each > 1 and of == each * size and given // each == rank and "LOCAL_RANK" in read
    ):
        return each > 1
    raise ConnectError(
        f"RANK={given} of WORLD_SIZE={of} contradicts {row.name}'s {_named(read, row.rank)} of {size}; unset RANK and "
        "WORLD_SIZE, or start the ranks with torchrun",
        received=(given, of),
        launcher=row.name,
        rank=rank,
        world_size=size,
    )


def _named(read: Variables, name: str) -> str:
    return f"{name}={read.evidence.get(name, '')}"


def _rendezvous(row: Launcher, read: Variables, size: int, here: int | None) -> tuple[str | None, int]:
    address = read.text("MASTER_ADDR") or (read.text("PET_MASTER_ADDR") if row.name == "kubernetes" else None)
    if address is None:
        address = _first_host(row, read) or ("127.0.0.1" if here == size else None)
    name = "MASTER_PORT" if "MASTER_PORT" in read or row.name != "kubernetes" else "PET_MASTER_PORT"
    return address, read.number(name, _port(row, read), least=1, most=65535)


def _port(row: Launcher, read: Variables) -> int:
    """Return a port of the job's own, where the launcher names jobs: two on one host must not share a store."""
    if row.name == "slurm":
        job, step = read.number("SLURM_JOB_ID", 0), read.optional("SLURM_STEP_ID") or 0
        return PORT + (job + step) % 1000
    named = read.text("PMIX_NAMESPACE") if row.name == "openmpi" else None
    return PORT if named is None else PORT + crc32(named.encode()) % 1000


def _first_host(row: Launcher, read: Variables) -> str | None:
    """Return the host of rank 0, from the launcher's list of hosts."""
    if row.name == "slurm":
        text = read.text("SLURM_STEP_NODELIST") or read.text("SLURM_JOB_NODELIST") or read.text("SLURM_NODELIST")
        return _first(text) if text else None
    if row.name == "jsrun":
        # Pairs of host and slots, of which the first is the host that runs jsrun.
        words = (read.text("LSB_MCPU_HOSTS") or "").split()
        return words[2] if len(words) >= 4 else None
    return None


def _first(listed: str) -> str:
    try:
        return host_list(listed)[0]
    except (ClusterError, IndexError) as error:
        raise ConnectError(
            f"the hosts {quoted(listed)} in the environment cannot be read ({first_line(error)}); start the ranks with "
            "srun, or set MASTER_ADDR to the host of rank 0",
            received=listed,
        ) from error
