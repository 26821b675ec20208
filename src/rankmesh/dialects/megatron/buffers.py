"""Memory that is allocated once and lent by name: Megatron's global buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.backend.meshes import symmetric_memory
from rankmesh.errors import ConnectError

__all__ = ["SYMMETRIC_MEGABYTES", "GlobalMemoryBuffer", "GlobalSymmetricMemoryBuffer"]

SYMMETRIC_MEGABYTES = 256


class GlobalMemoryBuffer:
    """Tensors by name and dtype, on the current GPU, or on the CPU where there is none.

    Two users of one name share memory: they must not use it at the same time.

    >>> buffer = GlobalMemoryBuffer()
    >>> large = buffer.get_tensor((4, 2), torch.float32, "activations")
    >>> buffer.get_tensor((3,), torch.float32, "activations").data_ptr() == large.data_ptr()
    True
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> torch.Tensor:
        """Return a tensor of this shape in the memory of that name, which grows when it is too small."""
        needed = prod(tensor_shape)
        memory = self.buffer.get((name, dtype))
        if memory is None or memory.numel() < needed:
            with (mem_alloc_context or nullcontext)():
                memory = torch.empty(needed, dtype=dtype, device=_device(), requires_grad=False)
            self.buffer[name, dtype] = memory
        return memory[:needed].view(*tensor_shape)


def _device() -> int | torch.device:
    return torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu")


class GlobalSymmetricMemoryBuffer:
    """Memory that all GPUs of a group map, for collectives inside NVLink domains.

    Where the hardware, or this torch, has none, ``unavailable`` says why: ``maybe_get_tensor`` then gives None, as in
    Megatron-Core, whose layers fall back to NCCL; ``get_tensor`` raises.
    """

    def __init__(self, size_in_mb: float, process_group: dist.ProcessGroup) -> None:
        self.symm_buffer: torch.Tensor | None = None
        self.symm_mem_hdl: Any = None
        self.unavailable: str | None = None
        try:
            self.symm_buffer, self.symm_mem_hdl = symmetric_memory(int(size_in_mb * 2**20), process_group)
        except ConnectError as error:
            self.unavailable = error.message

    def maybe_get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
        """Return ``tensor`` and ``handle``; both None where there is no symmetric memory, or not enough."""
        count = prod(tensor_shape)
        needed = count * dtype.itemsize
        if self.symm_buffer is None or needed > self.symm_buffer.numel():
            return {"tensor": None, "handle": None}
        return {
            "tensor": self.symm_buffer[:needed].view(dtype).view(*tensor_shape),
            "handle": self.symm_mem_hdl,
        }

    def get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
        """Return ``tensor`` and ``handle``; ``ConnectError`` where there is no symmetric memory, or not enough."""
        found = self.maybe_get_tensor(tensor_shape, dtype)
        if found["tensor"] is None:
            available = 0 if self.symm_buffer is None else self.symm_buffer.numel()
            raise ConnectError(
                f"cannot give {prod(tensor_shape) * dtype.itemsize} bytes of symmetric memory; "
                f"{self.unavailable or f'there are {available}; ask for less'}",
                available=available,
            )
        return found
