"""NCCL where members are lost: torch's watchdog leaves the process alone, and waits for a GPU have limits.

```
watchdog    by default it ends the process where a call of NCCL fails         a variable turns that off
a call      returns at once, and goes on for good where a member is lost      who needs it done waits for the GPU
an abort    lets the stream go on, past a call whose numbers never came       so it is asked for before they count
```

A `Communicator` is one between processes of several jobs, outside of torch's registries.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from rankmesh.backend.options import check_backend, kinds_of
from rankmesh.backend.protocol import NotJoined
from rankmesh.rendezvous.waiting import wait_for

__all__ = ["Communicator", "device_done", "outlive_errors"]

# What the watchdog does where a call fails, and what it does by default.
_HANDLING, _ENDS_THE_PROCESS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"
_WATCHDOG = {_HANDLING: "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0"}

# Seconds between two looks at a GPU that works.
_LOOK = 0.0002
# Longer than anybody waits: the limits are ours.
_LONG = timedelta(days=30)
# Where NCCL's members find the first one, in the store of their group.
_FIRST = "0"


def outlive_errors(backend: str) -> None:
    """Have this process live on where a call of NCCL fails; before its first group is made, and other threads run."""
    if "nccl" in kinds_of(backend):
        os.environ.update(_WATCHDOG)


def device_done(device: torch.device, check: Callable[[], object]) -> None:
    """Wait until a GPU has done what it was given; ``check`` is called meanwhile and after it, and may raise."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        while not event.query():
            check()
            time.sleep(_LOOK)
        check()


class Communicator:
    """A communicator of ``size`` processes, each with a GPU; this one is the ``rank``-th.

    Each wait takes ``limit`` at most. Raises ``NotJoined`` when not all of them come.
    """

    def __init__(self, store: Any, rank: int, size: int, *, name: str, limit: timedelta, device: torch.device) -> None:
        check_backend("nccl")
        self._store, self._rank, self._device, self._limit = store, rank, device, limit.total_seconds()
        # First, since NCCL itself waits for a member without a limit.
        store.set(f"here/{rank}", "")
        if not wait_for(store, [f"here/{position}" for position in range(size)], self._limit):
            store.delete_key(f"here/{rank}")
            raise NotJoined(f"not all of its members have come within {self._limit:.3g} s", ())
        options: Any = c10d.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = _LONG, name
        with _watchdog_off():
            self._made: Any = c10d.ProcessGroupNCCL(store, rank, size, options)
        self._made.eager_connect_single_device(device)

    def start(self, calls: Sequence[tuple[Tensor, int, bool]]) -> Batch:
        """Send tensors, or receive into them, all at once: (tensor, the other one's rank, whether to send)."""
        self._made._start_coalescing()
        for tensor, peer, sending in calls:
            (self._made.send if sending else self._made.recv)([tensor], peer, 0)
        return Batch(self._made._end_coalescing(), self._device, self._limit)

    def close(self) -> None:
        """End it, and with it calls that wait for a member."""
        self._made.abort()  # which waits for nobody
        with suppress(RuntimeError):
            self._store.delete_key(f"here/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(_FIRST)


class Batch:
    """Calls that were started together."""

    def __init__(self, work: Any, device: torch.device, limit: float) -> None:
        self._work, self._device, self._limit = work, device, limit

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until they are done; ``RuntimeError`` where they are not within the limit, that of the communicator."""
        limit = self._limit if timeout is None else timeout.total_seconds()
        end = time.monotonic() + limit

        def check() -> None:
            if time.monotonic() > end:
                raise RuntimeError(f"nothing came for {limit:g} s")

        self._work.wait()  # the stream does, and this returns
        device_done(self._device, check)


@contextmanager
def _watchdog_off() -> Iterator[None]:
    """Make communicators whose failures do not end the process; those of others are as they were."""
    before = os.environ.setdefault(_HANDLING, _ENDS_THE_PROCESS)  # what is there changes in place in memory
    os.environ[_HANDLING] = _WATCHDOG[_HANDLING]
    try:
        yield
    finally:
        os.environ[_HANDLING] = before
