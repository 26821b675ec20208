"""A cluster from the reports of its ranks, or from the variables of their Slurm job.

```
rank 0   host node10  boot 5e..  slot 0         hosts     node2 (ranks 2, 3), node10 (ranks 0, 1): natural order
rank 1   host node10  boot 5e..  slot 1         rank_map  2 3 0 1
rank 2   host node2   boot a1..  slot 0         levels    host, and nvlink where NVML knows a fabric,
rank 3   host node2   boot a1..  slot 1                   and switches where Slurm gives them (SLURM_TOPOLOGY_ADDR)
```

A host is a name, a boot and a set of shared memory: two hosts with one name are two, and so are two containers of one
machine; what was found of either is in the notes.

>>> witnesses = [Witness(0, "node10", "5e", 0), Witness(1, "node10", "5e", 1), Witness(2, "node2", "a1", 0)]
>>> cluster = discovered(witnesses)
>>> [(host.name, host.devices) for host in cluster.hosts], cluster.rank_map
([('node2', 1), ('node10', 2)], (2, 0, 1))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankmesh.core.clusters.cluster import Cluster, Host, Level
from rankmesh.core.clusters.machine import NETWORK, Machine
from rankmesh.core.grouped import grouped
from rankmesh.core.host_names import host_list, task_counts
from rankmesh.core.local_ranks import LocalRank, contradictions
from rankmesh.errors import ClusterError, quoted

__all__ = ["Witness", "discovered", "slurm_job"]

_Identity = tuple[str, str, str]


@dataclass(frozen=True)
class Witness:
    """The report of one rank: its host's name and boot, its slot there, and the network as far as it is known.

    ``memory``   tells containers of one machine apart: its shared-memory namespace
    ``visible``  the devices that the rank may use; ``local_rank`` and ``local_world_size`` are the launcher's
    ``fabric``   the NVLink domain of its device, as NVML names it; ``switches``: outermost first, without the host
    """

    rank: int
    host: str
    boot: str
    slot: int
    memory: str = ""
    fabric: str = ""
    switches: tuple[str, ...] = ()
    local_rank: int | None = None
    local_world_size: int | None = None
    visible: str = ""

    @property
    def identity(self) -> _Identity:
        """The identity of its host."""
        return self.host, self.boot, self.memory


def discovered(witnesses: Sequence[Witness]) -> Cluster:
    """Return the cluster of all ranks of a world, whichever report is first."""
    ordered = sorted(witnesses, key=lambda each: each.rank)
    hosts = grouped((each.identity, each) for each in ordered)
    names = _names(list(hosts))
    levels, chains, left_out = _levels(hosts)
    rank_map = [
        each.rank for members in hosts.values() for each in sorted(members, key=lambda one: (one.slot, one.rank))
    ]
    facts = [
        LocalRank(names[each.identity], each.rank, each.local_rank, each.local_world_size, each.visible)
        for each in ordered
    ]
    return Cluster(
        Level.all_unmeasured(("host", *levels)),
        tuple(Host(names[identity], len(members), chains[identity]) for identity, members in hosts.items()),
        tuple(rank_map),
        notes=(*_notes(names), *left_out, *contradictions(facts)),
    )


def _names(identities: Sequence[_Identity]) -> Mapping[_Identity, str]:
    """Return the name of each host; the second and further ones of one name get a number."""
    count: dict[str, int] = {}
    names = {}
    for identity in identities:
        count[identity[0]] = count.get(identity[0], 0) + 1
        names[identity] = identity[0] if count[identity[0]] == 1 else f"{identity[0]}#{count[identity[0]]}"
    return names


def _notes(names: Mapping[_Identity, str]) -> Iterator[str]:
    by_name = grouped((identity[0], identity) for identity in names)
    by_boot = grouped((identity[1], identity) for identity in names if identity[1])
    for name, same in by_name.items():
        if len({boot for _, boot, _ in same}) > 1:
            yield f"{len(same)} hosts call themselves {name}: {', '.join(names[each] for each in same)} by their boot"
    for same in by_boot.values():
        if len(same) > 1:
            listed = ", ".join(names[each] for each in same)
            yield f"{listed} are containers of one machine (one boot): they are hosts of their own here"


def _levels(
    hosts: Mapping[_Identity, Sequence[Witness]],
) -> tuple[tuple[str, ...], Mapping[_Identity, tuple[str, ...]], tuple[str, ...]]:
    """Return the levels around hosts, the units of each host, and notes of what the ranks do not agree on."""
    first = {identity: members[0] for identity, members in hosts.items()}
    notes = []
    depths = {len(each.switches) for each in first.values()}
    if len(depths) > 1 or any(len({one.switches for one in members}) > 1 for members in hosts.values()):
        notes.append("the ranks say different things of their switches; switches are left out")
        depths = {0}
    depth = min(depths.pop(), len(NETWORK))
    domains = any(each.fabric for each in first.values())
    names = (("nvlink",) if domains else ()) + NETWORK[:depth]
    chains = {
        identity: ((each.fabric or f"alone-{number}",) if domains else ()) + tuple(reversed(each.switches[:depth]))
        for number, (identity, each) in enumerate(first.items())
    }
    return names, chains, tuple(notes)


def slurm_job(environment: Mapping[str, str], machine: Machine | None = None) -> Cluster:
    """Return the hosts of a Slurm job by its environment, in ``machine`` where there is a topology file.

    Devices are the tasks of each host, which hold the ranks in Slurm's order: by host (block), or dealt out (cyclic).
    Source: the output variables of srun(1).

    >>> job = {"SLURM_JOB_NODELIST": "node[9-10]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_DISTRIBUTION": "cyclic"}
    >>> slurm_job(job).rank_map, str(slurm_job(job))
    ((0, 2, 1, 3), '4 devices, 2 hosts of 2, levels host network')
    """
    nodes = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if not nodes:
        raise ClusterError("SLURM_JOB_NODELIST is not set; run this inside a Slurm job")
    names = host_list(nodes)
    tasks = task_counts(_first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or f"1(x{len(names)})")
    if len(tasks) != len(names):
        raise ClusterError(
            f"the environment has {len(tasks)} counts of tasks for the {len(names)} hosts of {quoted(nodes)}; "
            "start the ranks with srun",
            hosts=names,
        )
    if machine is None:
        hosts, levels = tuple(map(Host, names, tasks)), Level.all_unmeasured(["host"])
        return Cluster(levels, hosts, _dealt(environment, tasks))
    found = machine.cluster(Cluster, names, 1)
    counts = dict(zip(names, tasks, strict=True))
    places = {host.name: host.places for host in found.hosts}
    hosts = tuple(Host(name, counts[name], places[name]) for name in names)
    return Cluster(found.levels, hosts, _dealt(environment, tasks), found.notes)


def _first(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def _dealt(environment: Mapping[str, str], tasks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the rank at each task, host by host; None where hosts are filled one after the other."""
    how = environment.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0].lower()
    if how in ("block", ""):
        return None
    if how != "cyclic":
        raise ClusterError(
            f"SLURM_DISTRIBUTION is {quoted(how)}, but only block and cyclic can be read from the environment; let the "
            "ranks say where they are: rankmesh cluster inside the job, or rm.discover()",
            received=how,
        )
    rounds = [(cycle, host) for cycle in range(max(tasks)) for host, count in enumerate(tasks) if cycle < count]
    rank = {place: number for number, place in enumerate(rounds)}
    return tuple(rank[cycle, host] for host, count in enumerate(tasks) for cycle in range(count))
