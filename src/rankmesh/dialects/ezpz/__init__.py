"""``ezpz.tp``: tensor, context, pipeline and data parallel groups of this process.

    rank = tp_rank + tp · (cp_rank + cp · (pp_rank + pp · dp_rank))

```
16 ranks, tp = cp = pp = 2     TP [0, 1] ...    CP [0, 2] ...    PP [0, 4] ...    DP [0, 8] ...
```

```python
import rankmesh.dialects.ezpz as tp                     # instead of ezpz.tp
tp.initialize_tensor_parallel(2, context_parallel_size=2)
```

What differs: the layout follows ezpz's code; its docstring lists pipeline groups of stride 8 and data groups of
stride 4 for the example above, the code makes them the other way round. A tensor-parallel size above the world is
refused, never clamped. ``destroy_tensor_parallel`` destroys the groups instead of forgetting them. Refusals are
``AssertionError`` too, as ezpz asserts. Several states can live side by side: see ``TensorParallel``.
"""

from __future__ import annotations

import sys

from rankmesh.dialects.ezpz.state import TensorParallel, TensorParallelModule, default
from rankmesh.dialects.ezpz.utils import (
    divide_and_check_no_remainder,
    ensure_divisibility,
    split_tensor_along_last_dim,
)

__all__ = [
    "TensorParallel",
    "destroy_tensor_parallel",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_rank",
    "get_pipeline_parallel_ranks",
    "get_pipeline_parallel_world_size",
    "get_tensor_parallel_group",
    "get_tensor_parallel_rank",
    "get_tensor_parallel_ranks",
    "get_tensor_parallel_src_rank",
    "get_tensor_parallel_world_size",
    "initialize_tensor_parallel",
    "split_tensor_along_last_dim",
    "tensor_parallel_is_initialized",
]

initialize_tensor_parallel = default.initialize_tensor_parallel
tensor_parallel_is_initialized = default.tensor_parallel_is_initialized
destroy_tensor_parallel = default.destroy_tensor_parallel
get_tensor_parallel_group = default.get_tensor_parallel_group
get_tensor_parallel_ranks = default.get_tensor_parallel_ranks
get_tensor_parallel_world_size = default.get_tensor_parallel_world_size
get_tensor_parallel_rank = default.get_tensor_parallel_rank
get_tensor_parallel_src_rank = default.get_tensor_parallel_src_rank
get_context_parallel_group = default.get_context_parallel_group
get_context_parallel_ranks = default.get_context_parallel_ranks
get_context_parallel_world_size = default.get_context_parallel_world_size
get_context_parallel_rank = default.get_context_parallel_rank
get_pipeline_parallel_group = default.get_pipeline_parallel_group
get_pipeline_parallel_ranks = default.get_pipeline_parallel_ranks
get_pipeline_parallel_world_size = default.get_pipeline_parallel_world_size
get_pipeline_parallel_rank = default.get_pipeline_parallel_rank
get_data_parallel_group = default.get_data_parallel_group
get_data_parallel_ranks = default.get_data_parallel_ranks
get_data_parallel_world_size = default.get_data_parallel_world_size
get_data_parallel_rank = default.get_data_parallel_rank

sys.modules[__name__].__class__ = TensorParallelModule
