"""A default group that can be left while it is being made: for worlds that follow each other in one process.

``init_process_group`` holds its caller until every pair of members is connected or the timeout is over, also where a
member has died meanwhile. Here the part that waits has its own call, which a thread makes that may be left behind; only
the part after it enters torch's registries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from rankmesh.backend import registries
from rankmesh.backend.cut import Drain
from rankmesh.backend.gloo import GlooDevices, put_gloo_under
from rankmesh.backend.options import config, kinds_of
from rankmesh.errors import PlanError, in_words

__all__ = ["WorldGroup"]

_NAME = "0"

_Function = TypeVar("_Function", bound=Callable[..., object])
# Torch's maker of process groups.
_Maker = Callable[..., tuple[dist.ProcessGroup, object]]


class WorldGroup:
    """The default group of one world, of ``size`` members over a store of its own.

    Over gloo up to ``eager_size`` members connect when it is made, and a call may take as long as ``timeout``; what is
    cut goes to ``drain``.
    """

    def __init__(
        self,
        backend: str,
        store: Store,
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
        self._replaced: list[_Replaced] = []

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
        self._replaced.append(_Replaced(c10d, "_new_process_group_helper", partial(self._observing, calling)))
        if calling is not None:
            self._replaced.append(_Replaced(DeviceMesh, "__init__", partial(_refusing_meshes, calling)))

    def _observing(self, calling: int | None, make: _Maker) -> _Maker:
        """Return the function that makes torch's groups: it refuses spares, and knows the connections of each group."""

        @wraps(make)
        def observed(
            size: int, rank: int, ranks: Sequence[int], *args: object, **named: object
        ) -> tuple[dist.ProcessGroup, object]:
            if not self._replaced:  # the world is left
                return make(size, rank, ranks, *args, **named)
            if calling is not None:
                _refuse(ranks, calling)
            made = make(size, rank, ranks, *args, **named)
            if (place := registries.place_of(made[0])) is not None:
                # One backend for several devices is made for the first of them.
                parts = [PrefixStore(f"{device}/", place[1]) for device in config(place[0])[0]]
                key = f"0/{rank}"
                self._devices.published.update(part.get(key) for part in parts if part.check([key]))
            return made

        return observed

    def _lazily(self) -> Any:
        """Options by which NCCL connects at the first call, as it does before torch 2.15: whoever installs it waits."""
        made: Any = c10d.ProcessGroupNCCL.Options() if self._backend == "nccl" else None
        if not hasattr(made, "lazy_init"):
            return None
        made.lazy_init = True
        return made

    def leave(self) -> None:
        """Put torch's own functions back; calling it again does nothing."""
        while self._replaced:
            self._replaced.pop().restore()

    def cut(self) -> None:
        """End every connection of gloo's: calls that wait for a member return with an error.

        This includes groups that torch made in this world, such as by ``torch.distributed.new_group``.
        """
        self._devices.cut()


class _Replaced:
    """A function of torch in whose place another one is, until it is restored."""

    def __init__(self, owner: object, name: str, instead: Callable[[_Function], _Function]) -> None:
        self._owner, self._name, self._before = owner, name, getattr(owner, name)
        self._ours = instead(self._before)
        setattr(owner, name, self._ours)

    def restore(self) -> None:
        """Put the function back, unless somebody has replaced it since."""
        if getattr(self._owner, self._name) is self._ours:
            setattr(self._owner, self._name, self._before)


def _refusing_meshes(calling: int, make: Callable[..., None]) -> Callable[..., None]:
    """Return a function that makes a ``DeviceMesh``: a mesh of all the world uses the default group."""

    @wraps(make)
    def refused(mesh: DeviceMesh, /, *args: object, **named: object) -> None:
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
