"""Live groups: a view of the process groups that one rank has for a plan; the world owns them (``connection.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rankmesh.core.local import ByKind, LocalGroups
from rankmesh.core.options import time_limit
from rankmesh.errors import ConnectError
from rankmesh.runtime.connection import Connection
from rankmesh.runtime.handles import LiveGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rankmesh.core.measured import Measurement
    from rankmesh.runtime.report import Report

__all__ = ["LiveGroups"]


class LiveGroups(ByKind[LiveGroup]):
    """The groups that this rank is in, by name, in the plan's order; a context manager that destroys them.

    Made by ``connect``: one plan's view of the world. Asking for a group that this rank is not in raises
    ``NotAMember``; after ``close()`` the mapping is empty, and asking it for a group raises ``ConnectError``.
    """

    def __init__(self, connection: Connection, phases: dict[str, float]) -> None:
        self.plan, self.key, self.epoch = connection.plan, connection.key, connection.epoch
        self.world, self.phases = connection.world, phases
        self._connection = connection
        # None is left once they are closed: one look-up answers a question.
        self._handles = connection.handles

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.world.default.rank

    @property
    def world_size(self) -> int:
        """The size of the live world."""
        return self.world.default.size

    @property
    def closed(self) -> bool:
        """True if the groups have been destroyed."""
        return self._connection.is_closed

    # -- the mapping --------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> LiveGroup:
        try:
            return self._handles[name]
        except KeyError:
            self._connection.check_open()
            self.local[name]  # raises NotAMember or UnknownGroup, with the members
            raise

    def __contains__(self, name: object) -> bool:
        return name in self._handles

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    # -- what they are for --------------------------------------------------------------------------------------

    def device_mesh(
        self,
        *axes: str,
        view: str | None = None,
        device_type: str | None = None,
        flattened: Mapping[str, Sequence[str]] | None = None,
    ) -> DeviceMesh:
        """Return a torch ``DeviceMesh`` over these axes, first the slowest as torch has it, on the same process groups.

        An axis is one of the mesh or the view, or a kind of the plan along several of them (``zero`` along dp and cp);
        by default all of the mesh. ``flattened`` maps a name to the dimensions that it joins (torch's ``_flatten``).
        Each must have a group in the plan, the one of that name if there is one: no process group is made here.

        Raises ``ConnectError`` for axes without a group, and in the order of a SPEC: the reverse of torch's.
        """
        from rankmesh.backend import meshes
        from rankmesh.runtime.blocks import block, kind_over

        self._connection.check_open()
        names = axes or tuple(self.plan.mesh.view(view).axes)[::-1]
        groups = {axis: self._handles[kind_over(self.plan, axis, (axis,), view, self._handles)] for axis in names}
        ranks = block(self.plan, [group.name for group in groups.values()], self.rank, names)
        made = meshes.device_mesh([group.pg for group in groups.values()], ranks, names, device_type)
        for name, joined in (flattened or {}).items():
            kind = kind_over(self.plan, name, tuple(joined), view, self._handles)
            meshes.flatten(made, tuple(joined), name, self._handles[kind].pg)
        return made

    def warm_up(self, *, timeout: float | timedelta = 60.0) -> dict[str, float]:
        """Use every process group once, in the plan's order, and each pipeline neighbour; seconds by group.

        Every rank of the plan calls it. The first use of a communicator connects it, which takes long on a large
        job; after this the first training step does not wait for it. Raises ``ConnectError``, naming the group, when
        one is not through within ``timeout`` seconds.
        """
        from rankmesh.runtime.warm import warm_up

        self._connection.check_open()
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

        self._connection.check_open()
        return measure(self, SIZES if sizes is None else sizes, kinds, progress, time_limit(timeout))

    def report(self) -> Report:
        """Report the groups that exist and are shared, their effective options, and the seconds of each phase."""
        from rankmesh.runtime.report import report_of

        self._connection.check_open()
        return report_of(self)

    @property
    def local(self) -> LocalGroups:
        """The plan's part of this rank."""
        return self._connection.local

    @property
    def made(self) -> tuple[ProcessGroup, ...]:
        """The process groups that exist by now."""
        return tuple(self._connection.made.values())

    def is_made(self, canonical: str) -> bool:
        """Return whether the process group of a canonical group exists by now."""
        return canonical in self._connection.made

    # -- the end ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Have every collective that is blocked in these groups return with an error, on this rank and its peers.

        For when a member is lost: every surviving rank calls it, from any thread, and then ``close``. Connections of
        other plans of this world are cut too: they share gloo's devices. Over NCCL start the job with
        ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``, or torch ends the process where a call fails. Raises ``ConnectError``
        when the groups are closed, and in a forked child.
        """
        self._connection.abort()

    def close(self) -> None:
        """Destroy the process groups, last made first, the same order on every member; calling it again does nothing.

        Keep handles, not their ``pg``: handles raise ``ConnectError`` from then on. So does a kept process group of one
        rank, and NCCL's has no communicator any more; but torch cannot close one group of gloo, whose collectives work
        as long as the object is kept. A forked child only forgets the groups: their threads and their connections
        belong to its parent.
        """
        self._connection.close()

    def __enter__(self) -> LiveGroups:
        self._connection.check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise ConnectError("live groups cannot be pickled, as they belong to their process; send the plan, or report()")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"epoch {self.epoch}"
        return f"LiveGroups(rank {self.rank} of {self.world_size}, {state}: {' '.join(self.local)})"
