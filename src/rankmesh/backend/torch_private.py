"""Every private or version-dependent call into torch. Known on: torch 2.13 and 2.14.

```
default_group()      the initialised world: rank, size, store, backend, timeout
create(...)          a process group of given members under a given name, made by its members alone
register_alone(...)  the same for a group of one rank (``alone.py``)
destroy(pg)          undo either, leaving torch's registries as they were
registries()         what torch has registered now
recorded(...)        what the flight recorder has kept
make_on_thread       who makes the process groups of threads that are ranks (``torch_threads``)
```

Why private calls: ``torch.distributed.new_group`` sorts the ranks, names the group by a counter that differs between
ranks, and connects every pair of members at once. The pieces that it is made of do none of this.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch._C._distributed_c10d as c10d_native
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    HashStore,
    PrefixStore,
    Work,
    _register_process_group,
)
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from rankmesh.core.options import Options
from rankmesh.errors import ConnectError, PlanError, first_line
from rankmesh.rendezvous.waiting import come

__all__ = [
    "KNOWN_VERSIONS",
    "DefaultGroup",
    "GlooDevices",
    "Making",
    "Unjoined",
    "connects_at_once",
    "create",
    "decline_split",
    "default_group",
    "default_pg",
    "describe",
    "destroy",
    "device_mesh",
    "finished",
    "flatten",
    "frames_are_ready",
    "is_registered",
    "make_on_thread",
    "nccl_options",
    "options_of",
    "premultiplied",
    "recorded",
    "register",
    "register_alone",
    "registered",
    "registries",
    "set_timeout",
    "symmetric_memory",
    "under_way",
]

KNOWN_VERSIONS = ("2.13", "2.14")

_MINOR = tuple(int(part) for part in torch.__version__.split(".")[:2])

if ".".join(map(str, _MINOR)) not in KNOWN_VERSIONS:
    warnings.warn(
        f"torch {torch.__version__} is installed; rankmesh was tried on {' and '.join(KNOWN_VERSIONS)}, and uses parts "
        "of torch.distributed that other releases may have changed; run rankmesh check on a small layout first",
        stacklevel=2,
    )

# Set while threads of this process are ranks: makes their process groups, and gives None on other threads.
make_on_thread: Callable[..., Any] | None = None

_DEVICES = ("cpu", "cuda")

# A pair waits this often for its peer before it gives up, each time as long as its group was given.
_CONNECT_TRIES = 5

# Gloo groups up to this size connect all pairs when they are made; docs/decisions.md has the figures.
_CONNECTED_AT_ONCE = 16


@dataclass(frozen=True)
class DefaultGroup:
    """The default group of this process, ``store`` is None where the backend keeps none (MPI)."""

    rank: int
    size: int
    store: Any
    backend: str
    timeout: timedelta
    bound_device: torch.device | None

    @property
    def splits(self) -> bool:
        """Whether NCCL groups are split from the world's communicator, in which every rank of it takes part."""
        return self.bound_device is not None and "nccl" in self.backend

    def splits_for(self, backend: str | None) -> bool:
        """Whether a group of this backend, the world's by default, is split from the world's communicator."""
        return self.splits and "nccl" in (backend or self.backend)

    @property
    def dry(self) -> bool:
        """Whether this is a dry run: one process that plays one rank of a world that is not there."""
        return self.backend == "fake"


def default_pg() -> Any:
    """The process group of the initialised world; ``ConnectError`` where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConnectError(
            "received no initialised torch.distributed world; groups are made inside one; "
            "call torch.distributed.init_process_group() first, or start the program with torchrun"
        )
    return c10d._get_default_group()


def default_group() -> DefaultGroup:
    """What the initialised world is like; ``ConnectError`` where there is none."""
    default = default_pg()
    backend, store = c10d._world.pg_map[default]
    if backend == dist.Backend.UNDEFINED:  # a world that was asked for no backend has torch's choice for each device
        backend = c10d._world.pg_backend_config[default]
    return DefaultGroup(
        rank=default.rank(),
        size=default.size(),
        store=store,
        backend=str(backend),
        timeout=_timeout_of(default, str(backend)),
        bound_device=default.bound_device_id,
    )


def _timeout_of(pg: Any, backend: str) -> timedelta:
    """The timeout that the world was initialised with; torch's default where the backend does not keep it."""
    for device in pg._device_types:
        options = getattr(pg._get_backend(device), "options", None)
        if options is not None:
            return options._timeout  # type: ignore[no-any-return]
    return c10d._get_default_timeout(c10d.Backend(backend))


