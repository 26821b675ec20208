"""A parallel state: a module object with Megatron's globals and functions. Any number may live side by side.

```
critic = ParallelState("critic")          the file parallel_state.py once more: other globals, other groups
critic.initialize_model_parallel(...)
critic.get_tensor_model_parallel_rank()
```

Its globals are attributes that callers read and write, and what is written is what getters return.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rankmesh.dialects.megatron.answers import refresh
from rankmesh.dialects.megatron.refusals import NotHere, NotInitialized
from rankmesh.dialects.megatron.table import BY_KIND
from rankmesh.errors import NotAMember

if TYPE_CHECKING:
    from rankmesh.runtime.live import LiveGroups

__all__ = ["ParallelState", "State", "absent", "begin", "code_of", "in_a_world", "without_context"]

# Written on every microbatch of an interleaved pipeline, or memory: no kept answer depends on them.
_UNWATCHED = frozenset(
    {
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
        "_GLOBAL_MEMORY_BUFFER",
        "_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
    }
)


@dataclass
class State:
    """What a parallel state keeps beside its globals: the live groups, and which functions and values are its own.

    ``sharded`` and ``experts_sharded``: whether several ranks hold the pieces of one weight (gtp_remat).
    """

    plan_name: str
    functions: dict[str, FunctionType]
    initial: dict[str, Any]
    live: LiveGroups | None = None
    added: list[LiveGroups] = field(default_factory=list)
    sharded: bool = False
    experts_sharded: bool = False
    release: tuple[int, int] | None = None


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
        exec(code_of("parallel_state.py"), vars(self))  # noqa: S102  - our own file, with globals of its own

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        self._noticed(name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._noticed(name)

    def _noticed(self, name: str) -> None:
        watched = name.startswith(("_", "get_", "is_")) and not name.startswith("__")
        if watched and name not in _UNWATCHED:
            refresh(vars(self))

    def __getattr__(self, name: str) -> Any:
        # Only reached for what the module does not have; it tells type checkers that functions are attributes.
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


@cache
def code_of(file: str) -> CodeType:
    """The code of a file of this package, to run it once more: with other globals, or over them."""
    source = files(__package__).joinpath(file)
    return compile(source.read_text(encoding="utf-8"), str(source), "exec", dont_inherit=True)


def begin(names: dict[str, Any]) -> State:
    """The state of a namespace in which ``parallel_state.py`` has just been run; the module itself becomes one."""
    module = sys.modules.get(names["__name__"])
    is_default = module is not None and vars(module) is names
    if module is not None and is_default:
        module.__class__ = ParallelState
    return State(
        "megatron" if is_default else names["__name__"],
        own_functions(names),
        {name: value for name, value in names.items() if _is_state(name, value)},
    )


def own_functions(names: dict[str, Any]) -> dict[str, FunctionType]:
    """The functions that live on these globals."""
    return {
        name: value for name, value in names.items() if isinstance(value, FunctionType) and value.__globals__ is names
    }


def _is_state(name: str, value: object) -> bool:
    return name.startswith("_") and name[1:2] != "_" and not callable(value) and name != "_AS_THEY_ARE"


def in_a_world() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def absent(names: dict[str, Any], kind: str) -> NotInitialized | NotHere:
    """Why a state has no group of this kind."""
    live = names["rankmesh_state"].live
    if live is not None and not live.closed and kind in live.plan.kinds:
        try:
            live[kind]
        except NotAMember as error:
            return NotHere(error.message, **error.values)
    made = "was not created" if live is not None else "is not initialized"
    return NotInitialized(
        f"received a request for the {BY_KIND[kind].what}, which {made}; initialize_model_parallel() makes the groups "
        "that its arguments ask for; call it first, with what this group needs",
        group=kind,
    )


def without_context(names: dict[str, Any], kind: str) -> NotInitialized | NotHere:
    """Why there is no part of a data-parallel group without context parallelism."""
    if names[BY_KIND[kind].group] is None:
        return absent(names, kind)
    return NotInitialized(
        "received partial_data_parallel without with_context_parallel; an optimizer instance spans context "
        "parallelism; set both"
    )
