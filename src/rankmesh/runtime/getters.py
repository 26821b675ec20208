"""Getters: the methods by which a dialect's state answers for one kind of its groups.

```
class ModelParallel(Getters):                                of this rank's group of the kind cp
    get_context_parallel_group = group_of("cp")              its process group
    get_context_parallel_ranks = ranks_of("cp")              its members, global ranks
    get_context_parallel_world_size = size_of("cp")          how many there are
    get_context_parallel_rank = rank_in("cp")                the position of this rank among them
    get_model_parallel_src_rank = first_of("tp")             its first member
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rankmesh.runtime.handles import LiveGroup

__all__ = ["Getters", "SharedGetters", "first_of", "group_of", "rank_in", "ranks_of", "size_of"]

_Answer = TypeVar("_Answer")


class Getters:
    """A state with getters; each has the name that it is given in the class."""

    def _group(self, kind: str) -> LiveGroup:
        """Return the group that the getters of a kind read."""
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in vars(cls).items():
            if getattr(value, "__name__", "") == "getter":
                value.__name__, value.__qualname__ = name, f"{cls.__qualname__}.{name}"
                value.__module__ = cls.__module__


def group_of(kind: str) -> Callable[[Getters], ProcessGroup]:
    """Return a getter of the process group."""
    return _getter(kind, lambda group: group.pg, "ProcessGroup", f"The process group ``{kind}`` that this rank is in.")


def ranks_of(kind: str) -> Callable[[Getters], list[int]]:
    """Return a getter of the members, in the order of their positions."""
    return _getter(
        kind, lambda group: list(group.ranks), "list[int]", f"The global ranks of this rank's group ``{kind}``."
    )


def size_of(kind: str) -> Callable[[Getters], int]:
    """Return a getter of the number of members."""
    return _getter(kind, lambda group: group.size, "int", f"How many ranks are in this rank's group ``{kind}``.")


def rank_in(kind: str) -> Callable[[Getters], int]:
    """Return a getter of this rank's position among the members."""
    return _getter(kind, lambda group: group.rank, "int", f"The position of this rank in its group ``{kind}``.")


def first_of(kind: str) -> Callable[[Getters], int]:
    """Return a getter of the first member, from which the group broadcasts."""
    return _getter(
        kind, lambda group: group.first, "int", f"The global rank of the first member of this rank's ``{kind}``."
    )


def _getter(kind: str, answer: Callable[[LiveGroup], _Answer], form: str, meaning: str) -> Callable[[Getters], _Answer]:
    def getter(self):  # type: ignore[no-untyped-def]
        return answer(self._group(kind))

    getter.__doc__, getter.__annotations__ = meaning, {"return": form}
    return getter


class SharedGetters(Getters):
    """The getters that ezpz and fairscale have in common, which lay out their groups alike."""

    get_context_parallel_group = group_of("cp")
    get_context_parallel_ranks = ranks_of("cp")
    get_context_parallel_world_size = size_of("cp")
    get_context_parallel_rank = rank_in("cp")
    get_pipeline_parallel_group = group_of("pp")
    get_pipeline_parallel_ranks = ranks_of("pp")
    get_data_parallel_group = group_of("dp")
    get_data_parallel_ranks = ranks_of("dp")
    get_data_parallel_world_size = size_of("dp")
    get_data_parallel_rank = rank_in("dp")
