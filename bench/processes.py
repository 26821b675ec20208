"""Forked processes that report one line each, and that never outlive their time.

```
parent ── fork ──▶ rank 0 … n-1 ── one JSON line each ──▶ pipe ──▶ parent
```

torch and the peers are imported before the fork, so that sixty-four ranks start in a second. A fork copies the locks
of other threads as they are at that moment; so the parent has no store and no thread of its own. It only binds the
socket on which rank 0 serves the store.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["Outcome", "Wrap", "free_port", "run_isolated", "run_world"]

Report = Mapping[str, Any]
Wrap = Callable[[Any], Any]

_TIMEOUT = timedelta(seconds=60)
# A line no longer than this reaches a shared pipe in one piece (POSIX: PIPE_BUF is at least 512; Linux: 4,096).
_LONGEST = 4000


@dataclass(frozen=True)
class Outcome:
    """What every process reported, or why there is no such thing."""

    reports: tuple[Report, ...] = ()
    failure: str | None = None


def free_port() -> int:
    """A port of this host at which nobody listens, and that the system gives to no connection by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_isolated(body: Callable[[], Report], *, limit: float) -> Outcome:
    """Run ``body`` in a fresh process for at most ``limit`` seconds."""
    return _run(1, lambda _: body(), lambda _: nullcontext(), limit)


def run_world(
    size: int,
    body: Callable[[int, Any], Report],
    *,
    limit: float,
    wrap: Wrap | None = None,
    backend: str | None = "gloo",
) -> Outcome:
    """Run ``body(rank, store)`` on ``size`` ranks of an initialised world for at most ``limit`` seconds.

    ``wrap`` puts a store around the world's store; without a ``backend`` the body initialises the world.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4 * size)
        stores: list[Any] = []

        @contextmanager
        def place(rank: int) -> Iterator[None]:
            stores.append(_initialise(rank, size, listener, wrap, backend))
            yield
            _wait_for_all()

        return _run(size, lambda rank: body(rank, stores[0]), place, limit)


def _initialise(rank: int, size: int, listener: socket.socket, wrap: Wrap | None, backend: str | None) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__

    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    if rank:
        os.close(descriptor)
    store: Any = TCPStore(
        "127.0.0.1",
        port,
        size,
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        master_listen_fd=None if rank else descriptor,
    )
    if wrap is not None:
        store = wrap(store)
    if backend is not None:
        dist.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=_TIMEOUT)
        dist.barrier()
    return store


def _wait_for_all() -> None:
    """Rank 0 serves the store: it stays until all have reported."""
    import torch.distributed as dist

    with suppress(RuntimeError):
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.1)


def _run(
    size: int,
    body: Callable[[int], Report],
    place: Callable[[int], AbstractContextManager[None]],
    limit: float,
) -> Outcome:
    sys.stdout.flush()
    sys.stderr.flush()
    # A collection in a child would copy every page of what was imported before the fork, in the middle of a time.
    gc.collect()
    gc.freeze()
    reader, writer = os.pipe()
    running: dict[int, int] = {}
    try:
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _live_and_die(rank, body, place, writer)
            running[pid] = rank
        os.close(writer)
        return _gather(reader, size, limit)
    finally:
        os.close(reader)
        _end(running)


def _live_and_die(
    rank: int, body: Callable[[int], Report], place: Callable[[int], AbstractContextManager[None]], writer: int
) -> None:
    """What a child does: it never returns to the caller's code."""
    try:
        _silence()
        with place(rank):
            _report(writer, dict(body(rank)))
    except BaseException as error:  # noqa: BLE001 - a child reports whatever went wrong, and ends
        first = (str(error).strip().splitlines() or [""])[0]
        _report(writer, {"error": f"{type(error).__name__}: {first}"[:300]})
    finally:
        os._exit(0)


def _silence() -> None:
    """Peers print and warn; what is measured is told through the pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def _report(writer: int, report: Report) -> None:
    text = json.dumps(report)
    if len(text) > _LONGEST:
        text = json.dumps({"error": f"a report of {len(text)} characters"})
    os.write(writer, text.encode() + b"\n")


def _gather(reader: int, size: int, limit: float) -> Outcome:
    end, text, ready = time.monotonic() + limit, b"", True
    while ready:
        left = end - time.monotonic()
        ready = left > 0 and bool(select.select([reader], [], [], left)[0])
        piece = os.read(reader, 2**16) if ready else b""
        text += piece
        reports = [json.loads(line) for line in text.split(b"\n")[:-1]]
        errors = [report["error"] for report in reports if "error" in report]
        if errors:
            return Outcome(failure=errors[0])
        if len(reports) == size:
            return Outcome(tuple(reports))
        if ready and not piece:
            return Outcome(failure=f"{size - len(reports)} of {size} processes died")
    return Outcome(failure=f"hung after {limit:g} s")


def _end(running: Mapping[int, int]) -> None:
    """Give the processes a moment to leave, and end those that do not."""
    left, patience = set(running), time.monotonic() + 1
    while left:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if left and time.monotonic() > patience:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            patience = float("inf")
        time.sleep(0.005)
