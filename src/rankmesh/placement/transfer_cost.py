"""Cost of a transfer on a cluster: bytes over each link, and seconds by its latencies and bandwidths.

```
level leaf     node0 ──▶ 3.0 MiB       bytes that leave the unit below, and that enter it
               node1 ◀── 3.0 MiB
```

A rank sends and receives at once, each level at its own bandwidth; a unit's uplink is shared by all of its ranks. The
slowest of these decides: nothing waits for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.strided import IntArray

__all__ = ["Link", "links", "seconds"]

# Of `rankmesh.transfer.planning.flows`, which imports no placement, and is not imported by it.
Flows: TypeAlias = Any


@dataclass(frozen=True)
class Link:
    """The traffic between one unit and the level around it: ``unit`` by name, bytes out and in."""

    level: str
    unit: str
    out: int
    into: int


def links(flows: Flows, cluster: Cluster) -> list[Link]:
    """Return the busiest unit at each level that anything crosses, outermost first."""
    found = []
    for number in range(len(cluster.levels) - 1, 0, -1):
        out, into = _crossing(flows, cluster, number)
        busiest = np.maximum(out, into)
        if len(busiest) and busiest.max():
            unit = int(busiest.argmax())
            name = cluster.unit_names(number - 1)[unit]
            found.append(Link(cluster.levels[number].name, name, int(out[unit]), int(into[unit])))
    return found


def seconds(flows: Flows, cluster: Cluster) -> float:
    """Return the transfer's seconds by the cluster's latencies and bandwidths, if all of it travels at once."""
    slowest = 0.0
    size = cluster.size
    for ranks in (flows.source, flows.target):
        busy = np.zeros(size)
        for number, level in enumerate(cluster.levels):
            here = flows.level == number
            pairs = np.unique(flows.source[here] * size + flows.target[here])
            peers = pairs // size if ranks is flows.source else pairs % size
            busy += np.bincount(ranks[here], flows.bytes[here], minlength=size) / level.bandwidth
            busy += np.bincount(peers, minlength=size) * level.latency
        slowest = max(slowest, float(busy.max(initial=0.0)))
    for number, level in enumerate(cluster.levels):
        if level.uplink is not None and number:
            slowest = max(
                slowest, *(float(side.max(initial=0)) / level.uplink for side in _crossing(flows, cluster, number))
            )
    return slowest


def _crossing(flows: Flows, cluster: Cluster, number: int) -> tuple[IntArray, IntArray]:
    """Bytes that leave and enter each unit of the level below ``number``."""
    units = cluster.units[number - 1]
    count, over = int(units.max()) + 1, flows.level >= number
    sides = (
        np.bincount(units[ranks[over]], flows.bytes[over], minlength=count) for ranks in (flows.source, flows.target)
    )
    out, into = (side.astype(np.int64) for side in sides)
    return out, into
