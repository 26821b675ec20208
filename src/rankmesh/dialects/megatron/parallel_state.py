"""Drop-in for ``megatron.core.parallel_state``: the same functions and globals, over a rankmesh plan.

```python
from rankmesh.dialects.megatron import parallel_state

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
parallel_state.get_tensor_model_parallel_group()
```

This module is the default ``ParallelState``; ``table.py`` lists its groups, and what follows from each. Where it
differs from Megatron-Core 0.16.1:

- a rank makes its own groups alone, after all ranks agreed; groups with the same members share a communicator, and a
  group of one rank has none; gloo twins of groups that are gloo already are these groups
- ``destroy_model_parallel`` destroys the groups, and clears every global
- a refused ``initialize_model_parallel`` leaves nothing behind
- an order that names an axis twice, hybrid context parallelism that does not fill its groups, embedding functions
  that do not choose by position, and unknown sections of an NCCL configuration are refused
- SHARP is an option of one communicator: no environment variable is changed

>>> from rankmesh.dialects.megatron import parallel_state
>>> parallel_state.is_initialized(), parallel_state._MODEL_PARALLEL_GROUP
(False, None)
"""

import logging
import sys
from typing import Any

from rankmesh.dialects.megatron.state import ParallelState, prepare

logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    # The functions are made from the table when this module is imported; this tells type checkers of them.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _begin() -> None:
    module = sys.modules[__name__]
    if not isinstance(module, ParallelState):  # a reload keeps the state, and its groups
        prepare(module, "megatron")
        module.__class__ = ParallelState


_begin()
