"""The rules by which a row of Megatron's interface becomes a function.

```
get_tensor_model_parallel_group = group("tp")         gives _TENSOR_MODEL_PARALLEL_GROUP
get_tensor_model_parallel_rank = rank("tp")           gives _tp_rank, or asks
set_tensor_model_parallel_rank = set_rank("_MPU_TENSOR_MODEL_PARALLEL_RANK")
```

A rule is a function over stand-ins: globals such as ``_GROUP``, and texts such as ``"_KIND"``. A row puts its names in
their place in the code, so that a getter which a rule made is as fast as one that is written out. Each runs
over the globals of a parallel state (``state.py``), where ``rankmesh_state`` is the state itself.
"""

# mypy: allow-untyped-defs
# Signatures are those of Megatron-Core, which annotates few.

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from rankmesh.dialects.megatron.table import BY_KIND, NUMBERS, STAGES

__all__ = [
    "data",
    "expert_data",
    "first_rank",
    "flagged",
    "group",
    "group_if_made",
    "named",
    "rank",
    "ranks",
    "set_rank",
    "set_size",
    "size",
    "stage",
    "value",
]

Function = Callable[..., Any]

# The stand-ins, and the state, as type checkers see them.
_GROUP: Any = None
_RANKS: Any = None
_ANSWER: Any = None
_KEPT: Any = None
_KEPT_WITH_CP: Any = None
rankmesh_state: Any = None


def named(rule: Function, doc: str, **names: str) -> Function:
    """A function of a rule, with other names for the globals that it reads, and other texts."""

    def replaced(constant: object) -> Any:
        if isinstance(constant, tuple):  # arguments that the compiler joined
            return tuple(map(replaced, constant))
        return names.get(constant, constant) if isinstance(constant, str) else constant

    code = cast(FunctionType, rule).__code__
    read = tuple(names.get(name, name) for name in code.co_names)
    code = code.replace(co_names=read, co_consts=replaced(code.co_consts))
    made = FunctionType(code, rule.__globals__, rule.__name__, cast(FunctionType, rule).__defaults__)
    made.__doc__ = doc
    return made


def group(kind: str, what: str) -> Function:
    """The getter of a process group; an absent one is an error, or None where it is not checked."""
    return _checked(kind, BY_KIND[kind].group, f"{what}; None if absent and not checked.")


def ranks(kind: str) -> Function:
    """The getter of a group's global ranks."""
    return _checked(kind, str(BY_KIND[kind].ranks), f"The global ranks of the {BY_KIND[kind].what}.")


def _checked(kind: str, name: str, doc: str) -> Function:
    def getter(check_initialized=True):
        if _ANSWER is None and check_initialized:
            raise rankmesh_state.absent("_KIND")
        return _ANSWER

    return named(getter, doc, _ANSWER=name, _KIND=kind)


def group_if_made(kind: str, what: str) -> Function:
    """The getter of a process group that has no flag: an absent one is an error."""

    def getter():
        if _GROUP is None:
            raise rankmesh_state.absent("_KIND")
        return _GROUP

    return named(getter, f"{what}.", _GROUP=BY_KIND[kind].group, _KIND=kind)


def first_rank(kind: str) -> Function:
    """The getter of the first of a group's global ranks, from which its members broadcast."""

    def getter():
        if _RANKS is None:
            raise rankmesh_state.absent("_KIND")
        return _RANKS[0]

    return named(
        getter, f"The first global rank of the {BY_KIND[kind].what}.", _RANKS=str(BY_KIND[kind].ranks), _KIND=kind
    )


def rank(kind: str) -> Function:
    """The getter of this rank's place in a group."""
    return _number(kind, "rank", f"The place of this rank in the {BY_KIND[kind].what}.")


def size(kind: str) -> Function:
    """The getter of a group's size."""
    return _number(kind, "size", f"The size of the {BY_KIND[kind].what}.")


def _number(kind: str, method: str, doc: str) -> Function:
    def getter():
        if _ANSWER is not None:
            return _ANSWER
        return rankmesh_state.ask("_KIND", "_METHOD")

    return named(getter, doc, _ANSWER=NUMBERS[kind].kept_as(method), _KIND=kind, _METHOD=method)


def stage(place: str, doc: str) -> Function:
    """The getter of the global rank at a place of this rank's pipeline, such as ``"next"``."""

    def getter():
        if _ANSWER is not None:
            return _ANSWER
        return rankmesh_state.stage("_PLACE")

    return named(getter, doc, _ANSWER=STAGES[place], _PLACE=place)


def flagged(kind: str, method: str, getter: Function) -> Function:
    """The getter of a rank or a size in the data-parallel group that flags choose; it keeps the answers of some."""
    what = "place of this rank in" if method == "rank" else "size of"
    kept = {"_KEPT": NUMBERS[kind].kept_as(method), "_KEPT_WITH_CP": NUMBERS["dp_cp"].kept_as(method)}
    return named(getter, f"The {what} the {BY_KIND[kind].what} that the flags choose.", _METHOD=method, **kept)


def data(method: str) -> Function:
    """The getter of this rank's place in a data-parallel group, or of its size."""

    def getter(with_context_parallel=False, partial_data_parallel=False, with_gtp_remat=True):
        kept = _KEPT_WITH_CP if with_context_parallel else _KEPT
        if kept is not None and with_gtp_remat and not partial_data_parallel:
            return kept
        flags = {"partial_data_parallel": partial_data_parallel, "with_gtp_remat": with_gtp_remat}
        return rankmesh_state.ask("dp", "_METHOD", with_context_parallel=with_context_parallel, **flags)

    return flagged("dp", method, getter)


def expert_data(method: str) -> Function:
    """The getter of this rank's place in an expert data-parallel group, or of its size."""

    def getter(partial_expert_data_parallel=False, with_gtp_remat=True):
        if _KEPT is not None and with_gtp_remat and not partial_expert_data_parallel:
            return _KEPT
        flags = {"partial_expert_data_parallel": partial_expert_data_parallel, "with_gtp_remat": with_gtp_remat}
        return rankmesh_state.ask("ep_dp", "_METHOD", **flags)

    return flagged("ep_dp", method, getter)


def value(name: str, doc: str) -> Function:
    """The getter of a global that may be None."""

    def getter():
        return _ANSWER

    return named(getter, doc, _ANSWER=name)


def set_rank(name: str) -> Function:
    """The setter of a rank that overrides the group's."""

    def setter(rank):
        rankmesh_state.write("_NAME", rank)

    return named(setter, "Set the rank that the getter returns; None: the group's again.", _NAME=name)


def set_size(name: str) -> Function:
    """The setter of a size that overrides the group's."""

    def setter(world_size):
        rankmesh_state.write("_NAME", world_size)

    return named(setter, "Set the world size that the getter returns; None: the group's again.", _NAME=name)
