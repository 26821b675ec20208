"""Hosts: which groups stay inside one node, and which cross.

    node(rank) = rank // gpus_per_node

```
gpus_per_node = 4      ranks  0 1 2 3 | 4 5 6 7
tp = 2                 [0 1] [2 3]    | [4 5] [6 7]     inside
dp = 4 of stride 2     [0 2 . . 4 6]  crosses           two nodes, two crossing hops of its ring
```

>>> from rankmesh.layout import Mesh
>>> mesh = Mesh(tp=2, dp=4)
>>> crossings(mesh.groups("tp"), 4)
Crossings(groups=4, crossing=0, nodes=1, hops=0)
>>> crossings(mesh.groups("dp"), 4)
Crossings(groups=2, crossing=2, nodes=2, hops=2)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankmesh.layout.axes import integer
from rankmesh.layout.groups import Groups

__all__ = ["Crossings", "crossings"]


@dataclass(frozen=True)
class Crossings:
    """How one kind of group lies on the nodes.

    ``groups``    how many groups of the kind there are
    ``crossing``  how many of them have members on more than one node
    ``nodes``     the most nodes that one group touches
    ``hops``      the most hops between nodes in one group's ring (member to next member, last to first)
    """

    groups: int
    crossing: int
    nodes: int
    hops: int


def crossings(groups: Groups, gpus_per_node: int) -> Crossings:
    """Count the crossings of one kind; nodes hold ``gpus_per_node`` consecutive ranks."""
    nodes = groups.array // integer(gpus_per_node, "gpus_per_node", least=1)
    hops = (nodes != np.roll(nodes, -1, axis=1)).sum(axis=1)
    ordered = np.sort(nodes, axis=1)
    touched = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    return Crossings(len(groups), int((touched > 1).sum()), int(touched.max()), int(hops.max()))
