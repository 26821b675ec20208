"""Slurm: its topology files, and what it tells a job.

```
topology.conf, tree                        topology.conf, block
SwitchName=s1 Nodes=node[1-2]              BlockName=b1 Nodes=node[1-2]
SwitchName=s2 Nodes=node[3-4]              BlockName=b2 Nodes=node[3-4]
SwitchName=top Switches=s[1-2]             BlockSizes=2,4
levels host leaf spine                     levels host nvlink leaf: two blocks of 2 make one of 4
```

``topology.yaml`` says the same; of several topologies the one with ``cluster_default: true`` is read, else the first.
Source: topology.conf(5), topology.yaml(5), and the output variables of srun(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankmesh.errors import ClusterError, quoted
from rankmesh.placement.cluster import Cluster, Host, Level
from rankmesh.placement.machine import NETWORK, Machine, Site
from rankmesh.placement.names import host_list, task_counts

__all__ = ["is_conf", "read_conf", "read_yaml", "slurm_job"]

_CONF = re.compile(r"^[^\S\n]*(SwitchName|BlockName|BlockSizes)\s*=", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"(\w+)\s*=\s*(\S+)")


def is_conf(text: str) -> bool:
    """Whether a text is a ``topology.conf``."""
    return _CONF.search(text) is not None


@dataclass
class _Tree:
    """Switches as they are read: the line and the children of each, and the parent of each child."""

    lines: dict[str, int] = field(default_factory=dict)
    switches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parent: dict[str, str] = field(default_factory=dict)
    leaf: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, switches: str, nodes: str, line: int) -> None:
        if name in self.lines:
            raise _refused(line, f"switch {name!r} is described twice, first on line {self.lines[name]}")
        self.lines[name] = line
        self.switches[name] = host_list(switches)
        for child in self.switches[name]:
            self._put(self.parent, "switch", child, name, line)
        for node in host_list(nodes):
            self._put(self.leaf, "node", node, name, line)

    def _put(self, place: dict[str, str], what: str, child: str, name: str, line: int) -> None:
        if child in place:
            first = place[child]
            raise _refused(
                line,
                f"{what} {child!r} is under {name!r}, and under {first!r} on line {self.lines[first]}",
                host=child,
            )
        place[child] = name

    def machine(self) -> Machine:
        for child, name in self.parent.items():
            if child not in self.lines:
                raise _refused(self.lines[name], f"switch {child!r} is under {name!r}, but no line describes it")
        heights: dict[str, int] = {}
        for name in self.lines:
            self._height(name, heights, ())
        depth = max(heights.values(), default=0)
        if depth > len(NETWORK):
            raise ClusterError(f"switches are {depth} deep, but at most {len(NETWORK)} levels are read", depth=depth)
        sites = {
            node: Site(self._chain(name, heights, depth), None, self.lines[name]) for node, name in self.leaf.items()
        }
        return Machine(NETWORK[:depth], sites)

    def _height(self, name: str, heights: dict[str, int], path: tuple[str, ...]) -> int:
        if name in path:
            raise _refused(self.lines[name], f"switch {name!r} is under itself ({' < '.join((*path, name))})")
        if name not in heights:
            children = (self._height(child, heights, (*path, name)) for child in self.switches[name])
            heights[name] = 1 + max(children, default=0)
        return heights[name]

    def _chain(self, name: str, heights: Mapping[str, int], depth: int) -> tuple[str, ...]:
        """The unit at each level: a switch stands at its height, and for itself until the next one above."""
        chain, here = [], name
        for height in range(1, depth + 1):
            above = self.parent.get(here)
            if above is not None and heights[above] <= height:
                here = above
            chain.append(here)
        return tuple(chain)


@dataclass
class _Blocks:
    """Blocks as they are read, in order, and the sizes that they are joined to."""

    blocks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()

    def add(self, name: str, nodes: str, line: int) -> None:
        if name in self.blocks:
            raise _refused(line, f"block {name!r} is described twice, first on line {self.lines[name]}")
        self.lines[name], listed = line, host_list(nodes)
        for other, taken in self.blocks.items():
            for node in set(listed).intersection(taken):
                raise _refused(
                    line,
                    f"node {node!r} is in block {name!r}, and in {other!r} on line {self.lines[other]}",
                    host=node,
                )
        self.blocks[name] = listed

    def machine(self) -> Machine:
        base, *larger = self.sizes or (0,)
        if any(not base or size % base for size in larger):
            raise ClusterError(f"block sizes {quoted(self.sizes)} are no multiples of the first; fix the file")
        sites = {}
        for number, (name, nodes) in enumerate(self.blocks.items()):
            joined = tuple(f"{size}x{number * base // size}" for size in larger)
            sites.update({node: Site((name, *joined), None, self.lines[name]) for node in nodes})
        return Machine(("nvlink", *NETWORK[: len(larger)]), sites)


def read_conf(text: str) -> Machine:
    """The machine of a ``topology.conf`` for ``topology/tree`` or ``topology/block``.

    Raises ``ClusterError`` with the line where it contradicts itself.
    """
    tree, blocks = _Tree(), _Blocks()
    for line, words in _lines(text):
        if "switchname" in words:
            tree.add(words["switchname"], words.get("switches", ""), words.get("nodes", ""), line)
        elif "blockname" in words:
            blocks.add(words["blockname"], words.get("nodes", ""), line)
        elif "blocksizes" in words:
            blocks.sizes = _sizes(words["blocksizes"].split(","), line)
        else:
            raise _refused(line, "the line names no switch and no block")
    if tree.lines and blocks.blocks:
        raise _refused(min(blocks.lines.values()), "the file has blocks beside switches; it can have one of the two")
    return tree.machine() if tree.lines else blocks.machine()


def _lines(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The words of each line, joined where it ends in a backslash, keys in lower case."""
    kept, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        kept, start = kept + line.partition("#")[0].rstrip(), start or number
        if kept.endswith("\\"):
            kept = kept[:-1] + " "
            continue
        if kept.strip():
            left = _WORD.sub("", kept).strip()
            if left:
                raise _refused(start, f"{quoted(left)} is no Name=value")
            yield start, {key.lower(): value for key, value in _WORD.findall(kept)}
        kept, start = "", 0


