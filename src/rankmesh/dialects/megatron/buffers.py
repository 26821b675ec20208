"""Memory that is allocated once and lent by name: Megatron's global buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod

import torch

__all__ = ["GlobalMemoryBuffer"]


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
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
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
