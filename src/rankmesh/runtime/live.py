"""Live groups: the process groups of one rank, made from a plan, and destroyed by their owner.

```
plan.of(rank) ── canonical groups ── process groups ── handles by name
                 (sharing)            (one for each; one-rank groups are local)
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from rankmesh.backend.default import default_pg, is_inherited
from rankmesh.backend.protocol import NotJoined
from rankmesh.core.local import ByKind, LocalGroup, LocalGroups
from rankmesh.core.options import time_limit
from rankmesh.core.plan import Plan
from rankmesh.errors import ConnectError, RankmeshError, first_line, listed
from rankmesh.runtime.handles import LiveGroup
from rankmesh.runtime.schedule import Making, execute, making

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rankmesh.placement.measured import Measurement
    from rankmesh.runtime.report import Report
    from rankmesh.runtime.world import World

__all__ = ["LiveGroups"]


class LiveGroups(ByKind[LiveGroup]):
    """The groups that this rank is in, by name, in the plan's order; a context manager that destroys them.

    Made by ``connect``: one plan's view of the world. Asking for a group that this rank is not in raises
    ``NotAMember``; after ``close()`` the mapping is empty, and asking it for a group raises ``ConnectError``.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        epoch: int,
        phases: dict[str, float],
        *,
        deadline: float = 0.0,
        key: str = "",
        local: LocalGroups | None = None,
    ) -> None:
        self.plan = plan
        self.key = key
        self.epoch = epoch
        self.phases = phases
        self._world = world
        self._default = world.default
        # Until when members let this rank wait in connect() (``time.monotonic``).
        self._deadline = deadline
        self._local = local or plan.of(world.default.rank)
        self._made: dict[str, ProcessGroup] = {}
        self._closed = False
        # Whether every rank has made its groups.
        self.is_complete = False
        self._handles = {name: LiveGroup(local, self._opener(local)) for name, local in self._local.items()}
        # The same until they are closed: one look-up answers a question.
        self._open_handles = dict(self._handles)

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._default.rank

    @property
    def world_size(self) -> int:
        """The size of the live world."""
        return self._default.size

    @property
    def closed(self) -> bool:
        """Whether the groups have been destroyed."""
        return self._closed

    # -- the mapping --------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> LiveGroup:
        try:
            return self._open_handles[name]
        except KeyError:
            self._check_open()
            self._local[name]  # raises NotAMember or UnknownGroup, with the members
            raise

    def __contains__(self, name: object) -> bool:
        return name in self._open_handles

    def __iter__(self) -> Iterator[str]:
        return iter(self._open_handles)

    def __len__(self) -> int:
        return len(self._open_handles)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _check_open(self) -> None:
        if is_inherited():
            default_pg()  # raises
        if self._closed:
            raise ConnectError("these groups are closed; use them inside the `with` block, or connect again")

    # -- process groups -----------------------------------------------------------------------------------------

    def _opener(self, local: LocalGroup) -> Callable[[], ProcessGroup]:
        canonical = self._local[local.canonical]
        return lambda: self._open(canonical)

    def _open(self, canonical: LocalGroup) -> ProcessGroup:
        """The process group of a canonical group, made at its first use when it is lazy."""
        self._check_open()
        if canonical.name not in self._made:
            self._made[canonical.name] = self._create(canonical)
        return self._made[canonical.name]

    def hold(self, name: str, action: Making) -> None:
        """Make the process group of a canonical group now."""
        self._made[name] = self._make(self._local[name], action, self._deadline)

    def _create(self, local: LocalGroup) -> ProcessGroup:
        """At its first use, which may be long after connect(), members wait as long as a call of the group may take."""
        action = making(self.plan, self.key, local, self._default, self.epoch)
        return self._make(local, action, time.monotonic() + action.request.kind.timeout.total_seconds())

    def _make(self, local: LocalGroup, action: Making, deadline: float) -> ProcessGroup:
        try:
            return execute(action, self._world.backend, deadline)
        except RankmeshError:
            raise
        except (RuntimeError, ValueError) as error:
            others = sum(len(live) for live in self._world.live if live.epoch != self.epoch)
            raise _failure(self.rank, local, error, others) from error

    # -- what they are for --------------------------------------------------------------------------------------

    def device_mesh(self, *axes: str, view: str | None = None, device_type: str | None = None) -> DeviceMesh:
        """A torch ``DeviceMesh`` over these axes, first the slowest as torch has it, on the same process groups.

        An axis is one of the mesh or the view, or a kind of the plan along several of them (``zero`` along dp and cp).
        Each must have a group in the plan, the one of that name if there is one: no process group is made here.
        """
        from rankmesh.backend.meshes import device_mesh
        from rankmesh.runtime.blocks import block, kind_along

        self._check_open()
        groups = {axis: self._handles[kind_along(self.plan, axis, view, self._handles)] for axis in axes}
        ranks = block(self.plan, [group.name for group in groups.values()], self.rank, axes)
        return device_mesh([group.pg for group in groups.values()], ranks, axes, device_type)

    def warm_up(self, *, timeout: float | timedelta = 60.0) -> dict[str, float]:
        """Use every process group once, in the plan's order, and each pipeline neighbour; seconds by group.

        Every rank of the plan calls it. The first use of a communicator connects it, which takes long on a large
        job; after this the first training step does not wait for it. Raises ``ConnectError``, naming the group, when
        one is not through within ``timeout`` seconds.
        """
        from rankmesh.runtime.warm import warm_up

        self._check_open()
        return warm_up(self, time_limit(timeout))

    def measure(
        self,
        sizes: Iterable[int] | None = None,
        *,
        kinds: Iterable[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
        timeout: float | timedelta = 300.0,
    ) -> Measurement:
        """Time the collectives that each kind is for, with all groups of the kind at once and with one alone.

        Every rank of the plan calls it, and gets the same measurement. ``sizes`` are bytes that a rank holds, 4 KiB to
        4 MiB by default; ``kinds`` are those measured, by default one of each that share process groups;
        ``progress`` gets how many of how many cases are done; ``timeout`` is how long ranks wait for the results of the
        others, in seconds.
        """
        from rankmesh.runtime.measure import SIZES, measure

        self._check_open()
        return measure(self, SIZES if sizes is None else sizes, kinds, progress, time_limit(timeout))

    def report(self) -> Report:
        """What exists, what is shared, the effective options, and what each phase cost."""
        from rankmesh.runtime.report import report_of

        self._check_open()
        return report_of(self)

    @property
    def local(self) -> LocalGroups:
        """The plan's part of this rank."""
        return self._local

    @property
    def world(self) -> World:
        """The world in which the groups live."""
        return self._world

    @property
    def made(self) -> tuple[ProcessGroup, ...]:
        """The process groups that exist by now."""
        return tuple(self._made.values())

    def is_made(self, canonical: str) -> bool:
        """Whether the process group of a canonical group exists by now."""
        return canonical in self._made

    # -- the end ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Have every collective that is blocked in these groups return with an error, on this rank and its peers.

        For when a member is lost: every surviving rank calls it, from any thread, and then ``close``. Connections of
        other plans of this world are cut too: they share gloo's devices. Over NCCL start the job with
        ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``, or torch ends the process where a call fails. Raises ``ConnectError``
        when the groups are closed, and in a forked child.
        """
        self._check_open()
        self._world.backend.abort(self.made)

    def close(self) -> None:
        """Destroy the process groups, last made first, the same order on every member; calling it again is nothing.

        A forked child only forgets them: the groups, their threads and their connections belong to its parent.
        """
        # Not only once: an interrupt may have left some of them.
        self._closed = True
        self._open_handles.clear()
        if is_inherited():
            return
        for handle in self._handles.values():
            handle.forget()
        failed = {}
        for name in reversed([name for name in self._local if name in self._made]):
            cause = self._destroy(self._made[name])
            del self._made[name]
            if cause is not None:
                failed[name] = cause
        self._world.forget(self)
        if failed:
            name, cause = next(iter(failed.items()))
            raise ConnectError(
                f"rank {self.rank}: group {name!r} could not be destroyed ({first_line(cause)}); the others were; "
                "its connections close when the process ends",
                groups=tuple(failed),
            ) from cause

    def _destroy(self, pg: ProcessGroup) -> RuntimeError | None:
        """Destroy one process group; its error, so that the others can still be destroyed."""
        try:
            self._world.backend.destroy(pg, connected=self.is_complete)
        except RuntimeError as error:
            return error
        return None

    def __enter__(self) -> LiveGroups:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise ConnectError("live groups cannot be pickled, as they belong to their process; send the plan, or report()")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"epoch {self.epoch}"
        return f"LiveGroups(rank {self.rank} of {self.world_size}, {state}: {' '.join(self._handles)})"


def _failure(rank: int, local: LocalGroup, error: Exception, others: int) -> ConnectError:
    """Which group could not be made, which of its members joined where the backend knows, and what else exists here."""
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
