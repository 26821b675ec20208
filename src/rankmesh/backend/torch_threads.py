"""Threads as ranks: each has registries of torch.distributed of its own. Known on the releases of ``versions``.

```
answer_threads(...)        from now on, until its result is called, torch.distributed answers each thread for its rank
registries_by_thread()     while ranks run: torch's C++ finds process groups by name for each thread alone
begin_world, end_world     the world of one rank, on its thread
simulated(...)             one more process group of it
```

Torch has hooks for this, for tests of its own: the object with its registries can be replaced, its C++ registry can be
one for each thread, a process group may be written in Python, and a DeviceMesh can tell one thread's meshes from
another's. Its own backend on top of them (``multi_threaded_pg``) is not used: it checks no call against another, waits
for ever where one is missing, and lacks many operations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]  # some are absent from torch's stubs
    PrefixStore,
    Store,
    _set_global_rank,
    _set_thread_isolation_mode,
    _unregister_all_process_groups,
)
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from rankmesh.backend.members import MemberBackend
from rankmesh.backend.protocol import GroupRequest
from rankmesh.backend.registries import register
from rankmesh.errors import ConnectError

__all__ = [
    "Rank",
    "RankWorld",
    "ThreadBackend",
    "answer_threads",
    "begin_world",
    "end_world",
    "is_rank",
    "registries_by_thread",
    "simulated",
    "this_rank",
    "version",
]


def version(tensor: torch.Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 if torch does not count them."""
    return 0 if tensor.is_inference() else tensor._version


class RankWorld(c10d._World):
    """Torch's registries for one of several ranks in one process: torch's own class, without its globals."""

    # Properties over globals of the process in torch, attributes of each rank here.
    group_count: Any = 0
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self) -> None:
        super().__init__()
        for name in _IN_GLOBALS:
            setattr(self, name, {})


_IN_GLOBALS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


class Rank(Protocol):
    """A thread that is a rank, and the answers of torch.distributed to it; ``world`` has its registrations."""

    world: RankWorld

    @property
    def identity(self) -> object:
        """Return the key that separates this rank's device meshes from the others' meshes."""

    @property
    def is_observed(self) -> bool:
        """Return whether an observer sees the calls: then each kind has its own process group, also on one rank."""

    def make(self, name: str, ranks: Sequence[int], desc: str, *, meet: bool) -> dist.ProcessGroup:
        """Return a process group of these ranks; with ``meet`` its members wait for each other."""

    def rendezvous(self) -> tuple[Store, int, int]:
        """Return store, rank and world size, for a rank that initialises the world itself."""

    def refuse(self, operation: str) -> None:
        """Raise for a call on a group that this rank is not in."""


def this_rank() -> Rank | None:
    """Return the rank that this thread is, None for any other thread."""
    worlds: Any = c10d._world
    return worlds.this_rank() if isinstance(worlds, _Worlds) else None


def is_rank() -> bool:
    """Return whether this thread is a rank."""
    return this_rank() is not None


def answer_threads(current: Callable[[], Rank | None]) -> Callable[[], None]:
    """From now on torch.distributed answers each thread that is a rank for that rank alone; the way back.

    ``current`` returns the rank that the calling thread is.
    """
    hooks: dict[str, Callable[[Any], object]] = {
        "_world": lambda original: _Worlds(original, current),
        "_new_process_group_helper": _maker,
        "_warn_not_in_group": lambda original: _for_ranks(original, lambda rank, operation: rank.refuse(operation)),
        "rendezvous": lambda original: _for_ranks(original, lambda rank, *_, **__: iter([rank.rendezvous()])),
    }
    before: dict[str, object] = {name: getattr(c10d, name) for name in hooks}
    describe = c10d_logger._get_msg_dict
    # Torch compares meshes by what their process sees; two ranks of one process must not take each other's.
    DeviceMesh._thread_id = _MeshIdentity()  # type: ignore[assignment]  # torch has an int or None
    vars(c10d).update({name: hook(before[name]) for name, hook in hooks.items()})
    # For its log torch asks for the backend of the group that a call failed on, and fails where the group is gone.
    c10d_logger._get_msg_dict = _for_ranks(describe, lambda _, name, *__, **___: {"func_name": name})

    def back() -> None:
        vars(c10d).update(before)
        c10d_logger._get_msg_dict = describe
        del DeviceMesh._thread_id

    return back


@contextmanager
def registries_by_thread() -> Iterator[None]:
    """Inside, torch finds process groups by name for each thread alone; the process's own state is back after it."""
    hook = sys.excepthook
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        outside = c10d._world.default_pg
        _set_global_rank(-1 if outside is None else outside.rank())
        sys.excepthook = hook


