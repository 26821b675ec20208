"""Works: what a call on a group returns, and torch waits for.

The results of a call appear in the caller's tensors when it waits for them, not before: a program that forgets to wait
sees old numbers, on every run. A tensor that is changed between the call and the wait is found by comparing its bytes.
"""

# torch's stubs lack parts of Work that its Python subclasses may override.
# mypy: disable-error-code="override"

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from rankmesh.backend import torch_threads
from rankmesh.backend.python_group import PythonWork
from rankmesh.backend.single_rank import Finished
from rankmesh.sim.channel import Failure, PendingOperation
from rankmesh.sim.failures import divergence
from rankmesh.sim.scheduler import Scheduler

__all__ = ["SimulatedWork", "Together"]


class SimulatedWork(PythonWork):
    """One call on its way; ``wait`` lets other ranks run until the call is settled."""

    def __init__(self, scheduler: Scheduler, pending: PendingOperation) -> None:
        super().__init__()
        self._scheduler, self._pending = scheduler, pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done, then put the results in place; ``DivergenceError`` when it failed."""
        pending, rank = self._pending, self._pending.call.rank
        self._scheduler.check(rank)
        if not pending.settled:
            self._scheduler.block(rank, pending)
        if pending.failure is not None:
            raise divergence(pending.failure, rank)
        if not _deliver(pending):
            text = f"rank {rank} changed a tensor between the call and the wait"
            raise divergence(Failure("race", text, pending.channel, {rank: pending.call}), rank)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call is done; lets the other ranks run first where it is not."""
        pending = self._pending
        if not pending.settled:
            self._scheduler.pause(pending.call.rank, idle=True)
        if self.is_success():
            _deliver(pending)
        return pending.settled

    def is_success(self) -> bool:
        return self._pending.settled and self._pending.failure is None

    def exception(self) -> None:
        """Return None: a call that failed raises where it is waited for."""

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is done: this waits first, as a wait inside torch would stop every rank."""
        self.wait()
        return Finished(self.result()).get_future()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the results."""
        return self._pending.call.outputs

    def source_rank(self) -> int:
        """Return the position from which a receive got its tensor."""
        return self._pending.source


class Together(dist.Work):
    """Several calls that are waited for as one."""

    def __init__(self, works: list[SimulatedWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()
        return Finished([tensor for work in self._works for tensor in work.result()]).get_future()


def _deliver(pending: PendingOperation) -> bool:
    """Put the results into the caller's tensors, once; False when what it gave was changed meanwhile."""
    call = pending.call
    if pending.delivered:
        return True
    pending.delivered = True
    if call.versions and any(
        torch_threads.version(tensor) != version and not _same_bytes(tensor, kept)
        for tensor, kept, version in zip(call.inputs, call.given, call.versions, strict=True)
    ):
        return False
    for output, result in zip(call.outputs, call.results or (), strict=bool(call.results)):
        # Unseen by autograd, as where a network writes.
        output.data.copy_(result.reshape(output.shape))
    return True


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(*(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)))
