"""Answers that getters keep: a rank or size of a process group, until something is written.

```
_tp_rank = 1       get_tensor_model_parallel_rank() gives 1 at once
_tp_rank = None    it asks: what was set for it, else the group
```

They are globals of the parallel state, like what they follow from, so each rank of a simulation has its own. A write to
any global, or a function that is replaced, makes all of them new; an answer is kept only where nothing else could
change it: a value that was set, or a process group of torch (a stand-in may answer otherwise each time).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

__all__ = ["refresh"]

Names = dict[str, Any]

_PP = "_PIPELINE_MODEL_PARALLEL_GROUP"
_STAGE, _STAGES = "_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"

# Answer, the getter that gives it, its flags, and what it follows from: a value that was set, else a group.
_NUMBERS = tuple(
    (f"{kept}_{method}", f"get_{name}_{word}", flags, forced and f"{forced}_{word.upper()}", group)
    for kept, name, flags, forced, group in (
        ("_tp", "tensor_model_parallel", {}, "_MPU_TENSOR_MODEL_PARALLEL", "_TENSOR_MODEL_PARALLEL_GROUP"),
        ("_pp", "pipeline_model_parallel", {}, "_MPU_PIPELINE_MODEL_PARALLEL", _PP),
        ("_cp", "context_parallel", {}, "", "_CONTEXT_PARALLEL_GROUP"),
        ("_dp", "data_parallel", {}, "_MPU_DATA_PARALLEL", "_DATA_PARALLEL_GROUP"),
        (
            "_dp_cp",
            "data_parallel",
            {"with_context_parallel": True},
            "_MPU_DATA_PARALLEL",
            "_DATA_PARALLEL_GROUP_WITH_CP",
        ),
        ("_ep", "expert_model_parallel", {}, "_MPU_EXPERT_MODEL_PARALLEL", "_EXPERT_MODEL_PARALLEL_GROUP"),
        ("_expert_tp", "expert_tensor_parallel", {}, "_MPU_EXPERT_TENSOR_PARALLEL", "_EXPERT_TENSOR_PARALLEL_GROUP"),
        ("_expert_dp", "expert_data_parallel", {}, "", "_EXPERT_DATA_PARALLEL_GROUP"),
    )
    for method, word in (("rank", "rank"), ("size", "world_size"))
)
_STAGE_RANKS = tuple(
    (f"_{word}_rank", f"get_pipeline_model_parallel_{word}_rank") for word in ("first", "last", "next", "prev")
)
_ENDS = (("_is_first_stage", "is_pipeline_first_stage"), ("_is_last_stage", "is_pipeline_last_stage"))
_ALL = (*(number[0] for number in _NUMBERS), *dict(_STAGE_RANKS), *dict(_ENDS))


def refresh(names: Names) -> None:
    """Ask anew for every answer in the globals of a state; none is kept while one of its functions is another's."""
    names.update(dict.fromkeys(_ALL))
    own = names["rankmesh_state"].functions
    if all(names.get(name) is function for name, function in own.items()):
        names.update(dict(_answers(names)))


def _answers(names: Names) -> Iterator[tuple[str, Any]]:
    for kept, getter, flags, forced, group in _NUMBERS:
        if _fixed(names, forced, group):
            yield kept, names[getter](**flags)
    if _fixed(names, _STAGE, _PP) and _fixed(names, _STAGES, _PP):
        listed = _STAGE_RANKS if isinstance(names["_PIPELINE_GLOBAL_RANKS"], list) else ()
        for kept, getter in (*listed, *_ENDS):
            yield kept, names[getter]()


def _fixed(names: Names, forced: str, group: str) -> bool:
    """Whether a rank or size comes from a value that was set, or from a process group that will not change."""
    return (forced != "" and names[forced] is not None) or issubclass(type(names[group]), dist.ProcessGroup)
