"""What the layers with a cut weight have in common: the weight, the state that it is cut for, and its whole."""

from __future__ import annotations

import torch
from torch import nn

from rankmesh.dialects.ezpz.state import TensorParallel, default
from rankmesh.dialects.ezpz.weights import InitMethod, fill_part, whole_of
from rankmesh.errors import SizesError

__all__ = ["ParallelLayer"]


class ParallelLayer(nn.Module):
    """A layer with one weight that is cut along ``_cut``."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: torch.Tensor | None
    _cut: int
    _stride: int

    def __init__(self, state: TensorParallel | None) -> None:
        super().__init__()
        self._own_state = state
        self._built_for = self._state.get_tensor_parallel_world_size()

    @property
    def _state(self) -> TensorParallel:
        # The module-level state is not kept: a saved layer belongs to whatever process loads it.
        return default if self._own_state is None else self._own_state

    def _make_weight(self, rows: int, columns: int, init_method: InitMethod, stride: int, keep: bool) -> None:
        self._stride = stride
        self.weight = nn.Parameter(torch.empty(rows, columns))
        whole = fill_part(self.weight, self._cut, init_method, self._state, stride)
        self.master_weight = whole if keep else None

    def _check_size(self) -> None:
        size = self._state.get_tensor_parallel_world_size()
        if size != self._built_for:
            raise SizesError(
                f"this {type(self).__name__} was built for tensor-parallel size {self._built_for}, and is in a group "
                f"of {size}; its weight is cut for {self._built_for}; initialise first, then build the model",
                built_for=self._built_for,
                size=size,
            )

    def get_master_weight(self) -> torch.Tensor:
        """The whole weight, gathered from the group; every rank of it calls this."""
        self._check_size()
        return whole_of(self.weight, self._cut, self._state, self._stride)