class Unjoined(RuntimeError):
    """A process group that did not come about in time; ``seen`` are the members that had come, by global rank."""

    def __init__(self, reason: str, seen: tuple[int, ...]) -> None:
        super().__init__(reason)
        self.seen = seen


class GlooDevices:
    """The gloo devices of one world: a socket that listens and a thread that polls it, each.

    Groups that connect at once share a device. One that connects late needs its own: pairs then find each other by a
    number that counts inside one group, so two groups on one device would answer each other's calls.
    """

    def __init__(self) -> None:
        self._shared: list[Any] = []

    def of(self, *, late: bool) -> list[Any]:
        """The devices for one more group."""
        if late:
            return _gloo_devices(late=True)
        if not self._shared:
            self._shared = _gloo_devices(late=False)
        return self._shared

    def release(self) -> None:
        """Keep no device; each ends with the last group on it."""
        self._shared = []


@dataclass(frozen=True)
class Making:
    """How a world makes groups: on which devices, from which store, and until when members may let it wait.

    ``deadline`` is in seconds of ``time.monotonic``.
    """

    devices: GlooDevices
    store: Any
    deadline: float

    @property
    def within(self) -> timedelta:
        """What is left until the deadline; a moment where nothing is, as torch takes zero for no limit."""
        return timedelta(seconds=max(self.deadline - time.monotonic(), 0.01))


def create(
    making: Making,
    *,
    ranks: Sequence[int],
    rank: int,
    name: str,
    desc: str,
    backend: str,
    timeout: timedelta,
    lazy: bool,
    options: Any = None,
) -> dist.ProcessGroup:
    """A process group of ``ranks`` in this order, made by its members alone and registered with torch.

    ``rank`` is this process's position in ``ranks``; ``lazy`` is a group whose members come at their own time, and
    wait for each other as long as ``timeout``; ``options`` are NCCL's. Raises ``Unjoined`` when a member does not come.
    """
    pg = None if make_on_thread is None else make_on_thread(ranks, name, desc, backend, making.store, meet=False)
    if pg is not None:
        return pg  # type: ignore[no-any-return]
    check_backend(backend)
    known = c10d.Backend(backend)
    kinds = set(_config(backend)[0].values())
    if kinds in ({"gloo"}, {"fake"}):
        prefix = PrefixStore(f"{name}/", making.store)
        pg = dist.ProcessGroup(prefix, rank, len(ranks))
        if kinds == {"gloo"}:
            _gloo(making, pg, prefix, ranks, rank, name, timeout, backend, lazy=lazy)
        else:
            _put_under(pg, FakeProcessGroup._create_internal(rank, len(ranks)), _config(backend)[0])
        pg._set_group_name(c10d.GroupName(name))
        pg._set_group_desc(desc)
        register(pg, known, prefix, c10d.GroupName(name))
    else:
        pg, _ = c10d._new_process_group_helper(
            len(ranks),
            rank,
            list(ranks),
            known,
            making.store,
            c10d.GroupName(name),
            backend_options=options,
            timeout=timeout,
            device_id=c10d._get_default_group().bound_device_id,
            group_desc=desc,
        )
    c10d._world.pg_group_ranks[pg] = _Positions(ranks)  # type: ignore[assignment]  # torch has a dict, and only reads
    return pg


