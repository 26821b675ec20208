"""Groups that a program put in place itself, where ezpz keeps them: in the globals of ``ezpz.tp``.

```
tp._TENSOR_PARALLEL_GROUP = mock        get_tensor_parallel_group() gives it, until destroy_tensor_parallel()
tp._TENSOR_PARALLEL_RANKS = [0, 1]      get_tensor_parallel_ranks()
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rankmesh.errors import NotInitialized

if TYPE_CHECKING:
    from rankmesh.dialects.ezpz.state import TensorParallel

__all__ = ["Written", "globals_of"]

# ezpz's globals: the group of each kind, and its members.
GROUPS = {
    "tp": ("_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
    "cp": ("_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
    "pp": ("_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    "dp": ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
}


@dataclass
class Written:
    """One kind's group as it was put in place; what is told of it is what torch says of the group."""

    group: Any = None
    members: Sequence[int] | None = None

    @property
    def pg(self) -> Any:
        """The group."""
        return _there(self.group, "group")

    @property
    def ranks(self) -> Iterable[int]:
        """The members."""
        return _there(self.members, "list of ranks")  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.pg)

    @property
    def rank(self) -> int:
        """The position of this rank among them."""
        return dist.get_rank(self.pg)

    @property
    def first(self) -> int:
        """The first of them."""
        return next(iter(self.ranks))


def _there(value: Any, what: str) -> Any:
    if value is None:
        raise NotInitialized(f"the {what} is not initialized, only the other was written; write both")
    return value


def globals_of(state: TensorParallel) -> type[ModuleType]:
    """The class of a module whose globals are those of ezpz, over this state."""
    names = {}
    for kind, (group, members) in GROUPS.items():
        names[group] = _global(state, kind, "group", "pg")
        names[members] = _global(state, kind, "members", "ranks")
    return type("TensorParallelModule", (ModuleType,), names)


def _global(state: TensorParallel, kind: str, field: str, told: str) -> property:
    def read(_: object) -> Any:
        if kind in state.written:
            return getattr(state.written[kind], field)
        group = state.made_group(kind)
        value = None if group is None else getattr(group, told)
        return list(value) if field == "members" and value is not None else value

    def write(_: object, value: Any) -> None:
        if kind not in state.written:
            group = state.made_group(kind)
            state.written[kind] = Written() if group is None else Written(group.pg, list(group.ranks))
        setattr(state.written[kind], field, value)

    def delete(_: object) -> None:
        state.written.pop(kind, None)

    return property(read, write, delete)
