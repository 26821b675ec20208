"""Strict: where a program still reads Megatron's global state, while its modules have grids of their own.

```
gpt_model.py:354 in _preprocess     get_tensor_model_parallel_group     holds tp of ranks [0, 2]     OtherGrid
schedules.py:318 in forward_step    get_context_parallel_world_size     several grids are live       listed
```

A read is one site and one getter of the state. It is *of another grid* where the caller, or who called it, holds a
group of the same kind (``self.pg_collection.tp``, ``tp_group``) whose ranks are no group of the state.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

import rankmesh
from rankmesh.backend.tracing import values_of
from rankmesh.dialects.megatron.refusals import OtherGrid
from rankmesh.dialects.megatron.state import ParallelState
from rankmesh.runtime.world import World

__all__ = ["GlobalRead", "Watch"]

_OURS = f"{Path(rankmesh.__file__).parent}/"
# Frames from the read outwards in which a module may hold its groups.
_FRAMES = 12
# Functions of Megatron that read the state for a caller who passed no group: the caller is the site.
_HELPERS = "_group_if_none"
# What a getter tells of, by its name; the flags of data-parallel getters do not matter here.
_FIELDS = {
    "get_tensor_model_parallel": "tp",
    "get_pipeline_model_parallel": "pp",
    "get_context_parallel": "cp",
    "get_data_parallel": "dp",
    "get_expert_model_parallel": "ep",
    "is_pipeline_": "pp",
}


@dataclass(frozen=True)
class GlobalRead:
    """A line that reads the global state: ``site`` is ``file:line in function``, ``count`` how often, by all ranks."""

    site: str
    getter: str
    count: int

    def __str__(self) -> str:
        return f"{self.site}: {self.getter}, {self.count} times"


class Watch:
    """Wraps the getters of a state until ``end``."""

    def __init__(self, state: ParallelState) -> None:
        self._state, self._counts = state, Counter[tuple[str, int, str, str]]()
        self._inside = threading.local()
        names = vars(state)
        self._originals = {
            name: function
            for name, function in state.rankmesh_state.functions.items()
            if name.startswith(("get_", "is_pipeline_")) and names.get(name) is function
        }
        for name, function in self._originals.items():
            names[name] = self._watched(name, function)

    def end(self) -> None:
        """Put the getters back."""
        vars(self._state).update(self._originals)

    @property
    def reads(self) -> tuple[GlobalRead, ...]:
        """The reads while several grids were live, by file and line."""
        return tuple(
            GlobalRead(f"{file}:{line} in {function}", getter, count)
            for (file, line, function, getter), count in sorted(self._counts.items())
        )

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def getter(*args: Any, **named: Any) -> Any:
            if getattr(self._inside, "read", False):
                return function(*args, **named)
            self._inside.read = True
            try:
                self._look(name, sys._getframe(1))
                return function(*args, **named)
            finally:
                self._inside.read = False

        return getter

    def _look(self, name: str, frame: FrameType | None) -> None:
        while frame is not None and (
            frame.f_code.co_filename.startswith(_OURS) or frame.f_code.co_name.endswith(_HELPERS)
        ):
            frame = frame.f_back
        if frame is None or not dist.is_initialized():
            return
        field = next((field for start, field in _FIELDS.items() if name.startswith(start)), None)
        known = None if field is None else next(_given(frame, field), None)
        other = known is not None and field is not None and self._is_other(field, known[1])
        if other and known is not None:
            frame = known[2]
        if other or len({live.plan.mesh for live in World.current().live}) > 1:
            code = frame.f_code
            self._counts[code.co_filename, frame.f_lineno, code.co_name, name] += 1
        if other and known is not None:
            site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise OtherGrid(
                f"{site} leads to {name}() of Megatron's global state, but {known[0]} has a {field} group of ranks "
                f"{list(known[1])}, which is no group of that state; pass this group on",
                getter=name,
                site=site,
                ranks=known[1],
            )

    def _is_other(self, field: str, ranks: tuple[int, ...]) -> bool:
        live = self._state.rankmesh_state.live
        if live is None:
            return False
        rank = dist.get_rank()
        kinds = [groups for kind, groups in live.plan.kinds.items() if field in kind.split("_")]
        return all(not groups.has(rank) or set(groups.of(rank).ranks) != set(ranks) for groups in kinds)


def _given(frame: FrameType | None, field: str) -> Iterator[tuple[str, tuple[int, ...], FrameType]]:
    """Groups of a kind that a frame or one further out holds: who does, the ranks, the frame; the innermost first."""
    for _ in range(_FRAMES):
        if frame is None:
            return
        owner, collection, group = values_of(frame, ("self", "pg_collection", f"{field}_group"))
        who = frame.f_code.co_name if owner is None else type(owner).__name__
        mine = getattr(owner, "__dict__", {})
        for its, their in ((group, collection), (mine.get(f"{field}_group"), mine.get("pg_collection"))):
            for found in (its, getattr(their, field, None)):
                if isinstance(found, dist.ProcessGroup):
                    yield who, tuple(dist.get_process_group_ranks(found)), frame
        frame = frame.f_back
