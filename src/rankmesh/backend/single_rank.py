"""A process group of one rank: answers every collective, and owns no communicator, thread, socket or store key.

```
torch.distributed.all_reduce(...)  ── methods of SingleRankGroup   done at once; the work's future has the tensors
functional collectives, autograd   ── the same methods, which C++ calls by their names
what asks for the backend          ── torch's fake backend
```

torch's own one-rank groups have sockets and threads and, on a GPU, hundreds of MiB of device memory. Sending to
nobody is refused: the fake backend would report it as done.

The names of the methods are those by which torch calls a process group that is written in Python, private ones too:
they are known on the releases of ``versions``.
"""

# torch's stubs lack these private parts, and type each method by its overloads; here one method serves them all.
# mypy: disable-error-code="attr-defined,assignment,override"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, FakeProcessGroup, HashStore, Work

from rankmesh.backend.registries import register
from rankmesh.errors import ConnectError

__all__ = [
    "Finished",
    "Listed",
    "SingleRankGroup",
    "as_list",
    "fake_backend",
    "flat_list",
    "premultiplied",
    "put_under",
    "single_rank_group",
]

_DEVICES = ("cpu", "cuda")
Listed = torch.Tensor | Sequence[torch.Tensor]


class Finished(Work):
    """Work that is done; torch's own work over a future cannot be waited for with a time limit."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that holds the tensors."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def premultiplied(operation: Any) -> Any:
    """Return the factor of a scaled sum, which torch shows by pickling alone; None for another reduction."""
    scaled = dist.ReduceOp.RedOpType.PREMUL_SUM
    if operation is None or operation != scaled:
        return None
    return operation.__getstate__()[1]


class SingleRankGroup(dist.ProcessGroup):
    """The group of this rank and nobody else."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # the stubs lack this overload, the only one for subclasses
        self._operations = 0
        self._is_destroyed = False

    def shutdown(self) -> None:
        """Refuse all later calls: torch calls this where it destroys a group."""
        self._is_destroyed = True

    def _done(self, tensors: list[torch.Tensor]) -> dist.Work:
        if self._is_destroyed:
            raise ConnectError(
                f"group {self.group_desc!r} is destroyed; use it inside the `with` block, or connect again",
                group=self.group_desc,
            )
        self._operations += 1
        return Finished(tensors)

    def _in_place(self, tensors: Listed = (), *_: object, **__: object) -> dist.Work:
        return self._done(as_list(tensors))

    def _copied(
        self, outputs: Listed | Sequence[Listed], given: Listed | Sequence[Listed], *_: object, **__: object
    ) -> dist.Work:
        """Copy each input to its output, both one tensor, or listed, by member too: there is one member."""
        copied = flat_list(outputs)
        for output, tensor in zip(copied, flat_list(given), strict=True):
            if output.numel() != tensor.numel():
                raise ValueError(
                    f"the output has {output.numel()} elements and the input {tensor.numel()} in group "
                    f"{self.group_name!r}, which has one rank; make the output as large as the input"
                )
            output.detach().copy_(tensor.detach().reshape(output.shape))
        return self._done(copied)

    def _no_peer(self, *_: object, **__: object) -> NoReturn:
        raise ValueError(
            f"group {self.group_name!r} has one rank, so it has no peer to send to or receive from; "
            "test group.size > 1 first"
        )

    broadcast = allreduce_coalesced = _in_place
    allgather = allgather_coalesced = gather = scatter = reduce_scatter = alltoall = _copied
    # By torch's present names, and by its former ones.
    all_gather_single = _allgather_base = _copied
    reduce_scatter_single = _reduce_scatter_base = _copied
    all_to_all_single = alltoall_base = _copied
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _copied
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _copied
    send = _no_peer
    recv = _no_peer
    recv_anysource = _no_peer

    def allreduce(self, tensors: Listed, opts: object = None, *_: object, **__: object) -> dist.Work:
        """Return the tensors as they are; a scaled sum of one is the tensor times its factor."""
        reduced = as_list(tensors)
        factor = premultiplied(getattr(opts, "reduceOp", opts))
        if factor is not None:
            with torch.no_grad():
                for tensor in reduced:
                    tensor.mul_(factor)
        return self._done(reduced)

    def barrier(self, *_: object, **__: object) -> dist.Work:
        """Return at once."""
        return self._done([])

    def monitored_barrier(self, timeout: object = None, wait_all_ranks: bool = False) -> None:
        """Return at once: there is no other member."""

    def set_timeout(self, timeout: object) -> None:
        """Do nothing: no call takes long."""

    def _get_backend(self, device: torch.device) -> Any:
        return _LocalBackend(super()._get_backend(device))

    def _set_sequence_number_for_group(self) -> None:
        """Ignore torch's sequence number: the number in the recorder counts the calls of this process."""

    def _get_sequence_number_for_group(self) -> int:
        return self._operations


class _LocalBackend:
    """The fake backend, which takes pools of memory as NCCL's does: nobody else reads them, so none is registered."""

    def __init__(self, fake: object) -> None:
        self._fake = fake

    def register_mem_pool(self, pool: object, symm: bool = False) -> None:
        """Do nothing."""

    def deregister_mem_pool(self, pool: object) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, name)


def as_list(tensors: Listed) -> list[torch.Tensor]:
    """Return one tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def flat_list(tensors: Listed | Sequence[Listed]) -> list[torch.Tensor]:
    """Return tensors that may be listed twice, by member and by call, as one list."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return [tensor for one in listed for tensor in as_list(one)]


def single_rank_group(*, rank: int, name: str, desc: str, backend: str) -> dist.ProcessGroup:
    """Return a process group whose one member is the global rank ``rank``."""
    pg = SingleRankGroup()
    put_under(pg, fake_backend(0, 1), _DEVICES)
    register(pg, backend, HashStore(), name, desc, {rank: 0})
    return pg


def fake_backend(rank: int, size: int) -> Backend:
    """Torch's fake backend, whose collectives return at once; torch 2.9 gave it a function that makes it."""
    make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    made: Backend = make(rank, size)
    return made


def put_under(pg: dist.ProcessGroup, made: Backend, device_types: Iterable[str]) -> None:
    """Let a process group use torch's fake backend on these devices."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    pg._set_default_backend(kind)
    for device_type in device_types:
        pg._register_backend(torch.device(device_type), kind, made)
