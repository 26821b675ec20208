"""NCCL where members are lost: torch's watchdog leaves the process alone, and waits for a GPU have limits.

```
watchdog    by default it ends the process where a call of NCCL fails         a variable turns that off
a call      returns at once, and goes on for good where a member is lost      who needs it done waits for the GPU
an abort    lets the stream continue past a collective that did not finish    so check for one before its result is used
```

A `Communicator` is one between processes of several jobs, outside of torch's registries.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from rankmesh.backend.options import check_backend, kinds_of
from rankmesh.backend.protocol import NotJoined
from rankmesh.rendezvous.waiting import submit, wait_for

__all__ = ["Batch", "Communicator", "abort_together", "device_done", "device_done_within", "outlive_errors"]

# What the watchdog does where a call fails, and what it does by default.
_HANDLING, _ENDS_THE_PROCESS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"
_WATCHDOG = {_HANDLING: "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0"}

# Seconds between two looks at a GPU that works, once it has worked for some: a short message is done before that.
_LOOK, _AT_ONCE = 0.0002, 0.001
# Longer than anybody waits: the limits are ours.
_LONG = timedelta(days=30)
# Where NCCL's members find the first one, in the store of their group.
_FIRST = "0"


def outlive_errors(backend: str) -> None:
    """Have this process live on where a call of NCCL fails; before its first group is made, and other threads run."""
    if "nccl" in kinds_of(backend):
        os.environ.update(_WATCHDOG)


def device_done(device: torch.device, check: Callable[[], object]) -> None:
    """Wait until a GPU has finished its work; ``check`` is called meanwhile and afterwards, and may raise."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        begun = time.monotonic()
        while not event.query():
            check()
            if time.monotonic() - begun > _AT_ONCE:
                time.sleep(_LOOK)
        check()


def abort_together(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort the communicators of these groups at the same time.

    Each abort frees memory, which waits for all kernels of this process. So one after the other, the first one would
    wait for a kernel of the second one. A group of NCCL calls does not help: torch aborts on a thread of its own.
    """
    aborting = [submit(pg.abort, "rankmesh-abort") for pg in groups]
    wait(aborting)
    for one in aborting:
        one.result()


class Communicator:
    """A communicator of ``size`` processes, each with a GPU; this one is the ``rank``-th.

    Each wait takes ``limit`` at most. Raises ``NotJoined`` when not all of them come.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, name: str, limit: timedelta, device: torch.device
    ) -> None:
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
        return Batch([self._made._end_coalescing()], self._device)

    def close(self) -> None:
        """End it, and with it calls that wait for a member."""
        self._made.abort()  # which waits for nobody
        with suppress(RuntimeError):
            self._store.delete_key(f"here/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(_FIRST)


class Batch:
    """Calls that were started together on a GPU: done once the GPU has done them, not once it is to do them."""

    def __init__(self, works: Sequence[dist.Work], device: torch.device) -> None:
        self._works, self._device, self._done = works, device, False

    def wait(self, timeout: timedelta) -> None:
        """Wait until the GPU has done all of them. Raises ``RuntimeError`` where it has not within ``timeout``."""
        if not self._done:
            for work in self._works:
                work.wait()  # the stream does, and this returns
            device_done_within(self._device, timeout)
            self._done = True


def device_done_within(device: torch.device, timeout: timedelta) -> None:
    """Wait until a GPU has finished its work. Raises ``RuntimeError`` if it has not within ``timeout``."""
    end = time.monotonic() + timeout.total_seconds()

    def check() -> None:
        if time.monotonic() > end:
            raise RuntimeError(f"the GPU did not finish within {timeout.total_seconds():g} s")

    device_done(device, check)


@contextmanager
def _watchdog_off() -> Iterator[None]:
    """Make communicators whose failures do not end the process; communicators of others are as they were."""
    before = os.environ.setdefault(_HANDLING, _ENDS_THE_PROCESS)  # what is there changes in place in memory
    os.environ[_HANDLING] = _WATCHDOG[_HANDLING]
    try:
        yield
    finally:
        os.environ[_HANDLING] = before
