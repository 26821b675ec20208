"""Linear layers cut over the tensor-parallel group: by outputs (columns of Y), or by inputs (columns of X)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own habit
from torch import nn
from torch.nn import init

from rankmesh.dialects.ezpz import mappings
from rankmesh.dialects.ezpz.layer import ParallelLayer
from rankmesh.dialects.ezpz.state import TensorParallel
from rankmesh.dialects.ezpz.utils import divide_and_check_no_remainder
from rankmesh.dialects.ezpz.weights import InitMethod

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(ParallelLayer):
    """A linear layer whose outputs are spread over the group: Y = X Aᵀ + b, and each rank has its columns of Y.

    Input (..., in_features), the same on every rank. Output (..., out_features) with ``gather_output``, else
    (..., out_features / size), this rank's columns. The bias starts at zero.
    """

    _cut = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        *,
        state: TensorParallel | None = None,
    ) -> None:
        super().__init__(state)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output
        self.output_size_per_partition = divide_and_check_no_remainder(out_features, self._built_for)
        self._make_weight(
            self.output_size_per_partition, in_features, init_method, stride, keep=keep_master_weight_for_test
        )
        self.register_parameter("bias", nn.Parameter(torch.zeros(self.output_size_per_partition)) if bias else None)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """X Aᵀ + b, whole or this rank's columns."""
        self._check_size()
        copied = mappings.copy_to_tensor_parallel_region(input_, self._state)
        output = F.linear(copied, self.weight, self.bias)
        return mappings.gather_from_tensor_parallel_region(output, self._state) if self.gather_output else output


class RowParallelLinear(ParallelLayer):
    """A linear layer whose inputs are spread over the group: Y = X Aᵀ + b, summed from each rank's columns of X.

    Input (..., in_features), or this rank's (..., in_features / size) with ``input_is_parallel``. Output
    (..., out_features), the same on every rank. The bias starts at zero and is whole on every rank.
    """

    _cut = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        *,
        state: TensorParallel | None = None,
    ) -> None:
        super().__init__(state)
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = divide_and_check_no_remainder(in_features, self._built_for)
        self._make_weight(
            out_features, self.input_size_per_partition, init_method, stride, keep=keep_master_weight_for_test
        )
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """X Aᵀ + b, the same on every rank."""
        self._check_size()
        own = input_ if self.input_is_parallel else mappings.scatter_to_tensor_parallel_region(input_, self._state)
        output = mappings.reduce_from_tensor_parallel_region(F.linear(own, self.weight), self._state)
        return output if self.bias is None else output + self.bias
