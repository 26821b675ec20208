"""A cluster from a file, which is known by what it holds.

```
levels and hosts                  the document of rankmesh cluster --json, JSON or YAML
SwitchName=, BlockName=           Slurm's topology.conf, scontrol show topology
a list with topology: names       Slurm's topology.yaml
items of kind Node                kubectl get nodes -o json
Instances                         aws ec2 describe-instance-topology
names of hosts                    {host: switch}
a table of GPU0, GPU1, ...        nvidia-smi topo -m: levels inside each host
```

An error names the path and, where it contradicts itself, the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rankmesh.core.axes import parse_axes
from rankmesh.core.clusters.clouds import is_nodes, read_aws, read_nodes, read_switches
from rankmesh.core.clusters.links import is_links, read_links
from rankmesh.core.clusters.machine import Machine
from rankmesh.core.clusters.slurm import is_conf, read_conf, read_yaml
from rankmesh.core.documents import INDEX, Unreadable, parse, read_text, refused_as
from rankmesh.core.host_names import HOST_LIST, host_list, listed_hosts
from rankmesh.errors import ClusterError, LayoutError, RankmeshError, quoted

if TYPE_CHECKING:
    from rankmesh.core.clusters.cluster import Cluster
    from rankmesh.core.clusters.hosts import Host

__all__ = ["machine_of", "read"]

_FORMS = (
    "give what rankmesh cluster --json prints, Slurm's topology.conf or topology.yaml, kubectl get nodes -o json, "
    "aws ec2 describe-instance-topology, {host: switch}, or what nvidia-smi topo -m prints"
)


def read(kind: type[Cluster], path: Path, hosts: str | Iterable[str] | None, gpus_per_node: int | None) -> Cluster:
    """Return the cluster of a file, of the class ``kind``; see ``Cluster.read``."""
    hosts = None if hosts is None else host_list(hosts)
    text, data = _document(path)
    try:
        with refused_as(ClusterError, "the file", _FORMS):
            if isinstance(data, Mapping) and "levels" in data and "hosts" in data:
                cluster = kind.from_dict(data)
                known: dict[str, Host] = {host.name: host for host in cluster.hosts}
                if hosts is None:
                    return cluster
                chosen = tuple(known[name] for name in listed_hosts(hosts, known))
                return kind(cluster.levels, chosen, notes=cluster.notes)
            if is_links(text):
                return read_links(kind, text, hosts, gpus_per_node)
            return _machine(text, data).cluster(kind, hosts, gpus_per_node)
    except RankmeshError as error:
        if error.values.get("of") == HOST_LIST:  # the list is wrong, not the file
            raise
        line = error.values.get("line") or _line_of(text, error.values.get("host"))
        place = f"{path}, line {line}" if line else str(path)
        raise ClusterError(f"{place}: {error.message}", **{**error.values, "path": str(path), "line": line}) from error


def machine_of(path: Path) -> Machine:
    """Return the machine of a topology file, all of its hosts."""
    text, data = _document(path)
    with refused_as(ClusterError, str(path), _FORMS, path=str(path)):
        return _machine(text, data)


def _document(path: Path) -> tuple[str, object]:
    """Return the text of a file, and its data; None of a ``topology.conf`` and of a table of links."""
    with refused_as(ClusterError, str(path), _instead(str(path)), path=str(path)):
        text = read_text(path, INDEX.size)
        if not text.strip():
            raise Unreadable("is an empty file")
        return text, None if is_conf(text) or is_links(text) else parse(text)


def _instead(path: str) -> str:
    """Suggest what to give instead of a path: for a text of levels, the call that reads it."""
    try:
        parse_axes(path)
    except LayoutError:
        return f"{_FORMS}, or an axis string of the machine (host=8,leaf=4)"
    return f"a text of levels is read by Cluster.parse({quoted(path)})"


def _machine(text: str, data: object) -> Machine:
    if is_conf(text):
        return read_conf(text)
    machine = _structured(text, data)
    if machine is None or not machine.sites:
        raise ClusterError(f"the file describes no hosts; {_FORMS}")
    return machine


def _structured(text: str, data: object) -> Machine | None:
    if isinstance(data, list) and data and all(isinstance(row, Mapping) and "topology" in row for row in data):
        return read_yaml(data, _names(text))
    if not isinstance(data, Mapping):
        return None
    if isinstance(data.get("Instances"), list):
        return read_aws(data)
    if is_nodes(data):
        return read_nodes(data)
    if (
        data
        and data.keys().isdisjoint({"items", "kind"})
        and all(isinstance(key, str) and _is_switches(value) for key, value in data.items())
    ):
        return read_switches(data)
    return None


def _is_switches(value: object) -> bool:
    """Return whether a value is a host's switch, or its switches outward. The lists of a traffic file have mappings."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str | int) for name in value))


def _names(text: str) -> dict[str, int]:
    """Return the line of each ``switch:`` and ``block:`` of a topology.yaml."""
    found = re.compile(r"^[\s-]*(?:switch|block):\s*[\"']?([^\s\"'#]+)")
    lines = enumerate(text.splitlines(), start=1)
    return {match[1]: number for number, line in lines if (match := found.match(line)) is not None}


def _line_of(text: str, name: object) -> int | None:
    """Return the last line that has a name, of two lines that contradict each other, the later one."""
    if not isinstance(name, str) or not name:
        return None
    whole = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    return max((number for number, line in enumerate(text.splitlines(), 1) if whole.search(line)), default=None)
