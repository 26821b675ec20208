"""Ranks as processes that never outlive their time: forked ones report once each, torchrun's write lines.

```
parent ── fork ──▶ rank 0 … n-1 ── a file each ──▶ parent
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
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

from rankmesh.core.private import write_whole
from rankmesh.launch.local import output_to, wait

__all__ = ["ROOT", "Outcome", "environment", "free_port", "lines", "run_isolated", "run_ranks", "run_world", "torchrun"]

Around = Callable[[int], AbstractContextManager[None]]

ROOT = Path(__file__).parents[1]
_TIMEOUT = timedelta(seconds=60)
# Seconds for processes that have all reported to end by themselves.
_TO_LEAVE = 1.0


@dataclass(frozen=True)
class Outcome:
    """What every process reported, by rank, or why they did not."""

    reports: tuple[Any, ...] = ()
    failure: str | None = None

    def checked(self) -> tuple[Any, ...]:
        """Return the reports; raise if there are none."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return self.reports


def free_port() -> int:
    """Return a port at which nobody listens, and that the system gives to no connection by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# -- torchrun ----------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Return the variables of a measured process, one thread each."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # Where no name server answers, each look-up of a name would take as long as a loss.
    resolver = {"RES_OPTIONS": "timeout:1 attempts:1"}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR", **resolver}


def torchrun(ranks: int, module: str, *arguments: object, limit: float, **variables: str) -> None:
    """Run a module on ranks of this host for at most ``limit`` seconds; raise if it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(  # noqa: S603  - this program's own
        [*launcher, "-m", module, *map(str, arguments)],
        env=environment() | variables, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{module} failed with status {done.returncode}: {done.stderr[-1500:]}")


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of JSON that ranks have written into a folder."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


# -- forked ranks ------------------------------------------------------------------------------------------------------


def run_isolated(body: Callable[[], Any], *, limit: float) -> Outcome:
    """Run ``body`` in a fresh process for at most ``limit`` seconds."""
    return run_ranks(1, lambda _: body(), limit=limit)


def run_world(
    size: int,
    body: Callable[[int, Any], Any],
    *,
    limit: float,
    wrap: Callable[[Any], Any] | None = None,
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
        def world(rank: int) -> Iterator[None]:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            store = _store(rank, size, listener)
            stores.append(store if wrap is None else wrap(store))
            if backend is not None:
                dist.init_process_group(backend, rank=rank, world_size=size, store=stores[0], timeout=_TIMEOUT)
                dist.barrier()
            yield
            # Rank 0 serves the store: it stays until all have reported.
            with suppress(RuntimeError):
                dist.barrier()
                if dist.get_rank() == 0:
                    time.sleep(0.1)

        return run_ranks(size, lambda rank: body(rank, stores[0]), world, limit=limit)


def _store(rank: int, size: int, listener: socket.socket) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from its __all__

    port, descriptor = listener.getsockname()[1], listener.detach()
    if rank:
        os.close(descriptor)
    return TCPStore(
        "127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False, timeout=_TIMEOUT,
        master_listen_fd=None if rank else descriptor,
    )  # fmt: skip


def run_ranks(
    size: int,
    body: Callable[[int], Any],
    around: Around = lambda _: nullcontext(),
    *,
    limit: float,
) -> Outcome:
    """Run ``body(rank)`` in forked processes, each inside ``around(rank)``, for at most ``limit`` seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    # A collection in a child would copy every page of what was imported before the fork, in the middle of a time.
    gc.collect()
    gc.freeze()
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as name:
        folder = Path(name)
        processes = [
            forks.Process(target=_rank, args=(rank, body, around, folder), daemon=True) for rank in range(size)
        ]
        for process in processes:
            process.start()

        def reported() -> list[Path]:
            return [path for rank in range(size) if (path := folder / f"{rank}").exists()]

        def seconds_left() -> float:
            if (folder / "error").exists():
                return 0.0
            return _TO_LEAVE if len(reported()) == size else inf

        statuses = wait(processes, seconds_left, limit)
        if (folder / "error").exists():
            return Outcome(failure=(folder / "error").read_text(encoding="utf-8"))
        reports = [pickle.loads(path.read_bytes()) for path in reported()]  # noqa: S301  - from this program
    if len(reports) == size:
        return Outcome(tuple(reports))
    died = f"{size - len(reports)} of {size} processes died"
    return Outcome(failure=f"hung after {limit:g} s" if None in statuses else died)


def _rank(rank: int, body: Callable[[int], Any], around: Around, folder: Path) -> None:
    """Leave a report or an error, and end at once: the threads of torch and of the peers are not waited for."""
    output_to(Path(os.devnull))
    try:
        with around(rank):
            write_whole(folder / f"{rank}", pickle.dumps(body(rank)))
    except BaseException as error:  # noqa: BLE001 - a child reports whatever went wrong, and ends
        first = (str(error).strip().splitlines() or [""])[0]
        write_whole(folder / "error", f"{type(error).__name__}: {first}"[:300].encode())
    finally:
        os._exit(0)
