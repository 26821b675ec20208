"""The world of this process: from its launcher to ranks that can talk, and back to nothing.

```
started_by()  ->  open_store()  ->  decide()            ->  init_process_group()  ->  LiveRank
who am I          rendezvous        all here, one device     the default group         close() undoes it
                                    for each, one backend
```
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.backend.default import default_pg
from rankmesh.core import lazy
from rankmesh.core.options import time_limit
from rankmesh.errors import ConnectError, StoreLost, at_caller, first_line, quoted
from rankmesh.launch.started import Launch, host_name, started_by
from rankmesh.launch.table import NO_LAUNCHER
from rankmesh.rendezvous import BoundedChannel, ChannelLost, Round, StoreChannel, gather_results
from rankmesh.runtime.devices import BackendDecision, Capabilities, capabilities, choose, decide
from rankmesh.runtime.served_store import is_served, open_store

__all__ = ["LiveRank", "device_of", "enter", "init", "together"]

# How long the ranks wait for each other by default.
_LIMIT = timedelta(seconds=300)
# How long the rank that serves the store stays for the others when all is done.
_FAREWELL, _LOOK = 30.0, 0.01
_KEYS = "rankmesh/init"


@dataclass(eq=False)
class LiveRank(AbstractContextManager["LiveRank"]):
    """This process as a rank of an initialised world: a context manager that leaves it.

    ``device`` is where this rank's tensors live, a GPU on every rank or on none; ``why`` is the reason.
    ``before_leaving`` is called first when the world is left, the last one first.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    host: str
    launcher: str
    device: torch.device
    backend: str
    why: str
    launch: Launch = field(repr=False)
    before_leaving: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _store: Store | None = field(default=None, repr=False)
    _farewell: str = field(default="", repr=False)
    _failed: bool = field(default=False, repr=False)
    _process: int = field(default_factory=os.getpid, init=False, repr=False)

    def close(self) -> None:
        """Leave the world: the default group is destroyed where ``init`` made it; calling it again is nothing.

        A forked child only forgets the world: its connections and threads belong to the parent.
        """
        if os.getpid() != self._process:
            return
        while self.before_leaving:
            self.before_leaving.pop()()
        store, self._store = self._store, None
        if store is None:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._farewell:
            _take_leave(store, self._farewell, self.rank, self.world_size, failed=self._failed)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._failed = kind is not None
        self.close()


