"""Strict: the lines of a program that still read Megatron's global state, while its modules have grids of their own.

```
schedules.py:318 in forward_step    get_context_parallel_world_size     12 times while several grids are live
```
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch.distributed as dist

import rankmesh
from rankmesh.runtime.world import World

__all__ = ["GlobalRead", "Watch"]

_OURS = f"{Path(rankmesh.__file__).parent}/"
# Functions of Megatron that read the state for a caller who passed no group: the caller is the site.
_HELPERS = "_group_if_none"


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

    def __init__(self, state: ModuleType) -> None:
        self._state, self._counts = state, Counter[tuple[str, int, str, str]]()
        self._originals = {
            name: value
            for name, value in vars(state).items()
            if name.startswith(("get_", "is_pipeline_")) and name in state.rankmesh_state.functions
        }
        for name, function in self._originals.items():
            vars(state)[name] = self._watched(name, function)

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
            self._note(name, sys._getframe(1))
            return function(*args, **named)

        return getter

    def _note(self, name: str, frame: FrameType | None) -> None:
        """Count a read of a program; the getters call each other, too."""
        if frame is None or frame.f_code.co_filename.startswith(_OURS):
            return
        while frame is not None and frame.f_code.co_name.endswith(_HELPERS):
            frame = frame.f_back
        if frame is not None and dist.is_initialized() and len({live.plan.mesh for live in World.current().live}) > 1:
            code = frame.f_code
            self._counts[code.co_filename, frame.f_lineno, code.co_name, name] += 1
