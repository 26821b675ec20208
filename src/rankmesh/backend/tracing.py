"""Observe a running program: its operators, its backward pass, its frames, the memory of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "autograd_node", "storage_key", "values_of"]


def autograd_node() -> Any:
    """Return the node of the graph whose gradient is being computed on this thread, None outside a backward pass."""
    return torch._C._current_autograd_node()


def values_of(frame: FrameType, names: Iterable[str]) -> list[object]:
    """Return the values of these names in a frame; None for a name that has no value now."""
    return [frame.f_locals.get(name) for name in names]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number for the memory that a tensor is a view of, also a meta tensor's; valid while a tensor has it."""
    return int(tensor.untyped_storage()._cdata)
