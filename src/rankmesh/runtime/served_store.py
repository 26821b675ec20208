"""The rendezvous: the store that all ranks of a job reach, and which process serves it.

```
torchrun          its agent serves the store
any other         rank 0 serves it, at MASTER_ADDR:MASTER_PORT or where the launcher's list of hosts begins;
                  at that address alone if it is numeric, else at all addresses of its host
MPI without one   rank 0 serves it on its host, and broadcasts the address through mpi4py
no launcher       a store of this process alone
```

A name that does not resolve is refused at once, by every rank; inside a Slurm job Slurm is asked for its address
first. A rank that waits for rank 0 tries its port until it answers: torch's own client prints a trace for each try.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.errors import ConnectError, first_line
from rankmesh.launch.address import addresses_of, family_of, is_local, name_of, resolved
from rankmesh.launch.started import Launch
from rankmesh.launch.table import MPI
from rankmesh.rendezvous.waiting import submit

__all__ = ["is_served", "open_at", "open_store", "serve_at"]

_KNOCK, _PAUSE, _MOMENT = 2.0, 0.1, 1.0
# Torch's own limit of a store's calls, and connections that may wait.
_DEFAULT, _BACKLOG = timedelta(seconds=300), 2048


def is_served() -> bool:
    """Return whether the launcher itself serves the store, as torchrun's agent does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(launch: Launch, timeout: timedelta) -> tuple[Launch, Store]:
    """Return a connection to the job's store, and the launch with the rendezvous address that was found.

    Raises ``ConnectError`` for a place that is not known, does not resolve, or does not answer within ``timeout``.
    """
    if launch.single_rank and launch.address is None:
        return launch, HashStore()
    if launch.address is None:
        return _address_by_mpi(launch, timeout)
    end = time.monotonic() + timeout.total_seconds()
    launch = _resolve(launch, end)
    if launch.rank == 0 and not is_served():
        return launch, _serve(launch, timeout)
    _await_server(launch, end)
    return launch, _connect(launch, timeout)


def open_at(address: str, port: int, timeout: timedelta, *, serves: bool) -> Store:
    """Return a store that several jobs share: served by this process, or by another that may not have begun yet.

    Raises ``ConnectError`` where it does not answer within ``timeout``.
    """
    launch = Launch("address", rank=0 if serves else 1, world_size=2, address=address, port=port)
    if serves:
        return _serve(launch, timeout)
    _await_server(launch, time.monotonic() + timeout.total_seconds())
    return _connect(launch, timeout)


def _serve(launch: Launch, timeout: timedelta) -> TCPStore:
    """Return the store, in this process; reached on this host whatever the others call it."""
    try:
        here = _is_here(launch)
    except (OSError, UnicodeError) as error:
        raise _unreachable(launch, first_line(error)) from error
    return _opened(launch, str(launch.address) if here else "localhost", launch.port, True, timeout)


def _connect(launch: Launch, timeout: timedelta) -> TCPStore:
    return _opened(launch, str(launch.address), launch.port, False, timeout)


def _opened(launch: Launch, address: str, port: int, serves: bool, timeout: timedelta) -> TCPStore:
    """Open the store, or raise ``ConnectError`` in time: torch's client tries for minutes where nobody answers."""

    def open_it() -> TCPStore:
        if serves and _is_numeric(address):
            with suppress(OSError):  # another store of this process is served there, or will say what uses the port
                return serve_at(address, port, timeout)
        return TCPStore(address, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=serves)

    opening = submit(open_it, "rankmesh-store")
    wait([opening], timeout.total_seconds() + _MOMENT)
    if opening.done():
        try:
            return opening.result()
        except RuntimeError as error:
            raise _unreachable(launch, first_line(error)) from error
    raise ConnectError(
        f"rank {launch.rank} of {launch.world_size}: no response from rank 0; no store could be reached at "
        f"{launch.meeting}, which accepts and says nothing; rank 0 is stopped or stuck there, or something else uses "
        "the port; look at its logs",
        rank=launch.rank,
        missing=(0,),
    )