class _Positions(Mapping[int, int]):
    """The position of each member by its global rank; all are listed when torch first asks for one."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    @cached_property
    def _listed(self) -> dict[int, int]:
        return {member: position for position, member in enumerate(self._ranks)}

    def __getitem__(self, rank: int) -> int:
        return self._listed[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._ranks)


def _put_under(pg: dist.ProcessGroup, made: Any, device_types: Iterable[str]) -> None:
    """Let a process group use torch's fake backend on these devices."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    pg._set_default_backend(kind)
    for device_type in device_types:
        pg._register_backend(torch.device(device_type), kind, made)


@cache
def _config(backend: str) -> tuple[dict[str, str], str]:
    """The backend of each device type, and the same in torch's words; torch reads the text anew for each group."""
    config = c10d.BackendConfig(c10d.Backend(backend))
    return dict(config.get_device_backend_map()), str(config)


@cache
def check_backend(backend: str) -> None:
    """Refuse a backend that this torch does not know, or was built without (``PlanError``, ``ConnectError``)."""
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        known = [word for word in dist.Backend.backend_list if word != dist.Backend.UNDEFINED]
        if name not in known and name != "fake":
            raise PlanError(
                f"received backend {backend!r}; this torch knows {', '.join(known)}; use one of them, or a pair such "
                "as 'cpu:gloo,cuda:nccl'",
                backend=backend,
            )
        if not _BUILT.get(name, dist.is_available)():
            raise ConnectError(
                f"received backend {backend!r}; this torch was built without {name}; use another backend, or install "
                "a torch that has it",
                backend=backend,
            )


_BUILT = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
}


def _gloo(
    making: Making,
    pg: dist.ProcessGroup,
    prefix: Any,
    ranks: Sequence[int],
    rank: int,
    name: str,
    timeout: timedelta,
    backend: str,
    *,
    lazy: bool,
) -> None:
    """Put gloo under a process group, whose pairs connect now, or when they first talk."""
    late = lazy or len(ranks) > _CONNECTED_AT_ONCE
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    options = _gloo_options(making.devices.of(late=late), timeout / _CONNECT_TRIES if late else making.within)
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    addresses = PrefixStore("gloo/", prefix)
    try:
        with _addresses_in_one_answer(making.store, options._timeout):
            made = c10d.ProcessGroupGloo(addresses, rank, len(ranks), options)
        if lazy:
            _await(addresses, len(ranks), timeout)
    except RuntimeError as error:
        raise Unjoined(str(error), _seen(addresses, ranks)) from error
    made._set_default_timeout(timeout)
    if _MINOR < (2, 14):  # from then on they always start at zero
        made._set_sequence_number_for_group()
    for device_type in _config(backend)[0]:
        pg._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.GLOO, made)


@contextmanager
def _addresses_in_one_answer(store: Any, within: timedelta) -> Iterator[None]:
    """Have gloo read the addresses of all members with one operation, where the store can give them so.

    A store that is asked for many keys waits as long as it waits by default, so this is the limit meanwhile.
    """
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    before = store.timeout
    store.set_timeout(within)
    try:
        yield
    finally:
        store.set_timeout(before)


def connects_at_once(backend: str, size: int, lazy: bool | None) -> bool:
    """Whether a group of this backend and size is one whose pairs gloo connects when it is made."""
    if make_on_thread is not None or lazy or not 1 < size <= _CONNECTED_AT_ONCE:
        return False
    return set(_config(backend)[0].values()) == {"gloo"}


def _gloo_options(devices: list[Any], timeout: timedelta) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._devices, options._threads, options._timeout = devices, 1, timeout
    return options


def _await(addresses: Any, size: int, timeout: timedelta) -> None:
    """Wait until all members are there, so that one that never comes is named here, not at some later collective."""
    if not come(addresses, [f"0/{position}" for position in range(size)], timeout.total_seconds()):
        raise RuntimeError(f"not all of its members asked for it within {timeout.total_seconds():g} s")


def _seen(addresses: Any, ranks: Sequence[int]) -> tuple[int, ...]:
    """The members whose addresses are in the store; none where the store does not answer."""
    try:
        return tuple(member for position, member in enumerate(ranks) if addresses.check([f"0/{position}"]))
    except RuntimeError:
        return ()


