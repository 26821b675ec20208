"""A parallel state: a module object with Megatron's globals and functions. Any number may live side by side.

```
rm_state = ParallelState("actor")          the same names as the module parallel_state, another set of groups
rm_state.initialize_model_parallel(...)
rm_state.get_tensor_model_parallel_rank()
```

Its globals are attributes that callers read and write. A getter without arguments keeps its answer; any write to a
global or a replaced function makes all of them ask again, so what is written is what getters return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch.distributed as dist

from rankmesh.dialects.megatron.refusals import NotHere, NotInitialized
from rankmesh.dialects.megatron.table import BUFFERS, BY_KIND, VIRTUAL, Row, initial
from rankmesh.errors import NotAMember
from rankmesh.groups.live import LiveGroups

__all__ = ["Function", "ParallelState", "State", "absent", "in_a_world"]

Function = Callable[..., Any]
_Answer = TypeVar("_Answer")

# Written on every microbatch of an interleaved pipeline, and no kept answer depends on them.
_UNWATCHED = frozenset({*VIRTUAL, *BUFFERS})


class State:
    """What a parallel state keeps beside its globals: the live groups, its own functions, answers that are kept."""

    def __init__(self, module: ModuleType, plan_name: str) -> None:
        self.module: Any = module
        self.globals = vars(module)
        self.plan_name = plan_name
        self.live: LiveGroups | None = None
        self.added: list[LiveGroups] = []
        self.functions: dict[str, FunctionType] = {}
        self.refreshers: list[Callable[[], None]] = []
        self.unchanged = True

    def export(self, functions: Iterator[Function]) -> None:
        """Make these functions attributes of the module, by their names."""
        for function in functions:
            if not isinstance(function, FunctionType):
                raise TypeError(f"received {function!r} to export; a state exports functions")
            function.__module__ = self.module.__name__
            function.__qualname__ = function.__name__
            self.functions[function.__name__] = self.globals[function.__name__] = function

    def kept(self, compute: Callable[[], _Answer], ready: Callable[[], bool]) -> Callable[[], _Answer | None]:
        """The answer of ``compute`` when nothing but a write can change it, None when it must be asked each time."""
        return lambda: compute() if self.unchanged and ready() else None

    def refresh(self) -> None:
        """Ask anew for every answer that is kept; none is while one of the functions is another's."""
        self.unchanged = all(self.globals.get(name) is function for name, function in self.functions.items())
        for refresh in self.refreshers:
            refresh()

    def fixed(self, forced: str | None, group: str) -> bool:
        """Whether a rank or size comes from a value that was set, or from a process group that will not change."""
        return (forced is not None and self.globals[forced] is not None) or issubclass(
            type(self.globals[group]), dist.ProcessGroup
        )

    def group(self, kind: str, check_initialized: bool = True) -> Any:
        """The process group of one kind; without one ``NotInitialized`` or ``NotHere``, or None if not checked."""
        row = BY_KIND[kind]
        value = self.globals[row.group]
        if value is None and check_initialized:
            raise absent(self, row)
        return value


class ParallelState(ModuleType):
    """An independent parallel state with the interface of ``megatron.core.parallel_state``.

    Two states of one job need different names, the same ones on every rank.

    >>> state = ParallelState("actor")
    >>> state.is_initialized(), state._TENSOR_MODEL_PARALLEL_GROUP
    (False, None)
    >>> state.set_tensor_model_parallel_rank(3)
    >>> state.get_tensor_model_parallel_rank(), state._MPU_TENSOR_MODEL_PARALLEL_RANK
    (3, 3)
    """

    rankmesh_state: State

    def __init__(self, name: str) -> None:
        super().__init__(name, __doc__)
        prepare(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        self._noticed(name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._noticed(name)

    def _noticed(self, name: str) -> None:
        state = self.rankmesh_state
        if name.startswith(("_", "get_")) and name not in _UNWATCHED and not name.startswith("__"):
            state.refresh()

    def __getattr__(self, name: str) -> Any:
        # Only reached for what the module does not have; it tells type checkers that functions are attributes.
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def prepare(module: ModuleType, plan_name: str) -> None:
    """Give a module the globals and functions of a parallel state, not initialised."""
    from rankmesh.dialects.megatron import data_parallel, groups_of, lifecycle, making, nccl, rank_generator, stages

    state = State(module, plan_name)
    vars(module)["rankmesh_state"] = state
    vars(module).update(initial())
    for shared in (nccl.get_nccl_options, nccl.overwrite_nccl_comm_cfgs):
        vars(module)[shared.__name__] = shared
    for name in rank_generator.__all__:
        vars(module)[name] = getattr(rank_generator, name)
    for part in (groups_of, data_parallel, stages, lifecycle, making):
        state.export(part.functions(state))
    state.refresh()


def in_a_world() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def absent(state: State, row: Row) -> NotInitialized | NotHere:
    """Why there is no group of this kind."""
    if state.live is not None and not state.live.closed and row.kind in state.live.plan.kinds:
        try:
            state.live[row.kind]
        except NotAMember as error:
            return NotHere(error.message, **error.values)
    made = "was not created" if state.live is not None else "is not initialized"
    return NotInitialized(
        f"received a request for the {row.what}, which {made}; initialize_model_parallel() makes the groups that its "
        "arguments ask for; call it first, with what this group needs",
        group=row.kind,
    )


def taken(state: State, names: dict[str, Any]) -> None:
    """Set many globals at once, and ask anew for every answer that is kept."""
    state.globals.update(names)
    state.refresh()
