"""Transfers on an emulated cluster in racks: what the slow levels carry, by the plan and by the counters of the links.

```
replicas   TP2·PP2·DP2, a replica in each rack, to TP4·DP2           nothing needs to cross the trunk
stages     TP2·DP2·PP2, a stage in each rack, to TP2·DP4             half of what a rank needs is in the other rack
grown      TP2·DP2 in the first rack, to TP2·DP4 in both             all that the second rack gets
```

No plan without relays sends less over a level than what no nearer rank has: counted element by element beside the plan.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np

import rankmesh as rm
from bench.emulated import Emulated

__all__ = ["CASES", "bound", "refits"]

BUDGET = 4 << 20
LAYERS, HIDDEN = 2, 512


def _model(mesh: rm.Mesh, stages: int = 1) -> dict[str, rm.Sharding]:
    """A few matrices cut over tp, by rows and by columns, each layer on its stage."""
    made = {}
    for layer in range(LAYERS):
        at = {"pp": layer * stages // LAYERS} if stages > 1 else None
        made[f"{layer}.up"] = rm.Sharding(mesh, ("tp", None), (4 * HIDDEN, HIDDEN), at=at)
        made[f"{layer}.down"] = rm.Sharding(mesh, (None, "tp"), (HIDDEN, 4 * HIDDEN), at=at)
    return made


CASES = {
    "replicas": (_model(rm.Mesh(tp=2, pp=2, dp=2), stages=2), _model(rm.Mesh(tp=4, dp=2))),
    "stages": (_model(rm.Mesh(tp=2, dp=2, pp=2), stages=2), _model(rm.Mesh(tp=2, dp=4))),
    "grown": (_model(rm.Mesh(tp=2, dp=2)), _model(rm.Mesh(tp=2, dp=4))),
}


def bound(case: str, cluster: rm.Cluster) -> dict[str, int]:
    """The least bytes over each level: each element that a rank needs counts for the level of its nearest holder."""
    source, target = CASES[case]
    found = dict.fromkeys((level.name for level in cluster.levels), 0)
    units = cluster.units
    for name, wanted in target.items():
        kept = {rank: _mask(source[name], rank) for rank in range(cluster.size) if source[name].holds(rank)}
        for rank in range(cluster.size):
            missing = _mask(wanted, rank)
            missing &= ~kept.get(rank, np.zeros_like(missing))
            for level, local in zip(found, units, strict=True):
                near = [mask for other, mask in kept.items() if local[other] == local[rank]]
                here = missing & np.logical_or.reduce(near) if near else np.zeros_like(missing)
                found[level] += int(here.sum()) * wanted.itemsize
                missing &= ~here
    return found


def _mask(sharding: rm.Sharding, rank: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.zeros(sharding.shape, dtype=bool)
    for box in sharding.of(rank).boxes:
        mask[tuple(slice(*edges) for edges in box)] = True
    return mask


def refits(there: Emulated) -> dict[str, Any]:
    """Bytes by level of each case: planned, at least, and counted at the links."""
    found: dict[str, Any] = {}
    for case, sides in CASES.items():
        moves = rm.Transfer(*sides, there.cluster)
        least = bound(case, there.cluster)
        found[case] = {"levels": dict(moves.levels), "least": least, "carried": _carried(there, moves)}
    return found


def _carried(there: Emulated, moves: rm.Transfer) -> dict[str, int]:
    """What the hosts' links and the trunk carry while it moves, headers and the store's messages included."""
    before = _counters(there)
    there.on_ranks(_moved, moves)
    return {name: after - before[name] for name, after in _counters(there).items()}


def _moved(moves: rm.Transfer) -> None:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    tensors = {name: _numbers(s, rank) for name, s in moves.source.items() if s.holds(rank)}
    into = moves.allocate(rank)
    moves.run(tensors, into, BUDGET)
    wrong = [name for name, tensor in into.items() if not torch.equal(tensor, _numbers(moves.target[name], rank))]
    if wrong:
        raise RuntimeError(f"rank {rank} received a wrong {wrong[0]}")


def _numbers(sharding: rm.Sharding, rank: int) -> Any:
    """The shard of a rank, each element its number in the whole tensor; exact in float32."""
    import torch

    (box,) = sharding.of(rank).boxes
    rows, columns = (torch.arange(start, stop) for start, stop in box)
    return (rows[:, None] * sharding.shape[1] + columns[None, :]).float()


def _counters(there: Emulated) -> Mapping[str, int]:
    """Bytes sent so far: by all hosts, and over the trunk, both ways."""
    switch = f"{there.run}-switch"
    trunk = sum(_sent(switch, f"trunk{side}") for side in (0, 1)) if there.trunk is not None else 0
    return {"hosts": sum(_sent(there.space(host), "eth0") for host in there.hosts), "trunk": trunk}


def _sent(space: str, link: str) -> int:
    result = subprocess.run(  # noqa: S603  - iproute2
        ["ip", "-n", space, "-s", "-j", "link", "show", "dev", link],  # noqa: S607
        check=True,
        capture_output=True,
        timeout=30,
    )
    return int(json.loads(result.stdout)[0]["stats64"]["tx"]["bytes"])
