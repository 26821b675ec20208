"""Crossings: how the groups of one kind lie on a cluster. The one definition of a hop.

    a group is a ring: member to next member, last to first; a hop that leaves a host is counted

```
hosts of 4             ranks  0 1 2 3 | 4 5 6 7
tp = 2                 [0 1] [2 3]    | [4 5] [6 7]     inside
dp = 4 of stride 2     [0 2 . . 4 6]  crosses           two hosts, two hops between them in its ring
```

>>> from rankmesh.core import Mesh
>>> crossings(Mesh(tp=2, dp=4).groups("dp"), Cluster.of_nodes(4, 8))
Crossings(groups=2, crossing=2, nodes=2, hops=2)
>>> boards = Cluster.parse("board=2,host=2,leaf=2")
>>> [crossings(Mesh(tp=4, dp=2).groups("tp"), boards, level).crossing for level in ("board", "host")]
[2, 0]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankmesh.core.clusters.cluster import Cluster, Level
from rankmesh.core.groups import Groups
from rankmesh.core.strided import IntArray

__all__ = ["Crossings", "crossings", "hops", "widest"]


@dataclass(frozen=True)
class Crossings:
    """The spread of one kind of group over the hosts, or over the units of another level.

    ``groups``    how many groups of the kind there are
    ``crossing``  how many of them have members on more than one host
    ``nodes``     the most hosts that one group touches
    ``hops``      the most hops between hosts in one group's ring (member to next member, last to first)
    """

    groups: int
    crossing: int
    nodes: int
    hops: int


def hops(ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Return the start and the end of each hop of a ring: groups along the last axis, same shape."""
    return ranks, np.roll(ranks, -1, axis=-1)


def widest(groups: Groups, cluster: Cluster) -> Level:
    """Return the innermost level that holds every group of a kind."""
    apart = [crossings(groups, cluster, level.name).crossing > 0 for level in cluster.levels[:-1]]
    return cluster.levels[sum(apart)]


def crossings(groups: Groups, cluster: Cluster | int, level: str | None = None) -> Crossings:
    """Count the crossings of one kind on a cluster; a number is the consecutive ranks of each host.

    ``level`` counts the units of another level in place of hosts: boards, blocks.
    """
    if not isinstance(cluster, Cluster):
        cluster = Cluster.of_nodes(cluster, groups.rank_range.stop)
    cluster.hosts_of(groups.rank_range.stop - 1)
    if groups.size == 1:
        return Crossings(len(groups), crossing=0, nodes=1, hops=0)
    number = cluster.host_level if level is None else cluster.level(level)
    units = cluster.units_of(number, groups.array)
    between = hops(units)
    ordered = np.sort(units, axis=1)
    touched = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    return Crossings(
        groups=len(groups),
        crossing=int((touched > 1).sum()),
        nodes=int(touched.max()),
        hops=int((between[0] != between[1]).sum(axis=1).max()),
    )
