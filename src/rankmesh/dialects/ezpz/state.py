"""The state behind ``ezpz.tp``: no groups yet, or the four kinds of group of this rank, made here or assigned.

```
tp._TENSOR_PARALLEL_GROUP = mock        get_tensor_parallel_group() gives it, until destroy_tensor_parallel()
tp._TENSOR_PARALLEL_RANKS = [0, 1]      get_tensor_parallel_ranks()
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import TypeVar

import torch.distributed as dist

from rankmesh.core import Options, Plan, recipes
from rankmesh.errors import AlreadyInitialized, NotInitialized
from rankmesh.runtime.getters import SharedGetters, group_of, rank_in, ranks_of, size_of
from rankmesh.runtime.handles import LiveGroup
from rankmesh.runtime.registry import Registry, refusing_sizes, register, world_size

__all__ = ["TensorParallel", "TensorParallelModule", "default"]

_Value = TypeVar("_Value")

_KINDS = ("tp", "cp", "pp", "dp")


@dataclass
class AssignedGroup:
    """One kind's group that a program assigned to ezpz's globals; torch answers for its size and rank."""

    group: dist.ProcessGroup | None = None
    members: Sequence[int] | None = None

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group that was assigned."""
        return _there(self.group, "group")

    @property
    def ranks(self) -> Iterable[int]:
        """The global ranks that were assigned."""
        return _there(self.members, "list of ranks")

    @property
    def size(self) -> int:
        """Number of members of the group."""
        return dist.get_world_size(self.pg)

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return dist.get_rank(self.pg)

    @property
    def first(self) -> int:
        """The first global rank."""
        return next(iter(self.ranks))


def _there(value: _Value | None, what: str) -> _Value:
    if value is None:
        raise NotInitialized(f"the {what} is not initialized, only the other was assigned; assign both")
    return value


