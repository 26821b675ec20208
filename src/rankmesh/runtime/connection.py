"""Connections: the process groups of one plan in one epoch, which the world makes and destroys.

```
plan.of(rank) ── canonical groups ── process groups          one for each; one-rank groups are local
                 (sharing)           handles by name         empty once they are closed
```
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from rankmesh.backend.default import default_pg, is_inherited
from rankmesh.backend.protocol import GroupRequest, NotJoined
from rankmesh.core.local import LocalGroup, LocalGroups
from rankmesh.core.plan import Plan
from rankmesh.errors import ConnectError, RankmeshError, first_line, listed
from rankmesh.runtime.handles import LiveGroup
from rankmesh.runtime.schedule import requested

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rankmesh.runtime.world import World

__all__ = ["Connection"]


class Connection:
    """The process groups of this rank for one plan, in its world.

    ``handles`` has a handle of each of the plan's groups by name, none after ``close``. ``is_complete`` is set once
    every rank has its groups.
    """

    def __init__(self, world: World, plan: Plan, local: LocalGroups, key: str = "", epoch: int = 0) -> None:
        self.world, self.plan, self.local, self.key, self.epoch = world, plan, local, key, epoch
        self.made: dict[str, ProcessGroup] = {}
        self.is_complete = self.is_closed = False
        self._before = sum(map(len, world.live))
        self._every = {name: LiveGroup(group, partial(self.open, group.canonical)) for name, group in local.items()}
        self.handles = dict(self._every)

    def check_open(self) -> None:
        """Raise ``ConnectError`` when the groups are closed, and in a forked child."""
        if is_inherited():
            default_pg()  # raises
        if self.is_closed:
            raise ConnectError("these groups are closed; use them inside the `with` block, or connect again")

    def open(self, name: str) -> ProcessGroup:
        """Return the process group of a canonical group; a lazy one is made now, at its first use.

        That may be long after ``connect``, so members wait as long as a call of the group may take.
        """
        self.check_open()
        if name not in self.made:
            request = requested(self.plan, self.key, self.local[name], self.world.default, self.epoch)
            self.make(name, request, time.monotonic() + request.kind.timeout.total_seconds())
        return self.made[name]

    def make(self, name: str, request: GroupRequest, deadline: float) -> None:
        """Make the process group of a canonical group, for which its members wait until ``deadline``."""
        try:
            self.made[name] = self.world.backend.create(request, deadline)
        except RankmeshError:
            raise
        except (RuntimeError, ValueError) as error:
            raise _failure(self.world.default.rank, self.local[name], error, self._before) from error

    def abort(self) -> None:
        """Have every collective that is blocked in these groups return with an error."""
        self.check_open()
        self.world.backend.abort(tuple(self.made.values()))

    def close(self) -> None:
        """Destroy the process groups, last made first, the same order on every member; a forked child forgets them."""
        # Not only once: an interrupt may have left some of them.
        self.is_closed = True
        self.handles.clear()
        if is_inherited():
            return
        for handle in self._every.values():
            handle.forget()
        if "torch.distributed.tensor" in sys.modules:
            from rankmesh.backend.meshes import forget_shardings

            forget_shardings()
        failed = {}
        for name in reversed([name for name in self.local if name in self.made]):
            try:
                self.world.backend.destroy(self.made[name], connected=self.is_complete)
            except RuntimeError as error:  # the others can still be destroyed
                failed[name] = error
            del self.made[name]
        self.world.forget_closed()
        if failed:
            name, cause = next(iter(failed.items()))
            raise ConnectError(
                f"rank {self.world.default.rank}: group {name!r} could not be destroyed ({first_line(cause)}); the "
                "others were; its connections close when the process ends",
                groups=tuple(failed),
            ) from cause


def _failure(rank: int, local: LocalGroup, error: Exception, others: int) -> ConnectError:
    """Name the group that could not be made, and which of its members joined where the backend knows."""
    seen = tuple(getattr(error, "seen", ()))
    unseen = tuple(member for member in local.ranks if member not in seen) if seen else ()
    who = f"its members are {listed(local.ranks)}"
    if unseen:
        who = f"of its members {listed(seen)} joined and {listed(unseen)} did not"
    existing = (
        f"; this process holds {others} groups that were connected before: rm.close_all() closes them" if others else ""
    )
    return ConnectError(
        f"rank {rank}: the process group of {local} could not be made ({first_line(error)}); {who}; "
        f"look at the logs of the members for the one that failed first{existing}",
        rank=rank,
        group=local.name,
        ranks=local.ranks,
        seen=seen,
        missing=unseen,
        not_joined=isinstance(error, NotJoined),
    )
