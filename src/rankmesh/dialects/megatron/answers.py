"""Answers that getters keep: a rank or size of a process group, until something is written.

```
_tp_rank = 1       get_tensor_model_parallel_rank() gives 1 at once
_tp_rank = None    it asks: what was set for it, else the group
```

They are globals of the parallel state, like what they follow from, so each rank of a simulation has its own. A write to
any global, or a function that is replaced, makes all of them new; an answer is kept only where nothing else could
change it: a value that was set, or a process group of torch (a stand-in may answer otherwise each time). Making them
calls no getter, and never fails: what has no answer now is asked for when it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from rankmesh.dialects.megatron.table import BY_KIND, NUMBERS

__all__ = ["KEPT", "answers"]

_STAGES = ("_first_rank", "_last_rank", "_next_rank", "_prev_rank", "_is_first_stage", "_is_last_stage")

# Every global that keeps an answer.
KEPT = (*(numbers.kept_as(method) for numbers in NUMBERS.values() for method in ("rank", "size")), *_STAGES)


def answers(names: Mapping[str, Any], whole: Mapping[str, bool]) -> dict[str, Any]:
    """The answers that follow from the globals of a state.

    ``whole``: the kinds of data-parallel groups that getters take with the ranks that hold other pieces of each weight.
    """
    found = {}
    for kind, numbers in NUMBERS.items():
        group = names.get(BY_KIND[f"{kind}_gtp" if whole.get(kind) else kind].group)
        for method in ("rank", "size"):
            given = names.get(numbers.set_as(method) or "")
            found[numbers.kept_as(method)] = _of_group(group, method) if given is None else given
    return found | dict(_of_pipeline(found["_pp_rank"], found["_pp_size"], names.get("_PIPELINE_GLOBAL_RANKS")))


def _of_group(group: object, method: str) -> int | None:
    if not issubclass(type(group), dist.ProcessGroup):  # not isinstance: a mock claims to be one
        return None
    try:
        return int(getattr(group, method)())
    except Exception:  # noqa: BLE001  - a process group of somebody else's, or one that is gone
        return None


def _of_pipeline(rank: object, size: object, ranks: object) -> Iterator[tuple[str, Any]]:
    if not (isinstance(rank, int) and isinstance(size, int) and size > 0):
        return
    yield from (("_is_first_stage", rank == 0), ("_is_last_stage", rank == size - 1))
    if isinstance(ranks, list):
        for name, place in zip(_STAGES, (0, size - 1, (rank + 1) % size, (rank - 1) % size)):  # noqa: B905
            yield name, ranks[place] if place < len(ranks) else None