def serve_at(address: str, port: int = 0, timeout: timedelta = _DEFAULT) -> TCPStore:
    """Serve a store at one numeric address of this host, and at no other; port 0 is any that is free.

    Torch's own choice is a socket of IPv6 at all addresses, on which others have addresses such as ::ffff:10.0.0.1: it
    asks a name server for the name of each, as no /etc/hosts has it. Raises ``OSError`` if the port is taken.
    """
    with socket.create_server((address, port), family=family_of(address), backlog=_BACKLOG) as listening:
        return TCPStore(
            address,
            int(listening.getsockname()[1]),
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=port > 0,
            master_listen_fd=os.dup(listening.fileno()),
        )


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _unreachable(launch: Launch, why: str) -> ConnectError:
    unseen = "no response from rank 0; " if launch.rank else ""
    return ConnectError(
        f"rank {launch.rank} of {launch.world_size}: {unseen}no store could be reached at {launch.meeting} ({why}); "
        "check that rank 0 runs there, and that nothing else uses the port",
        rank=launch.rank,
        missing=() if launch.rank == 0 else (0,),
    )


def _resolve(launch: Launch, end: float) -> Launch:
    """Return the launch with an address that means something; a name in Kubernetes appears when its pod does."""
    while True:
        try:
            return resolved(launch, max(0.0, end - time.monotonic()))
        except ConnectError:  # noqa: PERF203  - the pod's name may appear
            if launch.launcher != "kubernetes" or time.monotonic() >= end:
                raise
            time.sleep(_PAUSE)


def _is_here(launch: Launch) -> bool:
    """Return whether the rendezvous address is one of this host's."""
    return any(is_local(family, place) for family, place in addresses_of(launch.address, 0))


def _await_server(launch: Launch, end: float) -> None:
    """Wait until something listens at the rendezvous address."""
    while (problem := _refused(launch)) is not None:
        if time.monotonic() > end:
            raise _unreachable(launch, problem)
        time.sleep(_PAUSE)


def _refused(launch: Launch) -> str | None:
    try:
        place = name_of(launch.address), launch.port
        socket.create_connection(place, timeout=_KNOCK).close()  # type: ignore[arg-type]  # it takes bytes, too
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or first_line(error)
    return None


def _address_by_mpi(launch: Launch, timeout: timedelta) -> tuple[Launch, Store]:
    """Rank 0 serves a store at a free port, and broadcasts its address through MPI."""
    world = _mpi_world(launch)
    if launch.rank == 0:
        here = replace(launch, address=socket.gethostname(), port=0)
        store = _opened(here, "localhost", 0, True, timeout)
        address, port = world.bcast((_local_address(), store.port), root=0)
        return replace(here, address=address, port=port), store
    address, port = world.bcast(None, root=0)
    found = replace(launch, address=address, port=port)
    return found, _connect(found, timeout)


def _local_address() -> str:
    """By which the other hosts reach this one: its name where that is more than the loopback, else its address."""
    name = socket.gethostname()
    try:
        places = {place[0] for _, place in addresses_of(name)}
    except OSError:
        places = set()
    if places and not all(str(place).startswith(("127.", "::1")) for place in places):
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the route has the address
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _mpi_world(launch: Launch) -> Any:
    if launch.launcher not in MPI:
        raise _without_address(launch, "the ranks meet at the host of rank 0")
    try:
        from mpi4py.MPI import COMM_WORLD
    except (ImportError, RuntimeError) as error:
        raise _without_address(launch, f"mpi4py could tell, which cannot be used here ({first_line(error)})") from error
    size, rank = COMM_WORLD.Get_size(), COMM_WORLD.Get_rank()
    if (rank, size) != (launch.rank, launch.world_size):
        raise ConnectError(
            f"this process is rank {launch.rank} of {launch.world_size} for {launch.launcher}, but {rank} of {size} "
            "for mpi4py, which was built for another MPI; set MASTER_ADDR and MASTER_PORT, or start the ranks with "
            "the mpirun of mpi4py's MPI",
            rank=launch.rank,
            world_size=launch.world_size,
            received=(rank, size),
        )
    return COMM_WORLD


def _without_address(launch: Launch, rule: str) -> ConnectError:
    return ConnectError(
        f"MASTER_ADDR is not set in a job of {launch.world_size} ranks (launcher: {launch.launcher}); {rule}; set "
        "MASTER_ADDR (and MASTER_PORT) for all ranks, install mpi4py under MPI, or start the ranks with torchrun",
        launcher=launch.launcher,
        world_size=launch.world_size,
    )