class _Worlds:
    """Torch's registrations: of the rank that this thread is, else the process's own."""

    def __init__(self, outside: c10d._World, current: Callable[[], Rank | None]) -> None:
        vars(self).update(_outside=outside, this_rank=current)

    def __getattr__(self, name: str) -> Any:
        rank = self.this_rank()
        if rank is not None and name == "default_pg" and _is_being_imported(sys._getframe(1)):
            # `def f(group=dist.group.WORLD)` in a module that a rank imports first would keep that rank's world.
            return None
        return getattr(self._outside if rank is None else rank.world, name)

    def __setattr__(self, name: str, value: object) -> None:
        rank = self.this_rank()
        setattr(self._outside if rank is None else rank.world, name, value)


def _is_being_imported(property_: FrameType) -> bool:
    """Return whether the body of a module, or of a class in it, uses the world while the module is imported."""
    caller = property_.f_back
    return property_.f_code.co_name == "WORLD" and any(
        frame is not None
        and frame.f_code.co_name == "<module>"
        and getattr(frame.f_globals.get("__spec__"), "_initializing", False)
        for frame in (caller, caller and caller.f_back)
    )


class _MeshIdentity:
    """An attribute of DeviceMesh that torch sets to None, and compares."""

    def __get__(self, mesh: DeviceMesh | None, kind: type) -> object:
        return None if mesh is None else vars(mesh).get("_thread_id")

    def __set__(self, mesh: DeviceMesh, value: object) -> None:
        rank = this_rank()
        vars(mesh)["_thread_id"] = value if rank is None else rank.identity


def _for_ranks(original: Callable[..., object], instead: Callable[..., object]) -> Any:
    def hook(*arguments: object, **named: object) -> object:
        rank = this_rank()
        return original(*arguments, **named) if rank is None else instead(rank, *arguments, **named)

    return hook


def _maker(original: Callable[..., object]) -> Callable[..., object]:
    """Return torch's maker of process groups, which asks the simulation for the groups of ranks."""

    def hook(
        size: int, rank: int, members: Sequence[int], backend: Any, store: Store, name: Any, *rest: object, **more: Any
    ) -> object:
        if not is_rank():
            return original(size, rank, members, backend, store, name, *rest, **more)
        if name in c10d._world.pg_names.values():
            raise ValueError(f"the group name {name!r} is in use; give each group a name of its own")
        if members and dist.get_rank() not in members:
            return c10d.GroupMember.NON_GROUP_MEMBER, None
        desc = more.get("group_desc") or "undefined"
        meet = bool(members) and "gloo" in c10d.BackendConfig(backend).get_device_backend_map().values()
        pg = simulated(members or range(size), str(name), desc, backend, store, meet=meet)
        return pg, c10d._world.pg_map[pg][1]

    return hook


def simulated(
    ranks: Sequence[int], name: str, desc: str, backend: str, store: Store, *, meet: bool
) -> dist.ProcessGroup:
    """Return a process group of this thread's rank, registered; the thread is a rank."""
    members, this = tuple(ranks), this_rank()
    if this is None:
        raise ConnectError(f"group {name!r} is one of simulated ranks, and this thread is not one")
    pg = this.make(name, members, desc, meet=meet)
    register(pg, backend, PrefixStore(f"{name}/", store), name, desc, _positions(members))
    return pg


@lru_cache(maxsize=256)
def _positions(members: tuple[int, ...]) -> dict[int, int]:
    """Return the position of each member, one dict for all ranks of a group: torch only reads it."""
    return {member: position for position, member in enumerate(members)}


class ThreadBackend(MemberBackend):
    """The groups of a simulated rank."""

    def create(self, request: GroupRequest, deadline: float) -> dist.ProcessGroup:
        """Return the group, whose members are threads of this process; one of one rank where its calls are observed."""
        if len(request.ranks) == 1 and self.shares:
            return super().create(request, deadline)
        return simulated(
            request.ranks, request.name, request.desc, request.kind.backend, self._default.store, meet=False
        )

    @property
    def shares(self) -> bool:
        """Not where calls are observed, and each has to tell its kind of group."""
        this = this_rank()
        return this is None or not this.is_observed

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Not here: a simulation ends a call that cannot complete."""
        raise ConnectError("simulated groups have no connections to abort; the simulation reports a call that hangs")


def begin_world(size: int, backend: str, store: Store) -> None:
    """Give this thread's rank its world."""
    pg = simulated(range(size), "0", "default_pg", backend, store, meet=False)
    c10d._world.group_count = 1
    c10d._world.pg_map[pg] = (c10d.Backend(backend), store)
    c10d._update_default_pg(pg)


def end_world(world: RankWorld) -> None:
    """Forget everything that this thread's rank has registered, and leave nothing for the thread's end."""
    for registered in vars(world).values():
        if isinstance(registered, dict | list):
            registered.clear()
    world.default_pg = None
    _unregister_all_process_groups()
