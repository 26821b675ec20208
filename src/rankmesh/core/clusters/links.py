r"""The links inside one host, as ``nvidia-smi topo -m`` prints them, as levels inside hosts.

```
        GPU0  GPU1  GPU2  GPU3                  level   units          joined by
GPU0     X    PIX   SYS   SYS                   pix     0 1 | 2 3      one PCIe switch
GPU1    PIX    X    SYS   SYS                   host    0 1 2 3        the link between processors
GPU2    SYS   SYS    X    PIX
GPU3    SYS   SYS   PIX    X                    NV18 is 18 NVLinks; NODE is level numa
```

A level is one kind of link: its units are the devices that links of this kind, or nearer ones, join. The outermost is
the host. Source: the legend below the table; an NVLink has 25 GB/s each way (NVLink 2 to 4).

>>> from rankmesh.core.clusters.cluster import Cluster
>>> cluster = read_links(Cluster, "GPU0 X NV18\nGPU1 NV18 X\n", ("node1", "node2"), None)
>>> str(cluster), cluster.levels[0].bandwidth / 1e9
('4 devices, 2 hosts of 2, levels host network', 450.0)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from rankmesh.core.clusters.hosts import Host
from rankmesh.core.clusters.levels import BUS, PROCESSORS, Level
from rankmesh.core.grouped import grouped
from rankmesh.core.strided import IntArray
from rankmesh.errors import ClusterError, quoted

if TYPE_CHECKING:
    from rankmesh.core.clusters.cluster import Cluster

__all__ = ["is_links", "read_links"]

_TABLE = re.compile(r"^[^\S\n]*GPU0[^\S\n]+X(\s|$)", re.MULTILINE)
# A row of the table; its head begins with GPU0 too where a copy has lost the space before it.
_ROW = re.compile(r"^[^\S\n]*GPU[0-9]+[^\S\n]+(?!GPU|CPU|NIC|mlx)(.*)$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK = 25e9
# More than any host has.
_DEVICES = 64
# Kinds of link, the nearest first; NV with its number of links is nearer than all of them.
_LEVELS = {"PIX": "pix", "PXB": "pxb", "PHB": "phb", "NODE": "numa", "SYS": "sys", "SOC": "sys"}


@dataclass(frozen=True, order=True)
class _Kind:
    """One kind of link, ordered from the nearest on."""

    distance: float
    level: str
    bandwidth: float


def is_links(text: str) -> bool:
    """Return whether a text is what ``nvidia-smi topo -m`` prints."""
    return _TABLE.search(text) is not None


def read_links(kind: type[Cluster], text: str, hosts: Iterable[str] | None, gpus_per_node: int | None) -> Cluster:
    """Return hosts with these links inside them, in the launcher's order; one host if none is named.

    Raises ``ClusterError`` for a table with unknown links, and for another number of devices than its own.
    """
    table = _table(text)
    count = len(table)
    if gpus_per_node not in (None, count):
        raise ClusterError(
            f"the table has {count} GPUs, but {gpus_per_node} a host are asked for; leave --gpus-per-node out",
            received=gpus_per_node,
        )
    levels, inside = _levels(table)
    names = ("node0",) if hosts is None else tuple(hosts)
    note = f"the file describes the {count} GPUs of one host; name the hosts that are like it with --hosts"
    notes = (*((note,) if hosts is None else ()), *_unlinked(levels, inside))
    return kind(levels, tuple(Host(name, count, (), inside) for name in names), notes=notes)


def _unlinked(levels: Sequence[Level], inside: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield a note for each level by which some devices of a host are linked, and others are not."""
    for level, units in zip(levels, inside, strict=False):
        sets = grouped((unit, device) for device, unit in enumerate(units)).values()
        linked = ["GPUs " + ", ".join(map(str, each)) for each in sets if len(each) > 1]
        single = [each[0] for each in sets if len(each) == 1]
        if linked and single:
            which = f"GPU {single[0]} has" if len(single) == 1 else f"GPUs {', '.join(map(str, single))} have"
            yield f"{level.name} joins {' and '.join(linked)}; {which} no such link"


def _table(text: str) -> list[list[_Kind | None]]:
    """Return the kind of link between each two devices, None of a device to itself."""
    lines = enumerate(_COLOURS.sub("", text).splitlines(), 1)
    rows = [(number, found[1].split()) for number, line in lines if (found := _ROW.match(line)) is not None]
    if len(rows) > _DEVICES:
        raise ClusterError(f"the table has {len(rows)} GPUs, but at most {_DEVICES} are read; give one host's table")
    for number, cells in rows:
        if len(cells) < len(rows):
            raise ClusterError(
                f"the row has {len(cells)} links for {len(rows)} GPUs; give all of the table", line=number
            )
    return [[_kind(cell, number) for cell in cells[: len(rows)]] for number, cells in rows]


def _kind(cell: str, line: int) -> _Kind | None:
    if cell == "X":
        return None
    if found := re.fullmatch(r"NV([0-9]{1,3})", cell):
        return _Kind(-int(found[1]), f"nv{found[1]}", int(found[1]) * _NVLINK)
    if cell not in _LEVELS:
        raise ClusterError(
            f"{quoted(cell)} is not a link of nvidia-smi topo -m; known are NV1 and so on, {', '.join(_LEVELS)}",
            line=line,
        )
    return _Kind([*_LEVELS].index(cell) + 1, _LEVELS[cell], PROCESSORS if _LEVELS[cell] == "sys" else BUS)


def _levels(table: Sequence[Sequence[_Kind | None]]) -> tuple[tuple[Level, ...], tuple[tuple[int, ...], ...]]:
    """Return the levels up to the host, and the units of its devices at each level inside it."""
    links = sorted((kind, one, other) for one, row in enumerate(table) for other, kind in enumerate(row) if kind)
    kinds: list[_Kind] = []
    found: list[tuple[_Kind, IntArray]] = []
    units = np.arange(len(table))
    for kind, pairs in groupby(links, key=lambda link: link[0]):
        kinds.append(kind)
        joined = units.copy()
        for _, one, other in pairs:
            joined[joined == joined[other]] = joined[one]
        if not np.array_equal(joined, units):
            found.append((kind, joined))
        units = joined
    names = [_name(kind, kinds) for kind, _ in found[:-1]] + ["host"]
    levels = Level.all_unmeasured(names)
    if found:
        levels = tuple(replace(level, bandwidth=kind.bandwidth) for level, (kind, _) in zip(levels, found, strict=True))
    return levels, tuple(tuple(np.unique(units, return_inverse=True)[1].tolist()) for _, units in found[:-1])


def _name(kind: _Kind, kinds: Sequence[_Kind]) -> str:
    """Return the name of a level: nvlink for NVLinks, unless pairs have different numbers of them."""
    several = sum(each.distance < 0 for each in kinds) > 1
    return kind.level if kind.distance > 0 or several else "nvlink"