def _check_main_module() -> None:
    """Raise if this process is a child of multiprocessing that imports the main module of its parent again."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__mp_main__"):
        frame = frame.f_back
    if frame is not None:
        raise ConnectError(
            "this process is not a rank: multiprocessing started it (a worker of a DataLoader, for example), and it "
            f"imports {frame.f_code.co_filename} again, line {frame.f_lineno} included; "
            'put what the file runs below `if __name__ == "__main__":`'
        )


@at_caller
def init(
    backend: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    record: bool | str | os.PathLike[str] = False,
) -> LiveRank:
    """Initialise ``torch.distributed`` for the ranks that the launcher started, or for one rank without a launcher.

    Every rank calls it. The default ``backend`` is NCCL if every rank has a GPU of its own, else gloo on all ranks.
    ``timeout`` (seconds, or a timedelta) limits the wait for other ranks here, 300 s by default, and in the world's
    collectives, where torch's default applies. A world that is already initialised, as in Ray's workers, is used as it
    is, and is not destroyed at the end. Only environment variables of the recorder are changed.

    ``record`` is True, or the folder for recordings: it records the calls of this rank with their source lines, and
    watches them. When a call takes longer than half of its group's timeout, every responsive rank writes its recording,
    and the log (``rankmesh.watch``) reports the diagnosis. The environment variables ``RANKMESH=watch`` and
    ``RANKMESH_RECORD`` (a folder) override ``record``. Either every rank records, or none does.

    Raises ``ConnectError`` if variables contradict each other, if the rendezvous address does not resolve or answer, if
    ranks request different backends, or if a rank has no device for the backend. Raises ``AgreementError`` with the
    ranks that did not arrive.
    """
    watched = bool(record or os.environ.get("RANKMESH") or os.environ.get("RANKMESH_RECORD"))
    start_watch = lazy.watch(record) if watched else list
    live = enter(backend=backend, timeout=timeout)
    live.before_leaving += start_watch()
    return live


def enter(
    launch: Launch | None = None, backend: str | None = None, timeout: float | timedelta | None = None
) -> LiveRank:
    """Join the world of a process that was started so: what ``rm.init`` does, without a watch.

    ``launch`` is read from the environment where it is not given.
    """
    _check_main_module()
    launch = launch or _started()
    limit = None if timeout is None else time_limit(timeout)
    _check_backend(backend)
    if dist.is_initialized():
        default_pg()  # raises in a forked child
        return _joined(launch, backend)
    local = capabilities(launch, backend)
    launch, store, among, decision = together(launch, local, limit or _LIMIT)
    prefix = f"{_KEYS}/{launch.attempt}/{0 if among is None else among.epoch}"
    backend, device = str(decision.backend), device_of(str(decision.backend), local)
    if decision.note and launch.rank == 0:
        warnings.warn(decision.note, RuntimeWarning, stacklevel=4)

    def initialise() -> None:
        if device.type == "cuda":  # each thread has a current one of its own
            torch.cuda.set_device(device)
        _initialise(launch, backend, PrefixStore(f"{prefix}/world", store), limit)

    if among is None:
        initialise()
    else:
        try:
            gather_results(among, initialise, len, (limit or _LIMIT).total_seconds(), "init()", undo=_destroy)
        except StoreLost as error:
            if launch.rank == 0 or is_served():
                raise
            raise _rank_0_ended(launch) from error
    farewell = "" if launch.single_rank or is_served() else f"{prefix}/left"
    return _live(launch, device, backend, decision.why, store, farewell)


def _started() -> Launch:
    try:
        return started_by()
    except ConnectError:
        if not dist.is_initialized():
            raise
        # Whoever made the world knew more than these variables.
        return Launch(NO_LAUNCHER, host=host_name())


def together(
    launch: Launch, local: Capabilities, limit: timedelta
) -> tuple[Launch, Store, Round | None, BackendDecision]:
    """Return the rendezvous of the ranks, their round, and what they have decided in its first step.

    The round goes on with what the ranks do next; there is none for a single rank.

    A rank that is early may find the store of the world before, which rank 0 is about to close: it tries again.
    """
    end = time.monotonic() + limit.total_seconds()
    while True:
        left = max(1.0, end - time.monotonic())
        found, store = open_store(launch, timedelta(seconds=left))
        if found.single_rank:
            return found, store, None, _single(local)
        try:
            serves = found.rank == 0 and not is_served()
            decision, among = decide(store, f"{_KEYS}/{launch.attempt}", local, left, serves=serves)
        except StoreLost as error:
            if found.rank == 0 or is_served() or time.monotonic() > end:
                raise
            if error.met:
                raise _rank_0_ended(found) from error
        else:
            return found, store, among, decision


def _rank_0_ended(launch: Launch) -> ConnectError:
    return ConnectError(
        f"rank {launch.rank} of {launch.world_size}: rank 0 is gone, which served the store of the job at "
        f"{launch.meeting}; its process or its host has ended, or the way to it is cut; look at its logs",
        rank=launch.rank,
        missing=(0,),
    )


def _single(local: Capabilities) -> BackendDecision:
    decision = choose([local])
    if decision.backend is None:
        raise ConnectError(f"rank 0 of 1: {decision.why}", rank=0, ranks=decision.ranks)
    return decision


def _joined(launch: Launch, backend: str | None) -> LiveRank:
    """Return a world that is there already: taken as it is, and left as it is."""
    there, rank, size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    if backend not in (None, there):
        raise ConnectError(
            f"the world is initialised already, with backend {there!r} and not {quoted(backend)}; "
            "call init() without a backend, or leave that world first: torch.distributed.destroy_process_group()",
            backend=backend,
            world_backend=there,
        )
    if (rank, size) != (launch.rank, launch.world_size):
        # Whoever made the world numbered its ranks: the launcher's numbers of this one are of another numbering.
        launch = replace(launch, rank=rank, world_size=size, local_rank=None, local_world_size=None)
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in there else torch.device("cpu")
    return _live(launch, device, there, "initialised before", None, "")


def _live(launch: Launch, device: torch.device, backend: str, why: str, store: Store | None, farewell: str) -> LiveRank:
    return LiveRank(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        host=launch.host,
        launcher=launch.launcher,
        device=device,
        backend=backend,
        why=why,
        launch=launch,
        _store=store,
        _farewell=farewell,
    )


def _check_backend(backend: object) -> None:
    if backend is not None and not isinstance(backend, str):
        raise ConnectError(
            f"backend is {quoted(backend)}, which is not a name of a torch backend; "
            "ask for 'gloo' or 'nccl', or leave it out",
            received=backend,
        )


def device_of(backend: str, local: Capabilities) -> torch.device:
    """Return the device of this rank's tensors under a backend; a GPU becomes the current one."""
    if "nccl" not in backend or local.index is None:
        return torch.device("cpu")
    torch.cuda.set_device(local.index)
    return torch.device("cuda", local.index)


def _initialise(launch: Launch, backend: str, store: Store, limit: timedelta | None) -> None:
    try:
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit)
    except (RuntimeError, ValueError, AttributeError) as error:
        _destroy()
        named = os.environ.get("GLOO_SOCKET_IFNAME") if "gloo" in backend else None
        on = f" on the network interface GLOO_SOCKET_IFNAME={named}" if named else ""
        raise ConnectError(
            f"rank {launch.rank} of {launch.world_size}: the world could not be initialised with {backend}{on} at "
            f"{launch.meeting} ({first_line(error)}); check that every rank of the job was started, and that this "
            f"torch has the backend{', and this host the interface' if named else ''}",
            rank=launch.rank,
            backend=backend,
        ) from error


def _destroy() -> None:
    with suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()


def _take_leave(store: Store, key: str, rank: int, size: int, *, failed: bool) -> None:
    """Rank 0 serves the store: it stays until the others have left, for a limited time; not where it has failed."""
    channel, end = BoundedChannel(StoreChannel(store, key)), time.monotonic() + _FAREWELL
    with suppress(ChannelLost):
        if rank:
            channel.ask(lambda store: store.tick("ranks", 1))
            return
        while not failed and channel.ask(lambda store: store.tick("ranks", 0)) < size - 1 and time.monotonic() < end:
            time.sleep(_LOOK)
