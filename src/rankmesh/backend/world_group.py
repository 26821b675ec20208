"""A default group that can be left while it is being made: for worlds that follow each other in one process.

``init_process_group`` holds its caller until every pair of members is connected or the timeout is over, also where a
member has died meanwhile. Here the part that waits has its own call, which a thread makes that may be left behind; only
the part after it enters torch's registries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from rankmesh.backend import registries
from rankmesh.backend.drain import Drain
from rankmesh.backend.gloo import GlooDevices, put_gloo_under
from rankmesh.backend.options import config, kinds_of
from rankmesh.errors import PlanError, in_words

__all__ = ["WorldGroup"]

_Made = TypeVar("_Made")

_NAME = "0"


class WorldGroup:
    """The default group of one world, of ``size`` members over a store of its own.

    Over gloo up to ``eager_size`` members connect when it is made, and a call may take as long as ``timeout``; what is
    cut goes to ``drain``.
    """

    def __init__(
        self,
        backend: str,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        eager_size: int,
        drain: Drain | None,
    ) -> None:
        self._backend, self._store, self._timeout, self._eager_size = backend, store, timeout, eager_size
        self._rank, self._size = rank, size
        self._devices = GlooDevices(drain)
        self._made: dist.ProcessGroup | None = None
        self._make_group: Any = None
        self._make_mesh: Any = None

    def make(self, within: timedelta) -> None:
        """Connect the members, as far as the backend does so at once; on any thread."""
        if kinds_of(self._backend) != {"gloo"}:
            return
        pg = dist.ProcessGroup(self._store, self._rank, self._size)
        put_gloo_under(
            pg,
            self._devices,
            self._store,
            ranks=range(self._size),
            rank=self._rank,
            name=_NAME,
            timeout=self._timeout,
            within=within,
            eager_size=self._eager_size,
            lazy=False,
            device_types=list(config(self._backend)[0]),
        )
        self._made = pg

    def install(self, calling: int | None = None) -> None:
        """Make it torch's default group; refuse groups with ranks from ``calling`` on, which do not make them."""
        make = c10d._new_process_group_helper
        if self._made is None:
            how = {"store": self._store, "rank": self._rank, "world_size": self._size, "pg_options": self._lazily()}
            dist.init_process_group(self._backend, **how)
            if calling is None:
                return
        else:
            ranks = {rank: rank for rank in range(self._size)}
            registries.register(self._made, self._backend, self._store, _NAME, "default_pg", ranks)
            c10d._update_default_pg(self._made)
            # Torch numbers the groups that it names, and this is the first of them.
            c10d._world.group_count = max(c10d._world.group_count, int(_NAME) + 1)
        self._make_group = make
        observed = self._devices.observing(make)
        c10d._new_process_group_helper = observed if calling is None else _refusing(observed, calling)
        if calling is not None:
            self._make_mesh = DeviceMesh.__init__
            DeviceMesh.__init__ = _refusing_meshes(self._make_mesh, calling)  # type: ignore[method-assign]

    def _lazily(self) -> Any:
        """Options by which NCCL connects at the first call, as it does before torch 2.15: whoever installs it waits."""
        made: Any = c10d.ProcessGroupNCCL.Options() if self._backend == "nccl" else None
        if not hasattr(made, "lazy_init"):
            return None
        made.lazy_init = True
        return made

    def leave(self) -> None:
        """Leave what torch makes of groups alone; calling it again is nothing."""
        if self._make_group is not None:
            c10d._new_process_group_helper = self._make_group
            self._make_group = None
        if self._make_mesh is not None:
            DeviceMesh.__init__ = self._make_mesh  # type: ignore[method-assign]
            self._make_mesh = None

    def cut(self) -> None:
        """End every connection of gloo's: calls that wait for a member return with an error.

        Those of groups that torch made in this world, too, as ``torch.distributed.new_group`` does.
        """
        self._devices.cut()


def _refusing(make: Callable[..., _Made], calling: int) -> Callable[..., _Made]:
    """Return the function that makes torch's groups, without those that a rank waits for which never makes them."""

    @wraps(make)
    def refused(size: int, rank: int, ranks: Sequence[int], *args: Any, **named: Any) -> _Made:
        _refuse(ranks, calling)
        return make(size, rank, ranks, *args, **named)

    return refused


def _refusing_meshes(make: Callable[..., None], calling: int) -> Callable[..., None]:
    """Return what makes a ``DeviceMesh``: one of all the world takes the default group, and makes none."""

    @wraps(make)
    def refused(mesh: DeviceMesh, *args: Any, **named: Any) -> None:
        make(mesh, *args, **named)
        if int(mesh.mesh.max()) >= calling:
            _refuse(mesh.mesh.flatten().tolist(), calling)

    return refused


def _refuse(ranks: Sequence[int], calling: int) -> None:
    if spares := [one for one in ranks if one >= calling]:
        raise PlanError(
            f"torch was asked for a group with {in_words(spares)}, a spare, which does not call new_group(); give "
            f"new_group() ranks of the plan, such as range({calling}), and a DeviceMesh their number",
            ranks=tuple(spares),
        )
