"""Everyone: the ranks of a plan, which compare digests in one small reduction, and exchange data in a round.

```
rank 0   slot 0: 7            least 7, least complement ~7    fit together: all ranks gave 7
rank 1   slot 0: 7, 1: 4
rank 2   slot 1: 5            least 4, least complement ~5    do not: slot 1 differs
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError
from rankmesh.rendezvous import gather_work
from rankmesh.runtime.connect import connect
from rankmesh.runtime.live import LiveGroups

__all__ = ["Everyone", "gathered", "results"]

# In a slot for which no rank gives a digest.
_NOTHING = 2**63 - 1


class Everyone:
    """The process group of all ranks of a plan: torch's default group where the world has no others."""

    def __init__(self, groups: LiveGroups) -> None:
        mesh = groups.plan.mesh
        self.groups, self.rank, self.pg = groups, groups.rank, dist.group.WORLD
        self._connected: LiveGroups | None = None
        if mesh.size < groups.world_size:
            self._connected = connect(Plan(mesh, [GroupSpec("everyone", axes="-".join(mesh.axes))]))
            self.pg = self._connected["everyone"].pg
        backend = str(dist.get_backend_config(self.pg)) if mesh.size > 1 else ""
        self.device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    def compare(self, size: int, slots: Sequence[int], digests: Tensor) -> Callable[[], list[int]]:
        """Begin to compare: each rank gives digests for some of ``size`` slots, and for one of them perhaps several.

        Every rank calls it. The call that it returns waits, and returns the slots of digests that differ.
        """
        least = torch.full((2, size), _NOTHING, dtype=torch.int64, device=self.device)
        where = torch.tensor([slots, slots], dtype=torch.int64, device=self.device)
        least.scatter_reduce_(1, where, torch.stack([digests, ~digests]), "amin")
        work = dist.all_reduce(least, dist.ReduceOp.MIN, group=self.pg, async_op=True)

        def differ() -> list[int]:
            if work is not None:
                work.wait()
            found: list[int] = torch.nonzero((least[0] != ~least[1]) & (least[0] != _NOTHING)).flatten().tolist()
            return found

        return differ

    def close(self) -> None:
        """Destroy the process group, unless it is torch's own."""
        if self._connected is not None:
            self._connected.close()


def gathered(groups: LiveGroups, data: object, what: str = "guard.step()") -> dict[int, Any]:
    """Return the data of each rank of the plan that gives any, by rank; every rank calls it, maybe with None.

    Data are JSON values. A rank waits for the others as long as in a collective; ``what`` names the call in errors.
    """
    return results(groups, lambda: data, what)


def results(groups: LiveGroups, work: Callable[[], object], what: str) -> dict[int, Any]:
    """Call ``work`` on each rank, and return the results as ``gathered`` does; ``PlanError`` on all if one fails."""
    ranks = groups.plan.mesh.rank_range.ascending.tolist()
    among = groups.world.round(f"guard/{groups.plan.digest[:16]}/{groups.key}/{groups.epoch}", ranks)
    seconds = groups.world.default.timeout.total_seconds()
    found = gather_work(among, work, list, seconds, what, PlanError)
    return {rank: one for rank, one in zip(ranks, found, strict=True) if one is not None}
