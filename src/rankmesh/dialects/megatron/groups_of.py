"""The getters and setters that follow from the table by rule: one row, up to six functions.

```
get_<name>_group(check_initialized=True)   the process group; None if absent and not checked
get_<name>_rank(), get_<name>_world_size() what was set, else the group's; 0 outside a world where the row is lenient
get_<name>_src_rank()                      the first of the group's global ranks
get_<name>_global_ranks()                  all of them
set_<name>_rank(rank), set_<name>_world_size(world_size)
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rankmesh.dialects.megatron.state import Function, State, absent, in_a_world
from rankmesh.dialects.megatron.table import ROWS, Row, override

__all__ = ["functions", "named", "remembered"]

_METHOD = {"rank": "rank", "size": "size"}
_WORD = {"rank": "rank", "size": "world_size"}


def functions(state: State) -> Iterator[Function]:
    """Every function that the table makes."""
    for row in ROWS:
        if row.name:
            yield _group(state, row)
        for word in row.asks.split():
            yield {"rank": _number, "size": _number, "src": _source, "ranks": _ranks}[word](state, row, word)
        for word in row.sets.split():
            yield _setter(state, row.name, word)
    yield _setter(state, "data_parallel", "rank")
    yield _expert_tensor(state, "rank")
    yield _expert_tensor(state, "size")
    yield _hierarchical(state)


def remembered(state: State, name: str, doc: str, compute: Callable[[], Any], ready: Callable[[], bool]) -> Function:
    """A getter without arguments that reads one value as long as nothing is written."""
    value: Any = None
    ask = state.kept(compute, ready)

    def getter():  # type: ignore[no-untyped-def]  # Megatron's getters have no annotations
        return value if value is not None else compute()

    def refresh() -> None:
        nonlocal value
        value = ask()

    state.refreshers.append(refresh)
    return named(getter, name, doc)


def named(function: Function, name: str, doc: str) -> Function:
    """The function under the name and with the docstring that the table gives it."""
    function.__name__, function.__doc__ = name, doc
    return function


def _group(state: State, row: Row) -> Function:
    group: Any = None

    def getter(check_initialized=True):  # type: ignore[no-untyped-def]
        return group if group is not None else state.group(row.kind, check_initialized)

    def refresh() -> None:
        nonlocal group
        group = state.globals[row.group]

    state.refreshers.append(refresh)
    return named(getter, f"get_{row.name}_group", f"The {row.what} of this rank; None if absent and not checked.")


def _number(state: State, row: Row, word: str) -> Function:
    forced = override(row.name, word) if word in row.sets.split() else None
    group_getter = f"get_{row.name}_group"

    def compute() -> Any:
        if forced is not None and (value := state.globals[forced]) is not None:
            return value
        if row.lenient and not in_a_world():
            return 0
        return getattr(state.globals[group_getter](), _METHOD[word])()

    what = "place of this rank in" if word == "rank" else "size of"
    return remembered(
        state,
        f"get_{row.name}_{_WORD[word]}",
        f"The {what} the {row.what}.",
        compute,
        lambda: state.fixed(forced, row.group),
    )


def _source(state: State, row: Row, _: str) -> Function:
    def getter():  # type: ignore[no-untyped-def]
        return _listed(state, row)[0]

    return named(getter, f"get_{row.name}_src_rank", f"The first global rank of the {row.what}.")


def _ranks(state: State, row: Row, _: str) -> Function:
    def getter(check_initialized=True):  # type: ignore[no-untyped-def]
        return _listed(state, row) if check_initialized else state.globals[str(row.ranks)]

    return named(getter, f"get_{row.name}_global_ranks", f"The global ranks of the {row.what}.")


def _listed(state: State, row: Row) -> Any:
    ranks = state.globals[str(row.ranks)]
    if ranks is None:
        raise absent(state, row)
    return ranks


def _setter(state: State, name: str, word: str) -> Function:
    target, parameter = override(name, word), _WORD[word]

    def set_rank(rank):  # type: ignore[no-untyped-def]
        setattr(state.module, target, rank)

    def set_size(world_size):  # type: ignore[no-untyped-def]
        setattr(state.module, target, world_size)

    return named(
        set_rank if word == "rank" else set_size,
        f"set_{name}_{parameter}",
        f"Set the {parameter.replace('_', ' ')} that get_{name}_{parameter} returns; None: the group's own again.",
    )


def _expert_tensor(state: State, word: str) -> Function:
    """Without a group of experts, what was set for the tensor-parallel group stands for it, as in Megatron-Core."""
    forced, dense = override("expert_tensor_parallel", word), override("tensor_model_parallel", word)

    def compute() -> Any:
        if (value := state.globals[forced]) is not None:
            return value
        if not state.globals["_EXPERT_TENSOR_PARALLEL_GROUP"]:
            return state.globals[dense]
        return getattr(state.globals["get_expert_tensor_parallel_group"](), _METHOD[word])()

    return remembered(
        state,
        f"get_expert_tensor_parallel_{_WORD[word]}",
        f"The {_WORD[word].replace('_', ' ')} in the expert tensor parallel group.",
        compute,
        lambda: state.fixed(forced, "_EXPERT_TENSOR_PARALLEL_GROUP"),
    )


def _hierarchical(state: State) -> Function:
    row = Row("hcp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS")

    def getter(check_initialized=True):  # type: ignore[no-untyped-def]
        groups = state.globals[row.group]
        if groups is None and check_initialized:
            raise absent(state, row)
        return groups

    name = "get_hierarchical_context_parallel_groups"
    return named(getter, name, "The context-parallel groups of each level, innermost first.")
