"""A parallel state: a module object with Megatron's globals and functions. Any number may live side by side.

```
critic = ParallelState("critic")          parallel_state.py, loaded again: the same functions over other globals
critic.initialize_model_parallel(...)
critic.get_tensor_model_parallel_rank()
```

Its globals are attributes that callers read and write, and what is written is what getters return. The module
``parallel_state`` is the default state. ``state.rankmesh_state`` owns what else belongs to a state; it is a global,
too, so each rank of a simulation has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from rankmesh.dialects.megatron.refusals import NotHere, NotInitialized
from rankmesh.dialects.megatron.table import BY_KIND
from rankmesh.errors import NotAMember
from rankmesh.runtime.registry import register

if TYPE_CHECKING:
    from rankmesh.runtime.live import LiveGroups

__all__ = ["ParallelState", "RankIn", "SizeOf", "State"]


class RankIn(dict[ProcessGroup | None, int]):
    """This rank's place by process group; a group that is not listed is asked, and no group is 0."""

    __slots__ = ()

    def __missing__(self, group: ProcessGroup | None) -> int:
        return 0 if group is None else group.rank()


class SizeOf(dict[ProcessGroup | None, int]):
    """The size by process group; a group that is not listed is asked, and no group is 0."""

    __slots__ = ()

    def __missing__(self, group: ProcessGroup | None) -> int:
        return 0 if group is None else group.size()


@dataclass
class State:
    """State that a parallel state keeps beside its globals.

    ``functions`` and ``initial`` are its own functions, and the first values of its globals. ``in_pieces``: whether
    several ranks hold the pieces of one weight (gtp_remat), dense and expert; ``pieces`` and ``expert_pieces``: whether
    getters then take data-parallel groups with these ranks.
    """

    module: ModuleType
    plan_name: str
    functions: dict[str, FunctionType] = field(default_factory=dict)
    initial: dict[str, object] = field(default_factory=dict)
    live: LiveGroups | None = None
    added: list[LiveGroups] = field(default_factory=list)
    in_pieces: tuple[bool, bool] = (False, False)
    pieces: bool = False
    expert_pieces: bool = False
    release: tuple[int, int] | None = None

    def begin(self) -> None:
        """Note the functions and the first values of the globals, once the module has all of them."""
        for name, value in vars(self.module).items():
            if isinstance(value, FunctionType) and value.__name__ in ("getter", "setter", "forget"):
                value.__name__ = value.__qualname__ = name
                value.__module__ = self.module.__name__
            if isinstance(value, FunctionType) and value.__module__ == self.module.__name__:
                self.functions[name] = value
            elif name.startswith("_") and not name.startswith("__"):
                self.initial[name] = value

    @property
    def has_pieces(self) -> bool:
        """True if the followed release knows pieces of weights."""
        return self.release is not None and self.release >= (0, 19)

    def set_pieces(self, dense: bool, experts: bool) -> None:
        """Set whether several ranks hold the pieces of one weight, dense and expert."""
        self.in_pieces = dense, experts
        self.pieces, self.expert_pieces = dense or self.has_pieces, experts or self.has_pieces

    def given(self, kind: str, check: bool = True, *, whole: bool = False) -> ProcessGroup | list[ProcessGroup] | None:
        """Return the process group of a kind, an absent one being an error where it is checked.

        ``whole``: with the ranks that hold other pieces of each weight, where getters take these.
        """
        row = BY_KIND[f"{kind}_gtp" if whole and (self.expert_pieces if "ep" in kind else self.pieces) else kind]
        group = vars(self.module).get(row.group)
        if group is None and check:
            raise self.absent(kind)
        return group

    def ranks(self, kind: str, check: bool = True) -> Any:
        """Return the global ranks of the group of a kind; an absent one is an error where it is checked."""
        ranks = vars(self.module)[BY_KIND[kind].ranks or ""]
        if ranks is None and check:
            raise self.absent(kind)
        return ranks

    def absent(self, kind: str) -> NotInitialized | NotHere:
        """Return the error for a group of this kind that is absent."""
        live = self.live
        if live is not None and not live.closed and kind in live.plan.kinds:
            try:
                live[kind]
            except NotAMember as error:
                return NotHere(error.message, **error.values)
        made = "was not created" if live is not None else "is not initialized"
        return NotInitialized(
            f"the {BY_KIND[kind].what} {made}; call initialize_model_parallel() first, with the arguments that ask for "
            "this group",
            group=kind,
        )

    def without_context(self, kind: str) -> NotInitialized | NotHere:
        """Return the error for a part of a data-parallel group without context parallelism."""
        if vars(self.module)[BY_KIND[kind].group] is None:
            return self.absent(kind)
        return NotInitialized(
            "partial_data_parallel needs with_context_parallel, since an optimizer instance spans context parallelism; "
            "set both"
        )


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

    def __init__(self, name: str) -> None:
        super().__init__(name, __doc__)
        register(self)
        self.rankmesh_state = State(self, name)
        SourceFileLoader(name, str(Path(__file__).with_name("parallel_state.py"))).exec_module(self)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what the module does not have; it tells type checkers that functions are attributes.
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