def _gloo_devices(*, late: bool) -> list[Any]:
    """The interfaces that GLOO_SOCKET_IFNAME names, as for the world; else the one that the host's name stands for."""
    gloo = c10d.ProcessGroupGloo
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name, lazy_init=late) for name in named] or [
        gloo.create_default_device(lazy_init=late)
    ]


def decline_split(bound_device: torch.device) -> None:
    """Take part in a split of the world's communicator as a rank that is in none of the new groups."""
    source = c10d._get_split_source(c10d._get_default_group())
    if source is not None:
        source.perform_nocolor_split(bound_device)


class _Finished(Work):
    """Work that is done; torch's own work over a future cannot be waited for with a time limit."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It was."""
        return True

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that holds the tensors."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def finished(tensors: list[torch.Tensor]) -> dist.Work:
    """Work that is done, whose future holds these tensors."""
    work: dist.Work = _Finished(tensors)
    return work


def premultiplied(operation: Any) -> Any:
    """The factor of a scaled sum, which torch keeps where only pickling shows it; None for any other reduction."""
    scaled = dist.ReduceOp.RedOpType.PREMUL_SUM  # type: ignore[attr-defined]  # absent from torch's stubs
    if operation is None or operation != scaled:
        return None
    return operation.__getstate__()[1]


def register_alone(pg: dist.ProcessGroup, *, rank: int, name: str, desc: str, backend: str) -> None:
    """Put torch's fake backend under a process group of one rank, and register it."""
    _put_under(pg, FakeProcessGroup._create_internal(0, 1), _DEVICES)
    pg._set_group_name(c10d.GroupName(name))
    pg._set_group_desc(desc)
    register(pg, c10d.Backend(backend), HashStore(), c10d.GroupName(name))
    c10d._world.pg_group_ranks[pg] = {rank: 0}


def register(pg: Any, backend: Any, store: Any, name: Any) -> None:
    """Enter a process group in torch's registries."""
    tag = f"ptd:{name}"
    c10d._world.pg_map[pg] = (backend, store)
    c10d._world.pg_names[pg] = name
    c10d._world.pg_backend_config[pg] = _config(backend)[1]
    c10d._world.pg_to_tag[pg] = tag
    c10d._world.tags_to_pg.setdefault("", []).append(pg)
    c10d._world.tags_to_pg.setdefault(tag, []).append(pg)
    _register_process_group(name, pg)


def destroy(pg: dist.ProcessGroup) -> None:
    """Destroy a group of ``create`` or ``alone``; a world that was destroyed before took it along already."""
    if pg not in c10d._world.pg_map:
        return
    tag = c10d._world.pg_to_tag.get(pg)
    backend, store = c10d._world.pg_map[pg]
    position, size = pg.rank(), pg.size()
    dist.destroy_process_group(pg)
    if size > 1 and set(_config(str(backend))[0].values()) == {"gloo"}:
        _take_back(store, position)
    # torch leaves the empty list of the tag behind, one for each group ever made.
    if tag is not None and not c10d._world.tags_to_pg.get(tag, True):
        del c10d._world.tags_to_pg[tag]


def _take_back(store: Any, position: int) -> None:
    """Delete the address under which this member of a gloo group was found, as far as the store still answers."""
    with suppress(RuntimeError):
        PrefixStore("gloo/", store).delete_key(f"0/{position}")


def registries() -> dict[str, int]:
    """How many entries each of torch's registries of process groups has."""
    named = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state")
    sizes = {name: len(getattr(c10d._world, name)) for name in named}
    sizes["tags_to_pg"] = sum(1 + len(groups) for groups in c10d._world.tags_to_pg.values())
    return sizes | {"group_count": c10d._world.group_count}


def recorded(*, frames: bool = True) -> tuple[bytes, ...]:
    """What torch's flight recorders have kept, as pickles: that of gloo and, in a torch with NCCL, that of NCCL."""
    nccl = getattr(c10d_native, "_dump_nccl_trace", None)
    generic = c10d_native._dump_fr_trace(True, frames, False)  # type: ignore[attr-defined]
    return (generic,) if nccl is None else (generic, nccl(True, frames, False))


