"""The getters of a parallel state that are alike, each made from a kind of group of ``table.py``.

```
get_tensor_model_parallel_group       group("tp")
get_tensor_model_parallel_rank        rank("tp", "_MPU_TENSOR_MODEL_PARALLEL_RANK")      what a program wrote, if it did
get_tensor_model_parallel_src_rank    first("tp")
```

They read the globals of the state at each call, so that what a program writes there is what they return.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Signatures are those of Megatron-Core, which has no annotations here.

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rankmesh.dialects.megatron.refusals import NotInitialized, Refused
from rankmesh.dialects.megatron.state import State
from rankmesh.dialects.megatron.table import BY_KIND

__all__ = ["Getters"]

Getter = Callable[..., Any]


class Getters:
    """Makes the getters of one state; ``State.begin`` gives each the name that it has there."""

    def __init__(self, state: State) -> None:
        self._state, self._names = state, vars(state.module)

    def group(self, kind: str) -> Getter:
        """Return a getter of the process group; None if absent and not checked."""
        names, name, given = self._names, BY_KIND[kind].group, self._state.given

        def getter(check_initialized=True):
            return names[name] or given(kind, check_initialized)

        return _described(getter, f"Return the {BY_KIND[kind].what}; None if absent and not checked.")

    def rank(self, kind: str, written: str = "_UNWRITTEN", *, absent: str = "0 outside a world") -> Getter:
        """Return a getter of this rank's place in a group, or of the place that a program has ``written``."""
        return self._number("_rank_in", "this rank's place in the", kind, written, absent)

    def size(self, kind: str, written: str = "_UNWRITTEN", *, absent: str = "0 outside a world") -> Getter:
        """Return a getter of the size of a group, or of the size that a program has ``written``."""
        return self._number("_size_of", "the size of the", kind, written, absent)

    def _number(self, of_groups: str, what: str, kind: str, written: str, absent: str) -> Getter:
        """Return a getter of a number; ``absent`` is its value without the group, which may be another global's."""
        names, name, given = self._names, BY_KIND[kind].group, self._state.given

        def getter():
            value = names[written]
            if value is not None:
                return value
            group = names[name]
            if group is None and absent != "0":
                if absent in names:
                    return names[absent]
                given(kind, absent == "an error" or dist.is_initialized())
            return names[of_groups][group]

        return _described(getter, f"Return {what} {BY_KIND[kind].what}; {absent} where there is none.")

    def ranks(self, kind: str) -> Getter:
        """Return a getter of the global ranks of a group."""
        ranks = self._state.ranks

        def getter(check_initialized=True):
            return ranks(kind, check_initialized)

        return _described(getter, f"Return the global ranks of the {BY_KIND[kind].what}.")

    def first(self, kind: str) -> Getter:
        """Return a getter of the first global rank of a group."""
        ranks = self._state.ranks

        def getter():
            return ranks(kind)[0]

        return _described(getter, f"Return the first global rank of the {BY_KIND[kind].what}.")

    def set_rank(self, written: str) -> Getter:
        """Return a function that writes the rank that a getter returns."""
        names = self._names

        def setter(rank):
            names[written] = rank

        return _described(setter, "Set the rank that the getter returns; None: the group's again.")

    def set_size(self, written: str) -> Getter:
        """Return a function that writes the size that a getter returns."""
        names = self._names

        def setter(world_size):
            names[written] = world_size

        return _described(setter, "Set the world size that the getter returns; None: the group's again.")

    def buffer(self, written: str, make: Callable[[], object]) -> tuple[Getter, Getter, Getter]:
        """Return functions that make a buffer, return it, and forget it."""
        names, what = self._names, written.removeprefix("_GLOBAL_").lower().replace("_", " ")

        def setter():
            if names[written] is not None:
                raise Refused(f"a second global {what} is asked for, and there is one; destroy it first")
            names[written] = make()

        def getter():
            if names[written] is None:
                raise NotInitialized(f"the global {what} is not initialized; call _set{written.lower()}() first")
            return names[written]

        def forget():
            names[written] = None

        return (
            _described(setter, f"Make the global {what}."),
            _described(getter, f"Return the global {what}."),
            _described(forget, f"Forget the global {what}."),
        )


def _described(function: Getter, doc: str) -> Getter:
    function.__doc__ = doc
    return function
