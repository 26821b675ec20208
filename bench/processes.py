"""Forked processes that report once each, and that never outlive their time.

```
parent ── fork ──▶ rank 0 … n-1 ── a JSON file each ──▶ parent
```

torch and the peers are imported before the fork, so that sixty-four ranks start in a second. A fork copies the locks
of other threads as they are at that moment; so the parent has no store and no thread of its own. It only binds the
socket on which rank 0 serves the store.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

from rankmesh.core.private import write_whole
from rankmesh.launch.local import output_to, wait

__all__ = ["Outcome", "Wrap", "free_port", "run_isolated", "run_world"]

Report = Mapping[str, Any]
Wrap = Callable[[Any], Any]

_TIMEOUT = timedelta(seconds=60)
# Seconds for processes that have all reported to end by themselves.
_TO_LEAVE = 1.0


@dataclass(frozen=True)
class Outcome:
    """What every process reported, or why they did not."""

    reports: tuple[Report, ...] = ()
    failure: str | None = None


def free_port() -> int:
    """Return a port at which nobody listens, and that the system gives to no connection by itself."""
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
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as name:
        folder = Path(name)
        processes = [forks.Process(target=_rank, args=(rank, body, place, folder), daemon=True) for rank in range(size)]
        for process in processes:
            process.start()

        def seconds_left() -> float:
            if (folder / "error").exists():
                return 0.0
            return _TO_LEAVE if len(list(folder.glob("*.json"))) == size else inf

        statuses = wait(processes, seconds_left, limit)
        if (folder / "error").exists():
            return Outcome(failure=(folder / "error").read_text(encoding="utf-8"))
        reports = [json.loads(path.read_bytes()) for path in folder.glob("*.json")]
    if len(reports) == size:
        return Outcome(tuple(reports))
    died = f"{size - len(reports)} of {size} processes died"
    return Outcome(failure=f"hung after {limit:g} s" if None in statuses else died)


def _rank(
    rank: int, body: Callable[[int], Report], place: Callable[[int], AbstractContextManager[None]], folder: Path
) -> None:
    """Leave a report or an error, and end at once: the threads of torch and of the peers are not waited for."""
    output_to(Path(os.devnull))
    try:
        with place(rank):
            write_whole(folder / f"{rank}.json", json.dumps(dict(body(rank))).encode())
    except BaseException as error:  # noqa: BLE001 - a child reports whatever went wrong, and ends
        first = (str(error).strip().splitlines() or [""])[0]
        write_whole(folder / "error", f"{type(error).__name__}: {first}"[:300].encode())
    finally:
        os._exit(0)