def under_way() -> list[dict[str, Any]]:
    """The unfinished calls that the recorders have; reading a full one takes some 40 ms, in which no call is made."""
    return _calls_kept(active=True)


def unfinished() -> dict[tuple[int, str], str]:
    """The groups with collectives under way, by recorder and number, and the last that came through; takes 10 µs."""
    status = (
        ((number, group), about)
        for number, kept in enumerate(_recorders(calls=False, active=True))
        for group, about in (kept.get("pg_status") or {}).items()
    )
    last = "last_completed_collective"
    return {group: about[last] for group, about in status if about[last] != about["last_enqueued_collective"]}


def _calls_kept(*, active: bool) -> list[dict[str, Any]]:
    return [entry for kept in _recorders(calls=True, active=active) for entry in kept.get("entries") or ()]


def _recorders(*, calls: bool, active: bool) -> list[dict[str, Any]]:
    """What the flight recorders of gloo and of NCCL say of their groups and, where asked, of calls."""
    nccl = getattr(c10d_native, "_dump_nccl_trace_json", None)
    generic = c10d_native._dump_fr_trace_json(calls, active)  # type: ignore[attr-defined]
    return [json.loads(data) for data in ((generic,) if nccl is None else (generic, nccl(calls, active)))]


def calls_made(group: str = "") -> int:
    """How many calls this rank has made on the group of this name, or on all, as far as backends count them.

    Gloo counts what two members exchange as well, NCCL collectives alone.
    """
    named = list(c10d._world.pg_names.items())
    return sum(_calls_made(pg) for pg, name in named if not group or str(name) == group)


def _calls_made(pg: Any) -> int:
    made: dict[int, int] = {}
    for device in pg._device_types:
        with suppress(RuntimeError):  # a backend that does not count, or a group that ends
            backend = pg._get_backend(device)
            made[id(backend)] = backend._get_sequence_number_for_group()
    return sum(made.values())


def last_call() -> int:
    """When this rank made the last call that the recorders have, in nanoseconds since the epoch; 0 for none."""
    return max((int(entry["time_created_ns"]) for entry in _calls_kept(active=False)), default=0)


def frames_are_ready() -> bool:
    """Whether frames can be had at once: to name them torch loads its compiler first, which takes seconds."""
    return "torch._inductor.standalone_compile" in sys.modules


