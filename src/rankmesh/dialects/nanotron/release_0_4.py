"""``ParallelContext`` of nanotron 0.4, the release of the package index: no context parallelism, other names.

```
rank = tp + TP · (dp + DP · (pp + PP · ep))        world_rank_matrix[ep, pp, dp, tp] = rank
```
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rankmesh.dialects.nanotron.context import ParallelContext

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ParallelContext04"]


class ParallelContext04(ParallelContext):
    """The process groups of this rank, with the names and parameters of nanotron 0.4.

    ``expert_pg`` is ``ep_pg``; ``world_rank_matrix`` has no dimension of context. What differs from nanotron's is said
    of ``ParallelContext``; here ``backend`` may be gloo too, and groups wait 10 minutes, not 20.
    """

    _timeout = timedelta(minutes=10)

    def __init__(
        self,
        tensor_parallel_size: int,
        pipeline_parallel_size: int,
        data_parallel_size: int,
        expert_parallel_size: int = 1,
        backend: str = "nccl",
    ) -> None:
        super().__init__(
            tensor_parallel_size,
            pipeline_parallel_size,
            data_parallel_size,
            expert_parallel_size=expert_parallel_size,
            backend=backend,
        )
        self.expert_pg: ProcessGroup = self.ep_pg
        self.world_rank_matrix = self.world_rank_matrix[:, :, :, 0, :]

    def get_3d_ranks(self, world_rank: int) -> tuple[int, int, int]:
        """The positions of a global rank along pp, dp and tp."""
        place = self.get_local_ranks(world_rank)
        return place["pp"], place["dp"], place["tp"]