def read_yaml(data: list[Any], line_of: Mapping[str, int]) -> Machine:
    """The machine of a ``topology.yaml``; ``line_of`` knows where names stand."""
    rows = [row for row in data if isinstance(row, Mapping)]
    default = [row for row in rows if row.get("cluster_default")]
    row = (default or rows)[0]
    if isinstance(row.get("tree"), Mapping):
        tree = _Tree()
        for switch in _rows(row["tree"], "switches"):
            name = str(switch.get("switch"))
            children, nodes = str(switch.get("children") or ""), str(switch.get("nodes") or "")
            tree.add(name, children, nodes, line_of.get(name, 0))
        return tree.machine()
    if isinstance(row.get("block"), Mapping):
        blocks = _Blocks(sizes=_sizes(row["block"].get("block_sizes") or [], 0))
        for block in _rows(row["block"], "blocks"):
            name = str(block.get("block"))
            blocks.add(name, str(block.get("nodes") or ""), line_of.get(name, 0))
        return blocks.machine()
    raise ClusterError(
        f"topology {quoted(row.get('topology'))} is neither a tree nor blocks, so it has no levels to read; describe "
        "the machine as host=8,leaf=4"
    )


def _rows(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = data.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ClusterError(f"{key} is {quoted(rows)}; topology.yaml lists them; fix the file", key=key)
    return rows


def _sizes(values: list[Any], line: int) -> tuple[int, ...]:
    texts = [str(value).strip() for value in values]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", text) for text in texts):
        raise _refused(line, f"block sizes {quoted(', '.join(texts))} are no whole numbers of nodes")
    return tuple(map(int, texts))


def _refused(line: int, what: str, **values: object) -> ClusterError:
    return ClusterError(f"{what}; fix the file", line=line or None, **values)


def slurm_job(environment: Mapping[str, str], machine: Machine | None = None) -> Cluster:
    """The hosts of a Slurm job, as its environment says, in ``machine`` where there is a topology file.

    Devices are the tasks of each host, which hold the ranks in Slurm's order: by host (block), or dealt out (cyclic).

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
    found = machine.cluster(names, 1)
    counts = dict(zip(names, tasks, strict=True))
    places = {host.name: host.places for host in found.hosts}
    return Cluster(
        found.levels, tuple(Host(name, counts[name], places[name]) for name in names), _dealt(environment, tasks)
    )


def _first(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def _dealt(environment: Mapping[str, str], tasks: Sequence[int]) -> tuple[int, ...] | None:
    """The rank at each task, host by host; None where hosts are filled one after the other."""
    how = environment.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0].lower()
    if how in ("block", ""):
        return None
    if how != "cyclic":
        raise ClusterError(
            f"SLURM_DISTRIBUTION is {quoted(how)}, but only block and cyclic can be read from the environment; let the "
            "ranks say where they are: rankmesh cluster inside the job, or rm.discover()",
            received=how,
        )
    rounds = [(turn, host) for turn in range(max(tasks)) for host, count in enumerate(tasks) if turn < count]
    rank = {place: number for number, place in enumerate(rounds)}
    return tuple(rank[turn, host] for host, count in enumerate(tasks) for turn in range(count))
