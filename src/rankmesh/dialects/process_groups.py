"""The minimal ``ProcessGroups(tp, pp, dp)``: three overlapping kinds of group, and where this rank is in each.

    rank = tp_rank + tp · (pp_rank + pp · dp_rank)

```
tp=2 pp=2 dp=2        dp 0    stage 0   0 1        TP  [0,1] [2,3] [4,5] [6,7]
                              stage 1   2 3        PP  [0,2] [1,3] [4,6] [5,7]
                      dp 1    stage 0   4 5        DP  [0,4] [1,5] [2,6] [3,7]
                              stage 1   6 7
```
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rankmesh.core import recipes
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.registry import Registry, refusing_sizes, world_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ProcessGroups"]


class ProcessGroups(AbstractContextManager["ProcessGroups"]):
    """The tensor, pipeline and data parallel group of this rank; the sizes multiply to the world.

    Attributes: ``tp_group``, ``tp_rank``, ``tp_size`` and the same for ``pp`` and ``dp``; ``is_first_stage`` and
    ``is_last_stage`` of the pipeline; ``groups``, the live groups themselves.

    ``SizesError`` (an ``AssertionError``) for sizes that do not give the world, ``NotInitialized`` (one too) without a
    world. Unlike the classes that it replaces, it makes the groups of this rank only, refuses ranks that pass other
    sizes instead of hanging, and ``close`` (or leaving a ``with`` block) destroys what it made.
    """

    tp_group: ProcessGroup
    pp_group: ProcessGroup
    dp_group: ProcessGroup

    def __init__(self, tp: int, pp: int, dp: int) -> None:
        world = world_size("ProcessGroups(tp, pp, dp)")
        with refusing_sizes():
            plan = recipes.three_d(world, tp=tp, pp=pp, dp=dp)
        self._registry = Registry("process_groups", "ProcessGroups", "close")
        groups = self._registry.open(plan)
        self.tp_size, self.pp_size, self.dp_size = tp, pp, dp
        self.tp_group, self.pp_group, self.dp_group = (groups[axis].pg for axis in ("tp", "pp", "dp"))
        self.tp_rank, self.pp_rank, self.dp_rank = (groups[axis].rank for axis in ("tp", "pp", "dp"))
        self.is_first_stage = groups["pp"].is_first
        self.is_last_stage = groups["pp"].is_last

    @property
    def groups(self) -> LiveGroups:
        """The live groups ``tp``, ``pp`` and ``dp``; ``NotInitialized`` after ``close``."""
        return self._registry.groups

    def log(self, rank: int) -> None:
        """Print the three sizes where ``rank`` is 0, so that one rank of the job does."""
        if rank == 0:
            print(f"  Process groups | TP={self.tp_size} PP={self.pp_size} DP={self.dp_size}")  # noqa: T201  - its task

    def close(self) -> None:
        """Destroy the groups; calling it again is nothing."""
        self._registry.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ProcessGroups(tp={self.tp_size}, pp={self.pp_size}, dp={self.dp_size})"
