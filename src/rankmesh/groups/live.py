"""Live groups: the process groups of one rank, made from a plan, and destroyed by their owner.

```
plan.of(rank) ── leaders ── process groups ── handles by name
                 (sharing)   (one for each leader; one-rank groups are local)
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rankmesh.errors import ConnectError, NotAMember, RankmeshError
from rankmesh.groups import torch_private
from rankmesh.groups.alone import alone
from rankmesh.groups.handles import LiveGroup
from rankmesh.groups.limits import time_limit
from rankmesh.groups.measure import SIZES, measure
from rankmesh.groups.naming import process_group_name
from rankmesh.groups.report import Report, report_of
from rankmesh.groups.warm import warm_up
from rankmesh.placement.measured import Measurement
from rankmesh.plan.own import OwnGroup
from rankmesh.plan.plan import Plan
from rankmesh.plan.spec import GroupSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LiveGroups"]

_Default = TypeVar("_Default")
_NO_DEFAULT = object()
_SHOWN = 16


class LiveGroups(Mapping[str, LiveGroup]):
    """The groups that this rank is in, by name, in the plan's order; a context manager that destroys them.

    Made by ``connect``. Asking for a group that this rank is not in raises ``NotAMember``; using the mapping after
    ``close()`` raises ``ConnectError``.
    """

    def __init__(
        self, plan: Plan, world: torch_private.World, generation: int, phases: dict[str, float], within: timedelta
    ) -> None:
        self.plan = plan
        self.generation = generation
        self.phases = phases
        self._world = world
        self._making = torch_private.Making(torch_private.GlooDevices(), world.store, within)
        self._own = plan.of(world.rank)
        self._made: dict[str, ProcessGroup] = {}
        self._closed = False
        self._handles = {name: LiveGroup(own, self._opener(own)) for name, own in self._own.items()}
        # The same until they are closed: one look-up answers a question.
        self._open_handles = dict(self._handles)

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """The size of the live world."""
        return self._world.size

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
            self._own[name]  # raises NotAMember or UnknownGroup, with the members
            raise

    @overload
    def get(self, name: str, /) -> LiveGroup: ...
    @overload
    def get(self, name: str, /, default: _Default) -> LiveGroup | _Default: ...
    def get(self, name: str, /, default: object = _NO_DEFAULT) -> object:
        """The group of one kind, or ``default`` where this rank is in none of that kind.

        Without a default that is ``NotAMember``, as for ``[name]``; a name that the plan does not have is refused
        either way.
        """
        try:
            return self[name]
        except NotAMember:
            if default is _NO_DEFAULT:
                raise
            return default

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

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectError(
                "received a use of groups that are closed; their process groups are destroyed; connect again"
            )

    # -- process groups -----------------------------------------------------------------------------------------

    def _opener(self, own: OwnGroup) -> Any:
        leader = self._own[own.leader]
        return lambda: self._open(leader)

    def _open(self, leader: OwnGroup) -> ProcessGroup:
        """The process group of a leader, made at its first use when the group is lazy."""
        self._check_open()
        if leader.name not in self._made:
            self._made[leader.name] = self._create(leader)
        return self._made[leader.name]

    def create_all(self) -> None:
        """Make every process group that is not lazy, in the plan's order.

        First every option of the plan is checked, those of other ranks' groups too: what is refused is then refused by
        all ranks alike, and none of them waits for a member that has given up.
        """
        for spec in self.plan.specs:
            if self.plan.groups(spec.name).size > 1 and not self._world.dry:
                self._check(spec)
        for spec in self.plan.specs:
            started = time.perf_counter()
            if self._leads(spec) and not spec.options.lazy:
                self._open(self._own[spec.name])
                self.phases[f"create {spec.name}"] = time.perf_counter() - started
            elif self._world.bound_device is not None and spec.name in self._split_kinds:
                torch_private.decline_split(self._world.bound_device)

    def _check(self, spec: GroupSpec) -> None:
        backend = spec.options.backend or self._world.backend
        torch_private.check_backend(backend)
        torch_private.nccl_options(spec.options, backend)

    def _leads(self, spec: GroupSpec) -> bool:
        return spec.name in self._own and self._own[spec.name].leader == spec.name

    @cached_property
    def _split_kinds(self) -> frozenset[str]:
        """Kinds for which some rank splits the world's communicator, so that all others must decline the split."""
        if not self._world.splits:
            return frozenset()
        firsts = {names[0] for names in self.plan.sharing}
        return frozenset(
            spec.name
            for spec in self.plan.specs
            if spec.name in firsts
            and self.plan.groups(spec.name).size > 1
            and not spec.options.lazy
            and self._world.splits_for(spec.options.backend)
        )

    def _create(self, own: OwnGroup) -> ProcessGroup:
        name = process_group_name(self.plan.digest, self.generation, own.name, own.ranks)
        # In a dry run nobody else is there: torch's fake backend stands for each one that the plan asks for.
        backend = self._world.backend if self._world.dry else own.options.backend or self._world.backend
        if own.size == 1:
            return alone(rank=self.rank, name=name, desc=self._described(own), backend=backend)
        timeout = self._world.timeout if own.options.timeout is None else timedelta(seconds=own.options.timeout)
        try:
            return torch_private.create(
                self._making,
                ranks=own.ranks,
                rank=own.rank,
                name=name,
                desc=self._described(own),
                backend=backend,
                timeout=timeout,
                lazy=bool(own.options.lazy),
                options=None if self._world.dry else torch_private.nccl_options(own.options, backend),
            )
        except RankmeshError:
            raise
        except (RuntimeError, ValueError) as error:
            raise _failure(self.rank, own, error) from error

    def _described(self, own: OwnGroup) -> str:
        """Kind and coordinate, after the name of the plan where a job has several."""
        return f"{self.plan.name}:{own}" if self.plan.name else str(own)

    # -- what they are for --------------------------------------------------------------------------------------

    def device_mesh(self, *axes: str, view: str | None = None, device_type: str | None = None) -> DeviceMesh:
        """A torch ``DeviceMesh`` over these axes, first the slowest as torch has it, on the same process groups.

        Each axis must have a group of its own in the plan: no process group is made here.
        """
        self._check_open()
        _check_axes(axes)
        return torch_private.device_mesh(self._axis_groups(axes, view), self._rank_array(axes, view), axes, device_type)

    def _axis_groups(self, axes: tuple[str, ...], view: str | None) -> list[ProcessGroup]:
        return [self._axis_group(axis, view).pg for axis in axes]

    def _axis_group(self, axis: str, view: str | None) -> LiveGroup:
        wanted = self.plan.mesh.groups(axis, view=view)
        for name, kind in self.plan.kinds.items():
            if name in self._handles and kind.tile == wanted.tile:
                return self._handles[name]
        raise ConnectError(
            f"received axis {axis!r} for a device mesh, but no group of the plan is along {axis!r} alone; "
            f"add GroupSpec({axis!r}) to the plan",
            axis=axis,
        )

    def _rank_array(self, axes: tuple[str, ...], view: str | None) -> Any:
        mesh = self.plan.mesh.view(view)
        block = mesh.groups(axes[::-1], ordered=True).of(self.rank)
        return block.array.reshape([mesh.groups(axis).size for axis in axes])

    def warm_up(self, *, timeout: float | timedelta = 60.0) -> dict[str, float]:
        """Use every process group once, in the plan's order, and each pipeline neighbour; seconds by group.

        Every rank of the plan calls it. The first use of a communicator connects it, which takes long on a large
        job; after this the first training step does not wait for it. Raises ``ConnectError``, naming the group, when
        one is not through within ``timeout`` seconds.
        """
        self._check_open()
        return warm_up(self, time_limit(timeout))

    def measure(
        self,
        sizes: Iterable[int] = SIZES,
        *,
        kinds: Iterable[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
        timeout: float | timedelta = 300.0,
    ) -> Measurement:
        """Time the collectives that each kind is for, with all groups of the kind at once and with one alone.

        Every rank of the plan calls it, and gets the same measurement. ``sizes`` are bytes that a rank holds;
        ``kinds`` are those measured, by default one of each that share process groups; ``progress`` is told how many
        of how many cases are done; ``timeout`` is how long ranks wait for what the others tell, in seconds.
        """
        self._check_open()
        return measure(self, sizes, kinds, progress, time_limit(timeout))

    def report(self) -> Report:
        """What exists, what is shared, the effective options, and what each phase cost."""
        self._check_open()
        return report_of(self)

    @property
    def own(self) -> Mapping[str, OwnGroup]:
        """The plan's part of this rank."""
        return self._own

    @property
    def world(self) -> torch_private.World:
        """The world in which the groups live."""
        return self._world

    def is_made(self, leader: str) -> bool:
        """Whether the process group of a leader exists by now."""
        return leader in self._made

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy the process groups, last made first, the same order on every member; calling it again is nothing."""
        # Not only once: an interrupt may have left some of them.
        self._closed = True
        self._open_handles.clear()
        for handle in self._handles.values():
            handle.forget()
        failed = {}
        for name in reversed([name for name in self._own if name in self._made]):
            cause = _destroy(self._made[name])
            del self._made[name]
            if cause is not None:
                failed[name] = cause
        self._making.devices.release()
        if failed:
            name, cause = next(iter(failed.items()))
            raise ConnectError(
                f"rank {self.rank}: group {name!r} could not be destroyed ({_first_line(cause)}); the others were; "
                "its connections close when the process ends",
                groups=tuple(failed),
            ) from cause

    def __enter__(self) -> LiveGroups:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise ConnectError("received live groups to pickle; they stay in their process; send the plan, or report()")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"generation {self.generation}"
        return f"LiveGroups(rank {self.rank} of {self.world_size}, {state}: {' '.join(self._handles)})"


def _check_axes(axes: tuple[str, ...]) -> None:
    if not axes or len(set(axes)) < len(axes):
        raise ConnectError(
            f"received the axes {axes} for a device mesh; it has one axis or more, each once; "
            "name them, such as device_mesh('dp', 'tp')",
            axes=axes,
        )


def _destroy(pg: ProcessGroup) -> RuntimeError | None:
    """Destroy one process group; its error, so that the others can still be destroyed."""
    try:
        torch_private.destroy(pg)
    except RuntimeError as error:
        return error
    return None


def _failure(rank: int, own: OwnGroup, error: Exception) -> ConnectError:
    """Which group could not be made, which of its members came and which did not, where the backend tells."""
    seen = tuple(getattr(error, "seen", ()))
    unseen = tuple(member for member in own.ranks if member not in seen) if seen else ()
    who = (
        f"of its members {_listed(seen)} came and {_listed(unseen)} did not"
        if unseen
        else (f"its members are {_listed(own.ranks)}")
    )
    return ConnectError(
        f"rank {rank}: the process group of {own} could not be made ({_first_line(error)}); {who}; "
        "look at the logs of the members for the one that failed first",
        rank=rank,
        group=own.name,
        ranks=own.ranks,
        seen=seen,
        missing=unseen,
    )


def _listed(ranks: tuple[int, ...]) -> str:
    return f"{list(ranks[:_SHOWN])}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
