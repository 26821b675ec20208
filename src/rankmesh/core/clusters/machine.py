"""A machine as a file describes it, before the job's hosts are chosen from it: names, units, lines.

```
file ── reader ── Machine ── the job's hosts, devices ── Cluster
```
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankmesh.core.clusters.hosts import Host
from rankmesh.core.clusters.levels import Level
from rankmesh.core.host_names import listed_hosts, natural
from rankmesh.errors import ClusterError

if TYPE_CHECKING:
    from rankmesh.core.clusters.cluster import Cluster

__all__ = ["NETWORK", "Machine", "Site", "network", "outward"]

# The levels of switches, from the hosts outward; deeper networks go on with numbers.
NETWORK = ("leaf", "spine", "core", "switch4", "switch5", "switch6", "switch7", "switch8")
# How many devices a host has where nothing states it: the usual server for training.
_DEVICES = 8


@dataclass(frozen=True)
class Site:
    """One host as a file has it: its units, innermost first, its devices if they are stated, and the line."""

    places: tuple[str, ...]
    devices: int | None = None
    line: int | None = None


@dataclass(frozen=True)
class Machine:
    """All hosts of a file by name, the names of the levels around them, and notes on the file for people."""

    levels: tuple[str, ...]
    sites: Mapping[str, Site] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def cluster(self, kind: type[Cluster], hosts: str | Iterable[str] | None, gpus_per_node: int | None) -> Cluster:
        """Return the cluster of the job's hosts in the launcher's order, or of all hosts in natural order."""
        listed = sorted(self.sites, key=natural) if hosts is None else listed_hosts(hosts, self.sites)
        chosen = [(name, self.sites[name]) for name in listed]
        notes = []
        unstated = [name for name, site in chosen if site.devices is None]
        if unstated and gpus_per_node is None:
            which = "1 host does" if len(unstated) == 1 else f"{len(unstated)} hosts do"
            notes.append(f"{which} not say how many devices there are; {_DEVICES} are assumed")
        usual = _DEVICES if gpus_per_node is None else gpus_per_node
        made = [Host(name, usual if site.devices is None else site.devices, site.places) for name, site in chosen]
        levels = Level.all_unmeasured(("host", *self.levels))
        try:
            return kind(levels, tuple(made), notes=(*notes, *self.notes))
        except ClusterError as error:
            line = self.sites[str(error.values["host"])].line if error.values.get("host") in self.sites else None
            raise ClusterError(error.message, **{**error.values, "line": line}) from error


def outward(chains: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the names of the levels for hosts under this many switches, innermost first; all must be as deep."""
    depths = {len(chain) for chain in chains.values()}
    if len(depths) > 1:
        shallow = min(chains, key=lambda name: len(chains[name]))
        raise ClusterError(
            f"levels of switches above {shallow}: {min(depths)}, above other hosts: {max(depths)}; name the missing "
            "switches",
            host=shallow,
        )
    return network(depths.pop() if depths else 0)


def network(depth: int) -> tuple[str, ...]:
    """Return the names of this many levels of switches, from the hosts outward; of too many, raise."""
    if depth > len(NETWORK):
        raise ClusterError(
            f"there are {depth} levels of switches, but at most {len(NETWORK)} are read; leave the outermost out",
            depth=depth,
        )
    return NETWORK[:depth]