class TensorParallel(SharedGetters):
    """One state; the functions of ``rankmesh.dialects.ezpz`` are the methods of one, any other is independent of it.

    Without groups the tensor-parallel size is 1 and the rank 0, so that a model can be built without parallelism;
    everything else raises ``NotInitialized``, which is an ``AssertionError`` too.

    ``assigned`` has the groups that a program assigned to the globals, by kind; they come before those made here.
    """

    def __init__(self) -> None:
        self._registry = Registry("ezpz", "initialize_tensor_parallel", "destroy_tensor_parallel")
        self.assigned: dict[str, AssignedGroup] = {}
        register(self)

    def _group(self, kind: str) -> LiveGroup:
        # An assigned group has what getters read of a live one.
        return self.assigned.get(kind) or self._registry.groups[kind]  # type: ignore[return-value]

    def _in_globals(self, kind: str) -> AssignedGroup:
        """Return the group of a kind as the globals have it: assigned, made here, or neither."""
        if kind in self.assigned or not self._registry.is_open:
            return self.assigned.get(kind, AssignedGroup())
        made = self._registry.groups[kind]
        return AssignedGroup(made.pg, list(made.ranks))

    def initialize_tensor_parallel(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        tensor_parallel_backend: str | None = None,
        pipeline_parallel_backend: str | None = None,
        context_parallel_backend: str | None = None,
        data_parallel_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Make the groups of this rank; the rest of the world is data parallel.

        A backend or timeout that is None is the world's. ``AlreadyInitialized`` the second time, ``SizesError`` for
        sizes whose product does not divide the world, ``NotInitialized`` without a world; each an ``AssertionError``.

        A test that plays ``torch.distributed`` without a world is asked for every group by ``new_group``.
        """
        world = world_size("initialize_tensor_parallel()")
        self._check_free()
        with refusing_sizes():
            plan = recipes.ezpz(world, tp=tensor_parallel_size, cp=context_parallel_size, pp=pipeline_parallel_size)
        backends = {
            "tp": tensor_parallel_backend,
            "pp": pipeline_parallel_backend,
            "cp": context_parallel_backend,
            "dp": data_parallel_backend,
        }
        specs = [spec.with_options(Options(backend=backends[spec.name], timeout=timeout)) for spec in plan.specs]
        whole = plan.replace(specs=specs)
        if dist.group.WORLD is None:
            self._ask_for_groups(whole, timeout)
        else:
            self._registry.open(whole)

    def _check_free(self) -> None:
        self._registry.check_free()
        if self.tensor_parallel_is_initialized():
            raise AlreadyInitialized(
                "initialize_tensor_parallel() finds groups that were assigned, so the state is already initialized; "
                "call destroy_tensor_parallel() first"
            )

    def _ask_for_groups(self, plan: Plan, timeout: timedelta | None) -> None:
        for spec in plan.specs:
            for ranks in plan.groups(spec.name).tolist():
                group = dist.new_group(ranks, backend=spec.options.backend, timeout=timeout)
                if dist.get_rank() in ranks:
                    self.assigned[spec.name] = AssignedGroup(group, ranks)

    def tensor_parallel_is_initialized(self) -> bool:
        """Return whether there are groups."""
        return self._registry.is_open or all(kind in self.assigned and self.assigned[kind].group for kind in _KINDS)

    def destroy_tensor_parallel(self) -> None:
        """Destroy the groups, and forget those that were assigned; nothing where there are none."""
        self.assigned.clear()
        self._registry.close()

    def _has(self, kind: str) -> bool:
        return self._registry.is_open or kind in self.assigned

    # -- tensor -----------------------------------------------------------------------------------

    get_tensor_parallel_group = group_of("tp")
    get_tensor_parallel_ranks = ranks_of("tp")

    def get_tensor_parallel_world_size(self) -> int:
        """Return the number of ranks that share a layer; 1 without groups."""
        return self._group("tp").size if self._has("tp") else 1

    def get_tensor_parallel_rank(self) -> int:
        """Return the position of this rank in its tensor-parallel group; 0 without groups."""
        return self._group("tp").rank if self._has("tp") else 0

    def get_tensor_parallel_src_rank(self) -> int:
        """Return the global rank of the first member of the tensor-parallel group; this rank without groups."""
        if self._has("tp"):
            return self._group("tp").first
        return dist.get_rank() if dist.is_initialized() else 0

    # -- pipeline ---------------------------------------------------------------------------------

    get_pipeline_parallel_world_size = size_of("pp")
    get_pipeline_parallel_rank = rank_in("pp")


default = TensorParallel()


class _Global:
    """One of ezpz's globals: the value that a program assigned to it, else the default state's value."""

    def __init__(self, kind: str, field: str) -> None:
        self._kind, self._field = kind, field

    def __get__(self, module: object, owner: object) -> object:
        return getattr(default._in_globals(self._kind), self._field)

    def __set__(self, module: object, value: object) -> None:
        setattr(default.assigned.setdefault(self._kind, default._in_globals(self._kind)), self._field, value)

    def __delete__(self, module: object) -> None:
        default.assigned.pop(self._kind, None)


class TensorParallelModule(ModuleType):
    """The class of ``rankmesh.dialects.ezpz``: tests read and write ezpz's globals in the default state."""

    _TENSOR_PARALLEL_GROUP = _Global("tp", "group")
    _TENSOR_PARALLEL_RANKS = _Global("tp", "members")
    _CONTEXT_PARALLEL_GROUP = _Global("cp", "group")
    _CONTEXT_PARALLEL_GROUP_RANKS = _Global("cp", "members")
    _PIPELINE_PARALLEL_GROUP = _Global("pp", "group")
    _PIPELINE_PARALLEL_RANKS = _Global("pp", "members")
    _DATA_PARALLEL_GROUP = _Global("dp", "group")
    _DATA_PARALLEL_RANKS = _Global("dp", "members")