def registered(known: Collection[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The process groups of this rank that are not ``known``: name, description, members by position."""
    found = {}
    for pg, name in list(c10d._world.pg_names.items()):
        positions = c10d._world.pg_group_ranks.get(pg)
        if positions and str(name) not in known:
            found[str(name)] = pg.group_desc, tuple(sorted(positions, key=positions.__getitem__))
    return found


def nccl_options(wanted: Options, backend: str) -> Any:
    """``ProcessGroupNCCL.Options`` for these options, None where nothing is asked of NCCL, and in a dry run.

    Raises ``PlanError`` for NCCL options on a backend that has none, and for a field unknown to this torch.
    """
    asked = dict(wanted.nccl or ())
    if backend == "fake" or (not asked and wanted.high_priority is None and wanted.sharp is None):
        return None
    if "nccl" not in backend:
        raise PlanError(
            f"received NCCL options ({wanted}) for a group of backend {backend!r}; they mean nothing there; "
            "remove them, or give the group backend='nccl'",
            backend=backend,
        )
    check_backend(backend)
    options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=bool(wanted.high_priority))
    if wanted.sharp is not None:
        asked["collnet_enable"] = int(wanted.sharp)
    known = sorted(name for name in dir(options.config) if not name.startswith("_"))
    for name, value in asked.items():
        if name not in known:
            raise PlanError(
                f"received NCCL option {name!r}; this torch knows {', '.join(known)}; use one of them",
                option=name,
                known=known,
            )
        try:
            setattr(options.config, name, value)
        except TypeError as error:
            raise PlanError(
                f"received {value!r} for NCCL option {name!r}; this torch takes another type there; {error}",
                option=name,
                received=value,
            ) from error
    return options


def device_mesh(
    groups: list[dist.ProcessGroup], ranks: Any, axes: tuple[str, ...], device_type: str | None
) -> DeviceMesh:
    """A ``DeviceMesh`` over process groups that exist; ``ranks`` has one axis for each of them."""
    kind = device_type or ("cuda" if "nccl" in dist.get_backend(groups[0]) else "cpu")
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=axes)
    return DeviceMesh.from_group(groups, kind, mesh=torch.tensor(ranks), mesh_dim_names=axes)


def unfold(
    root: DeviceMesh, axes: tuple[str, ...], sizes: tuple[int, ...], groups: Sequence[dist.ProcessGroup | None]
) -> DeviceMesh:
    """A mesh of these dimensions over the ranks of a mesh of one, over groups that exist; None: there is none."""
    made = DeviceMesh(
        root.device_type,
        _layout=type(root._layout).from_sizes_strides(sizes),
        _rank_map=root._rank_map,
        mesh_dim_names=axes,
        _root_mesh=root,
        _init_backend=False,
    )
    root._pg_registry.update({pg.group_name: pg for pg in groups if pg is not None})
    made._dim_group_names = [c10d.GroupName("") if pg is None else pg.group_name for pg in groups]
    return made


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str, pg: dist.ProcessGroup) -> DeviceMesh:
    """Give a ``DeviceMesh`` the dimension ``name``: its dimensions ``axes`` joined, over a group that exists."""
    root = mesh._get_root_mesh()
    layout = mesh[axes]._layout
    joined = DeviceMesh(
        mesh.device_type,
        _layout=type(layout)([layout.collapse()]),
        _rank_map=root._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=root,
        _init_backend=False,
    )
    joined._dim_group_names = [pg.group_name]
    root._pg_registry[pg.group_name] = pg
    root._flatten_mapping[name] = joined
    return joined


def is_registered(name: str) -> bool:
    """Whether torch has a process group of this name now."""
    return name in c10d._world.pg_names.values()


def describe(pg: dist.ProcessGroup, text: str) -> None:
    """Give a process group the description that torch's logs show."""
    pg._set_group_desc(text)


def options_of(given: Any) -> Options:
    """The ``Options`` that a ``ProcessGroupNCCL.Options`` stands for: the fields that are not as NCCL has them."""
    check_backend("nccl")
    plain = c10d.ProcessGroupNCCL.Options()
    if not isinstance(given, type(plain)):
        raise PlanError(f"received pg_options {given!r}; give ProcessGroupNCCL.Options, or none", received=given)
    fields = [name for name in dir(plain.config) if not name.startswith("_")]
    changed = {
        name: getattr(given.config, name)
        for name in fields
        if getattr(given.config, name) != getattr(plain.config, name)
    }
    high_priority = given.is_high_priority_stream or None
    timeout = None if given._timeout == plain._timeout else given._timeout
    return Options(nccl=changed or None, high_priority=high_priority, timeout=timeout)


def set_timeout(pg: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the timeout of a process group, None the world's; a group without communicator keeps none."""
    group = c10d._get_default_group() if pg is None else pg
    if group.size() > 1 and "fake" not in str(c10d._world.pg_map[group][0]):
        c10d._set_pg_timeout(timeout, group)


def symmetric_memory(size: int, pg: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """``size`` bytes that every GPU of the group maps, and their handle; ``ConnectError`` where there can be none."""
    if not torch.cuda.is_available():
        raise ConnectError("symmetric memory is memory of GPUs, and there is none here; use another buffer")
    import torch.distributed._symmetric_memory as symmetric

    try:
        memory = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return memory, symmetric.rendezvous(memory, pg)
    except RuntimeError as error:
        first = first_line(error)
        raise ConnectError(
            f"the {pg.size()} GPUs of the group share no symmetric memory ({first}); it needs NVLink between them all"
        ) from error
