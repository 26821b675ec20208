"""A parallel state: a module object with Megatron's globals and functions. Any number may live side by side.

```
critic = ParallelState("critic")          the functions of parallel_state.py over other globals: other groups
critic.initialize_model_parallel(...)
critic.get_tensor_model_parallel_rank()
```

Its globals are attributes that callers read and write, and what is written is what getters return. The module
``parallel_state`` is the default state. ``state.rankmesh_state`` owns what else belongs to a state; it is reached
through its module's globals, so each rank of a simulation has its own.

Ranks and sizes of process groups are kept in globals, too, until something is written:

```
_tp_rank = 1       get_tensor_model_parallel_rank() gives 1 at once
_tp_rank = None    it asks: what was set for it, else the group
```

A write to any global, or a function that is replaced, computes all of them again; an answer is kept only where nothing
else could change it: a value that was set, or a process group of torch (a stand-in may answer otherwise each time).
Computing them calls no getter, and never fails: what has no answer now is asked for when it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from rankmesh.dialects.megatron import getters
from rankmesh.dialects.megatron.refusals import NotHere, NotInitialized
from rankmesh.dialects.megatron.table import BY_KIND, NUMBERS, STAGES, global_names
from rankmesh.errors import NotAMember
from rankmesh.runtime.registry import register

if TYPE_CHECKING:
    from rankmesh.dialects.megatron.lifecycle import CalledGroups
    from rankmesh.runtime.live import LiveGroups

__all__ = ["Interface", "ParallelState", "State"]

# Written on every microbatch of an interleaved pipeline, or memory: no kept answer depends on them.
_UNWATCHED = frozenset(
    {
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
        "_GLOBAL_MEMORY_BUFFER",
        "_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
    }
)


# Where the stage of a place is in its pipeline, from what gives the place of this rank and the number of stages.
_PLACES: Mapping[str, Callable[[Callable[[], int], Callable[[], int]], int]] = {
    "first": lambda rank, size: 0,
    "last": lambda rank, size: size() - 1,
    "next": lambda rank, size: (rank() + 1) % size(),
    "prev": lambda rank, size: (rank() - 1) % size(),
}

# Every global that keeps an answer.
_KEPT = (*(numbers.kept_as(method) for numbers in NUMBERS.values() for method in ("rank", "size")), *STAGES.values())
_KEPT += ("_is_first_stage", "_is_last_stage")


@dataclass(frozen=True)
class Interface:
    """What every parallel state has: functions over its globals, the first values of these, and what they share."""

    functions: Mapping[str, FunctionType]
    values: Mapping[str, Any]
    shared: Mapping[str, Any]

    @classmethod
    def of(cls, modules: Collection[ModuleType]) -> Interface:
        """The interface that modules define together; rules make some of their functions (``getters``)."""
        homes = {getters.__name__, *(module.__name__ for module in modules)}
        functions, values, shared = {}, dict[str, Any].fromkeys(global_names()), {}
        for name, value in (item for module in modules for item in vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ in homes:
                functions[name] = value
            elif name.startswith("_") and not name.startswith("__"):
                values[name] = value
            elif not name.startswith("__") and name != "rankmesh_state":
                shared[name] = value
        return cls(functions, values, shared)


@dataclass
class State:
    """What a parallel state keeps beside its globals.

    ``functions`` and ``initial`` are its own functions, and the first values of its globals. ``in_pieces``: whether
    several ranks hold the pieces of one weight (gtp_remat), dense and expert; ``pieces`` and ``expert_pieces``: whether
    getters then take data-parallel groups with these ranks.
    """

    module: ParallelState
    plan_name: str
    functions: dict[str, FunctionType] = field(default_factory=dict)
    initial: dict[str, Any] = field(default_factory=dict)
    live: LiveGroups | CalledGroups | None = None
    added: list[LiveGroups | CalledGroups] = field(default_factory=list)
    in_pieces: tuple[bool, bool] = (False, False)
    pieces: bool = False
    expert_pieces: bool = False
    release: tuple[int, int] | None = None

    def set_pieces(self, dense: bool, experts: bool) -> None:
        """Whether several ranks hold the pieces of one weight, dense and expert."""
        always = self.release is not None and self.release >= (0, 19)
        self.in_pieces = dense, experts
        self.pieces, self.expert_pieces = dense or always, experts or always

    def follow(self, release: tuple[int, int] | None) -> None:
        """Answer as a release does: since 0.19, data-parallel groups are with all pieces in any case."""
        self.release = release
        self.set_pieces(*self.in_pieces)

    def first_values(self) -> Iterator[tuple[str, Any]]:
        """The globals as they are before initialisation."""
        for name, value in self.initial.items():
            yield name, value.copy() if isinstance(value, dict) else value

    def refresh(self) -> None:
        """Make every kept answer new; none is kept while one of the functions is another's."""
        names = vars(self.module)
        names.update(dict.fromkeys(_KEPT))
        if all(names.get(name) is function for name, function in self.functions.items()):
            names.update(_answers(names, {"dp": self.pieces, "dp_cp": self.pieces, "ep_dp": self.expert_pieces}))

    def write(self, name: str, value: object) -> None:
        """Set a global, as an assignment from outside does."""
        setattr(self.module, name, value)

    def given(self, kind: str, check: bool = True, *, whole: bool = False) -> Any:
        """The process group of a kind, an absent one being an error where it is checked.

        ``whole``: with the ranks that hold other pieces of each weight, where getters take these.
        """
        row = BY_KIND[f"{kind}_gtp" if whole and (self.expert_pieces if "ep" in kind else self.pieces) else kind]
        group = vars(self.module).get(row.group)
        if group is None and check:
            raise self.absent(kind)
        return group

    def ask(self, kind: str, method: str, **flags: bool) -> Any:
        """The rank or size that no answer is kept for: what was set, else what the group says."""
        names, numbers = vars(self.module), NUMBERS[kind]
        given = names.get(numbers.set_as(method) or "")
        if given is not None:
            return given
        if numbers.outside is not None and not dist.is_initialized():
            return numbers.outside
        instead = numbers.instead_as(method)
        if instead is not None and not names[BY_KIND[kind].group]:
            return names[instead]
        if numbers.absent is not None:
            flags["check_initialized"] = False
        group = names[numbers.getter](**flags)
        return numbers.absent if group is None else getattr(group, method)()

    def stage(self, place: str) -> int:
        """The global rank at a place of this rank's pipeline."""
        names = vars(self.module)
        if names["_PIPELINE_GLOBAL_RANKS"] is None:
            raise self.absent("pp")
        rank, size = names["get_pipeline_model_parallel_rank"], names["get_pipeline_model_parallel_world_size"]
        return names["_PIPELINE_GLOBAL_RANKS"][_PLACES[place](rank, size)]  # type: ignore[no-any-return]

    def absent(self, kind: str) -> NotInitialized | NotHere:
        """Why there is no group of this kind."""
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
        """Why there is no part of a data-parallel group without context parallelism."""
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

    rankmesh_state: State
    # The module parallel_state, once it is imported, has put its functions here.
    interface: ClassVar[Interface]

    def __init__(self, name: str) -> None:
        super().__init__(name, __doc__)
        register(self)
        self._begin(name)

    @classmethod
    def become(cls, module: ModuleType, *others: ModuleType) -> None:
        """Make a module the default state: what it and others define is the interface of every state."""
        cls.interface = Interface.of((*others, module))
        module.__class__ = cls
        assert isinstance(module, cls)  # noqa: S101  - for type checkers
        module._begin("megatron")

    def _begin(self, plan_name: str) -> None:
        names = vars(self)
        names["rankmesh_state"] = State(self, plan_name)
        names.update(self.interface.shared)
        self.lay(self.interface.functions, without=())

    def lay(self, functions: Mapping[str, FunctionType], without: Iterable[str]) -> None:
        """Give this state these functions and every global, without some names; what was written stays."""
        names, state = vars(self), self.rankmesh_state
        state.functions = {name: _over(names, name, rule) for name, rule in functions.items() if name not in without}
        state.initial = {name: value for name, value in self.interface.values.items() if name not in without}
        names.update({name: value for name, value in state.first_values() if name not in names}, **state.functions)
        for name in without:
            names.pop(name, None)
        state.refresh()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        self._noticed(name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._noticed(name)

    def _noticed(self, name: str) -> None:
        watched = name.startswith(("_", "get_", "is_")) and not name.startswith("__")
        if watched and name not in _UNWATCHED:
            self.rankmesh_state.refresh()

    def __getattr__(self, name: str) -> Any:
        # Only reached for what the module does not have; it tells type checkers that functions are attributes.
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _over(names: dict[str, Any], name: str, rule: FunctionType) -> FunctionType:
    """A function over other globals."""
    made = FunctionType(rule.__code__.replace(co_name=name), names, name, rule.__defaults__, rule.__closure__)
    made.__doc__, made.__qualname__ = rule.__doc__, name
    made.__annotations__, made.__kwdefaults__ = rule.__annotations__, rule.__kwdefaults__
    vars(made).update(vars(rule))
    return made


# -- kept answers ----------------------------------------------------------------------------------------------------


def _answers(names: Mapping[str, Any], whole: Mapping[str, bool]) -> dict[str, Any]:
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
        for name, place in _PLACES.items():
            at = place(lambda: rank, lambda: size)
            yield STAGES[name], ranks[at] if at < len(ranks) else None
