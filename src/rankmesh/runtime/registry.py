"""The registry of a dialect's state: the groups that it has before, while and after they exist.

```
            initialise                destroy
   none  ───────────────>  groups  ───────────────>  none
NotInitialized        LiveGroups              NotInitialized
```

Several states of one dialect live side by side: each has the groups of its own connect. A rank that opened its states
in another order gets an error when the ranks agree, as their plans differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch.distributed as dist

from rankmesh.core.plan import Plan
from rankmesh.errors import AlreadyInitialized, LayoutError, NotInitialized, PlanError, SizesError
from rankmesh.runtime.connect import connect
from rankmesh.runtime.live import LiveGroups

__all__ = ["Registry", "rank_states", "refusing_sizes", "register", "world_size"]


_states: WeakValueDictionary[int, object] = WeakValueDictionary()


def register(state: object) -> None:
    """Let an object belong to one rank, although a program may make it before it knows which rank it is.

    Where several ranks share a process, as in ``rankmesh.sim``, each has the attributes of such an object to itself.
    """
    _states[id(state)] = state


def rank_states() -> list[object]:
    """Every object that was registered, and is still there."""
    return list(_states.values())


class Registry:
    """The live groups of one state of a dialect, once it has them; registered, so that each rank has its own.

    ``dialect`` names the plans; ``initialiser`` and ``destroyer`` are the functions that the errors name.
    """

    def __init__(self, dialect: str, initialiser: str, destroyer: str) -> None:
        register(self)
        self._dialect = dialect
        self._initialiser = initialiser
        self._destroyer = destroyer
        self._groups: LiveGroups | None = None

    @property
    def is_open(self) -> bool:
        """True if there are groups."""
        return self._groups is not None

    @property
    def groups(self) -> LiveGroups:
        """The groups; ``NotInitialized`` where there are none."""
        if self._groups is None:
            raise NotInitialized(
                f"{self._dialect}'s groups are not initialized; they exist from "
                f"{self._initialiser}() to {self._destroyer}(); call {self._initialiser}() first"
            )
        return self._groups

    def check_free(self) -> None:
        """``AlreadyInitialized`` where there are groups."""
        if self._groups is not None:
            raise AlreadyInitialized(
                f"{self._initialiser}() is called on a state that is already initialized: its groups "
                f"{' '.join(self._groups)} exist; call {self._destroyer}() first, or make another state"
            )

    def open(self, plan: Plan) -> LiveGroups:
        """Connect the plan under the name of the dialect, and keep its groups."""
        self.check_free()
        self._groups = connect(plan.replace(name=self._dialect))
        return self._groups

    def close(self) -> None:
        """Destroy the groups; nothing where there are none."""
        if self._groups is None:
            return
        groups, self._groups = self._groups, None
        groups.close()


def world_size(what: str) -> int:
    """Return the size of the initialised world; ``NotInitialized`` where there is none."""
    if not dist.is_initialized():
        raise NotInitialized(
            f"{what} needs an initialised torch.distributed world, whose ranks make the groups together; "
            "call torch.distributed.init_process_group() first, or start the program with torchrun"
        )
    return dist.get_world_size()


@contextmanager
def refusing_sizes() -> Iterator[None]:
    """Turn a ``LayoutError`` or ``PlanError`` raised inside into a ``SizesError``: an ``AssertionError``, too."""
    try:
        yield
    except (LayoutError, PlanError) as error:
        raise SizesError(error.message, **error.values) from error
