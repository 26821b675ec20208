"""Slurm: its topology files.

```
topology.conf, tree                        topology.conf, block
SwitchName=s1 Nodes=node[1-2]              BlockName=b1 Nodes=node[1-2]
SwitchName=s2 Nodes=node[3-4]              BlockName=b2 Nodes=node[3-4]
SwitchName=top Switches=s[1-2]             BlockSizes=2,4
levels host leaf spine                     levels host nvlink leaf: two blocks of 2 make one of 4
```

What ``scontrol show topology`` prints is read alike. Switches that have the same below them are one unit. Rings and
tori have no levels, and are refused.

``topology.yaml`` is read alike; of several topologies the one with ``cluster_default: true`` is read, else the first.
Source: topology.conf(5), topology.yaml(5), scontrol(1) of Slurm 22.05 and of 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from rankmesh.core.clusters.machine import Machine, Site, network
from rankmesh.core.host_names import host_list
from rankmesh.errors import ClusterError, quoted

__all__ = ["is_conf", "read_conf", "read_yaml"]

_CONF = re.compile(
    r"^[^\S\n]*(SwitchName|BlockName|BlockSizes|AggregatedBlock|RingName|TorusName)\s*=", re.IGNORECASE | re.MULTILINE
)
_WORD = re.compile(r"(\w+)\s*=\s*(\S+)")
# The words that a line of a file may have, by the name that it begins with, in lower case.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "switchname": ("Nodes", "Switches", "LinkSpeed", "Level"),
    "blockname": ("Nodes", "BlockIndex", "BlockSize"),
    "aggregatedblock": ("Nodes", "BlockIndex", "BlockSize"),
    "blocksizes": (),
}
_JOINED = 4


def is_conf(text: str) -> bool:
    """Return whether a text is a ``topology.conf``, or what ``scontrol show topology`` prints."""
    return _CONF.search(text) is not None


@dataclass
class _Tree:
    """Switches as they are read: the line of each, and what is below it.

    Switches with the same below them, as two spines over the same leaves, are one unit: what is below one is as near by
    the other.
    """

    lines: dict[str, int] = field(default_factory=dict)
    switches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    speeds: set[str] = field(default_factory=set)

    def add(self, name: str, switches: str, nodes: str, line: int, speed: str = "") -> None:
        if name in self.lines:
            raise _refused(line, f"switch {quoted(name)} is described twice, first on line {self.lines[name]}")
        self.lines[name] = line
        self.switches[name], self.nodes[name] = host_list(switches), host_list(nodes)
        self.speeds.add(speed)

    def machine(self) -> Machine:
        for name, children in self.switches.items():
            for child in children:
                if child not in self.lines:
                    raise _refused(
                        self.lines[name], f"switch {quoted(child)} is under {quoted(name)}, but no line describes it"
                    )
        try:
            order = list(TopologicalSorter(self.switches).static_order())
        except CycleError as error:
            line = min(self.lines[name] for name in error.args[1])
            raise _refused(line, f"switches are under themselves: {quoted(' < '.join(error.args[1]))}") from error
        heights: dict[str, int] = {}
        for name in order:
            heights[name] = 1 + max((heights[child] for child in self.switches[name]), default=0)
        depth = max(heights.values(), default=0)
        levels = network(depth)
        units, notes = self._units(heights)
        above = {what: self._above(what, units) for what in ("switch", "node")}
        named = {units[name]: heights[name] for name in self.lines}
        sites = {
            node: Site(_chain(unit, above["switch"], named, depth), None, line)
            for node, (unit, line) in above["node"].items()
        }
        if self.speeds - {"", "1"}:  # Slurm prints a speed of 1 where none is given
            notes.append(
                "LinkSpeed is ignored: its unit is up to each site; give levels their bandwidth, or measure them"
            )
        return Machine(levels, sites, tuple(notes))

    def _units(self, heights: Mapping[str, int]) -> tuple[dict[str, str], list[str]]:
        """Return the unit that each switch is (a part of), and notes of those that are several switches."""
        units: dict[str, str] = {}
        notes = []
        for height in range(1, max(heights.values(), default=0) + 1):
            same: dict[object, list[str]] = {}
            for name in (name for name, at in heights.items() if at == height):
                below = frozenset(units[child] for child in self.switches[name]), frozenset(self.nodes[name])
                same.setdefault(below if any(below) else name, []).append(name)
            for names in same.values():
                unit = "+".join(names[:_JOINED]) + (f"+{len(names) - _JOINED} more" if len(names) > _JOINED else "")
                units.update(dict.fromkeys(names, unit))
                if len(names) > 1:
                    notes.append(f"{unit}: {len(names)} switches with the same below them are read as one")
        return units, notes

    def _above(self, what: str, units: Mapping[str, str]) -> dict[str, tuple[str, int]]:
        """Return the unit above each unit of switches, or above each node, and the first line with it."""
        found: dict[str, tuple[str, int]] = {}
        for name, line in self.lines.items():
            below = self.nodes[name] if what == "node" else tuple(units[child] for child in self.switches[name])
            for child in below:
                other, first = found.setdefault(child, (units[name], line))
                if other != units[name]:
                    raise _refused(
                        line,
                        f"{what} {quoted(child)} is under {quoted(units[name])}, and under {quoted(other)} on line "
                        f"{first}, and the two do not have the same below them",
                        host=child,
                    )
        return found


def _chain(name: str, above: Mapping[str, tuple[str, int]], heights: Mapping[str, int], depth: int) -> tuple[str, ...]:
    """Return the unit at each level: a switch is at its height, and itself until the next one above."""
    chain, here = [], name
    for height in range(1, depth + 1):
        if here in above and heights[above[here][0]] <= height:
            here = above[here][0]
        chain.append(here)
    return tuple(chain)


@dataclass
class _Blocks:
    """Blocks as they are read, in order, and the sizes that they are joined to."""

    blocks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    block_of: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    joined: dict[int, dict[str, str]] = field(default_factory=dict)

    def join(self, name: str, nodes: str, size: int) -> None:
        """Add a line that ``scontrol`` prints of blocks that are joined to a larger one."""
        self.joined.setdefault(size, {}).update(dict.fromkeys(host_list(nodes), name))

    def add(self, name: str, nodes: str, line: int) -> None:
        if name in self.blocks:
            raise _refused(line, f"block {quoted(name)} is described twice, first on line {self.lines[name]}")
        self.lines[name], self.blocks[name] = line, host_list(nodes)
        for node in self.blocks[name]:
            other = self.block_of.setdefault(node, name)
            if other != name:
                where = f"in block {quoted(name)}, and in {quoted(other)} on line {self.lines[other]}"
                raise _refused(line, f"node {quoted(node)} is {where}", host=node)

    def machine(self) -> Machine:
        base, *larger = self.sizes or (0,)
        if any(not base or size % base for size in larger):
            raise ClusterError(f"block sizes {quoted(self.sizes)} are not multiples of the first; fix the file")
        if self.joined:
            larger = sorted(self.joined)
        levels = ("nvlink", *network(len(larger)))
        sites = {}
        for number, (name, nodes) in enumerate(self.blocks.items()):
            for node in nodes:
                joined = (
                    self.joined[size].get(node, name) if self.joined else f"{size}x{number * base // size}"
                    for size in larger
                )
                sites[node] = Site((name, *joined), None, self.lines[name])
        return Machine(levels, sites)


def read_conf(text: str) -> Machine:
    """Read a ``topology.conf`` for ``topology/tree`` or ``topology/block``, or ``scontrol show topology``.

    Raises ``ClusterError`` with the line where it contradicts itself.
    """
    tree, blocks = _Tree(), _Blocks()
    for line, words in _lines(text):
        kind = next((word for word in words if word in _KEYS), None)
        if kind is None:
            raise _refused(line, "the line names no switch and no block, and rings and tori have no levels to read")
        name = words[kind]
        odd = next((word for word in words if word not in (kind, *map(str.lower, _KEYS[kind]))), None)
        if odd is not None:
            raise _refused(line, f"{quoted(odd)} is none of {', '.join(_KEYS[kind]) or 'its words'}")
        nodes, switches = words.get("nodes", ""), words.get("switches", "")
        if kind == "switchname":
            # Of a switch over others scontrol lists the nodes below all of them as well.
            summed = switches and "level" in words
            tree.add(name, switches, "" if summed else nodes, line, words.get("linkspeed", ""))
        elif kind == "blockname":
            blocks.add(name, nodes, line)
        elif kind == "aggregatedblock":
            blocks.join(name, nodes, _sizes([words.get("blocksize", "")], line)[0])
        else:
            blocks.sizes = _sizes(name.split(","), line)
    if tree.lines and blocks.blocks:
        raise _refused(min(blocks.lines.values()), "the file has blocks beside switches; it can have one of the two")
    return tree.machine() if tree.lines else blocks.machine()


def _lines(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the words of each line, joined where it ends in a backslash, keys in lower case."""
    kept, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        kept, start = kept + line.partition("#")[0].rstrip(), start or number
        if kept.endswith("\\"):
            kept = kept[:-1] + " "
            continue
        if kept.strip():
            left = _WORD.sub("", kept).strip()
            if left:
                raise _refused(start, f"{quoted(left)} is not a Name=value")
            yield start, {key.lower(): value for key, value in _WORD.findall(kept)}
        kept, start = "", 0


def read_yaml(data: list[object], line_of: Mapping[str, int]) -> Machine:
    """Return the machine of a ``topology.yaml``; ``line_of`` has the lines of names."""
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


def _rows(data: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    rows = data.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ClusterError(f"{key} is {quoted(rows)}; topology.yaml lists them; fix the file", key=key)
    return rows


def _sizes(values: Iterable[object], line: int) -> tuple[int, ...]:
    texts = [str(value).strip() for value in values]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", text) for text in texts):
        raise _refused(line, f"block sizes {quoted(', '.join(texts))} are not whole numbers of nodes")
    return tuple(map(int, texts))


def _refused(line: int, what: str, **values: object) -> ClusterError:
    return ClusterError(f"{what}; fix the file", line=line or None, **values)
