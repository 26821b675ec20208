"""Layers whose weights are sharded over the tensor-parallel group; each gives what torch's whole layer gives.

```
                        weight (rows x columns)          sharded along   output
VocabParallelEmbedding  num_embeddings x embedding_dim   rows            whole: summed over the group
ParallelEmbedding       num_embeddings x embedding_dim   columns         whole: gathered
ColumnParallelLinear    out_features x in_features       rows            gathered, or this rank's columns of it
RowParallelLinear       out_features x in_features       columns         whole: summed over the group

stride 1       | r0 r0 | r1 r1 |        one block for each rank
stride 2       | r0 | r1 | r0 | r1 |    several matrices side by side (Q, K, V), each sharded by itself
```

Every rank of the group draws the same whole weight and keeps its part, so all must have the same random state at that
point. ``state`` is the state whose tensor-parallel group is meant, None for the module-level one.

What differs from ezpz's layers: padding indices, ``max_norm`` and ``scale_grad_by_freq`` act as in
``torch.nn.Embedding`` or are refused (ezpz passes them on to a table that holds other rows); an index outside the
vocabulary is an ``IndexError``, as torch has it, not a row of zeros; ``get_master_weight`` undoes ``stride`` too; a
layer that was built for another size than the group has now is refused where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  - torch's own habit
from torch import nn
from torch.nn import init

from rankmesh.dialects.ezpz import mappings
from rankmesh.dialects.ezpz.state import TensorParallel, default
from rankmesh.dialects.ezpz.utils import VocabUtility, divide_and_check_no_remainder
from rankmesh.errors import PlanError, SizesError

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]

InitMethod = Callable[[torch.Tensor], Any]


def fill_part(
    weight: torch.Tensor, dim: int, init_method: InitMethod, state: TensorParallel, stride: int = 1
) -> torch.Tensor:
    """Fill ``weight``, this rank's part along ``dim``, from a whole weight of ``init_method``; return the whole one."""
    size, rank = state.get_tensor_parallel_world_size(), state.get_tensor_parallel_rank()
    width = divide_and_check_no_remainder(weight.size(dim), stride)
    if size == 1:
        whole = weight.detach()
        init_method(whole)
        return whole
    shape = list(weight.shape)
    shape[dim] *= size
    whole = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    init_method(whole)
    weight.detach().copy_(torch.cat(torch.split(whole, width, dim=dim)[rank::size], dim=dim))
    return whole


def whole_of(weight: torch.Tensor, dim: int, state: TensorParallel, stride: int = 1) -> torch.Tensor:
    """Return the whole weight, from the parts of all ranks of the group: the inverse of ``fill_part``."""
    size = state.get_tensor_parallel_world_size()
    part = weight.detach().contiguous()
    if size == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part, group=state.get_tensor_parallel_group())
    blocks = [torch.chunk(each, stride, dim=dim) for each in parts]
    return torch.cat([blocks[rank][block] for block in range(stride) for rank in range(size)], dim=dim)


class ParallelLayer(nn.Module):
    """A layer with one weight, which is sharded along the dimension ``_sharded``."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: torch.Tensor | None
    _sharded: int
    _stride: int

    def __init__(self, state: TensorParallel | None) -> None:
        super().__init__()
        self._given_state = state
        self._built_for = self._state.get_tensor_parallel_world_size()

    @property
    def _state(self) -> TensorParallel:
        # The module-level state is not kept: a saved layer belongs to whatever process loads it.
        return default if self._given_state is None else self._given_state

    def _make_weight(self, rows: int, columns: int, init_method: InitMethod, stride: int, keep: bool) -> None:
        self._stride = stride
        self.weight = nn.Parameter(torch.empty(rows, columns))
        whole = fill_part(self.weight, self._sharded, init_method, self._state, stride)
        self.master_weight = whole if keep else None

    def _check_size(self) -> None:
        size = self._state.get_tensor_parallel_world_size()
        if size != self._built_for:
            raise SizesError(
                f"this {type(self).__name__} was built for tensor-parallel size {self._built_for}, and is in a group "
                f"of {size}; initialise first, then build the model",
                built_for=self._built_for,
                size=size,
            )

    def get_master_weight(self) -> torch.Tensor:
        """Return the whole weight, gathered from the group; every rank of it calls this."""
        self._check_size()
        return whole_of(self.weight, self._sharded, self._state, self._stride)


# -- embeddings -------------------------------------------------------------------------------------------------------


class _Embedding(ParallelLayer):
    """What embeddings have in common with ``torch.nn.Embedding``: its options, and the look-up in this rank's part."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
        *,
        state: TensorParallel | None = None,
    ) -> None:
        super().__init__(state)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _row(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        rows, columns = self._local_shape()
        self._make_weight(rows, columns, init_method, 1, keep=keep_master_weight_for_test)

    def _local_shape(self) -> tuple[int, int]:
        """Return the rows and columns of this rank's part."""
        raise NotImplementedError

    def _look_up(self, rows: torch.Tensor, padding: int | None) -> torch.Tensor:
        return F.embedding(
            rows, self.weight, padding, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class VocabParallelEmbedding(_Embedding):
    """An embedding whose rows are sharded over the group: each rank holds one range of the vocabulary.

    Input: indices of any shape; output: that shape with ``embedding_dim`` behind it, equal on every rank.
    """

    _sharded = 0

    def _local_shape(self) -> tuple[int, int]:
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            self.num_embeddings, self._state.get_tensor_parallel_rank(), self._built_for
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        return self.num_embeddings_per_partition, self.embedding_dim

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the rows of the indices, each from the rank that holds it."""
        self._check_size()
        if self._built_for == 1:
            return self._look_up(input_, self._local_padding)
        local = input_ - self.vocab_start_index
        here = (local >= 0) & (local < self.num_embeddings_per_partition)
        # An index outside the vocabulary is on no rank: it stays, and the table refuses it on every rank.
        elsewhere = ~here & (input_ >= 0) & (input_ < self.num_embeddings)
        if self.max_norm is None and not self.scale_grad_by_freq:
            rows = self._look_up(local.masked_fill(elsewhere, 0), self._local_padding)
            rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        else:
            # These two act on each row that is looked up, so only rows of this rank are.
            empty = self.weight.new_zeros(*input_.shape, self.embedding_dim)
            found = self._look_up(local[~elsewhere], self._local_padding)
            rows = empty.masked_scatter(~elsewhere.unsqueeze(-1), found)
        return mappings.reduce_from_tensor_parallel_region(rows, self._state)

    @property
    def _local_padding(self) -> int | None:
        """The padding row in this rank's part of the table, None where another rank holds it."""
        if self.padding_idx is None or not self.vocab_start_index <= self.padding_idx < self.vocab_end_index:
            return None
        return self.padding_idx - self.vocab_start_index


class ParallelEmbedding(_Embedding):
    """An embedding whose columns are sharded over the group; input and output as ``torch.nn.Embedding``.

    ``max_norm`` is refused in a group: the norm of a row needs its columns on all ranks.
    """

    _sharded = 1

    def _local_shape(self) -> tuple[int, int]:
        if self.max_norm is not None and self._built_for > 1:
            raise PlanError(
                f"max_norm {self.max_norm} cannot be kept by a ParallelEmbedding over {self._built_for} ranks; a row's "
                "norm needs all its columns; use VocabParallelEmbedding, or leave max_norm out",
                max_norm=self.max_norm,
            )
        self.embedding_dim_per_partition = divide_and_check_no_remainder(self.embedding_dim, self._built_for)
        return self.num_embeddings, self.embedding_dim_per_partition

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the rows of the indices, gathered from the group."""
        self._check_size()
        columns = self._look_up(input_, self.padding_idx)
        return mappings.gather_from_tensor_parallel_region(columns, self._state)


def _row(index: int | None, rows: int) -> int | None:
    """Return a padding index counted from the front; ``SizesError`` for one outside the table."""
    if index is None:
        return None
    if not -rows <= index < rows:
        raise SizesError(
            f"padding_idx {index} is outside a table of {rows} rows; give one from {-rows} to {rows - 1}",
            padding_idx=index,
            rows=rows,
        )
    return index % rows


# -- linear layers ----------------------------------------------------------------------------------------------------


class ColumnParallelLinear(ParallelLayer):
    """A linear layer whose outputs are sharded over the group: Y = X Aᵀ + b, and each rank has its columns of Y.

    Input (..., in_features), the same on every rank. Output (..., out_features) with ``gather_output``, else
    (..., out_features / size), this rank's columns. The bias starts at zero.
    """

    _sharded = 0

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
        """Return X Aᵀ + b, whole or this rank's columns."""
        self._check_size()
        copied = mappings.copy_to_tensor_parallel_region(input_, self._state)
        output = F.linear(copied, self.weight, self.bias)
        return mappings.gather_from_tensor_parallel_region(output, self._state) if self.gather_output else output


class RowParallelLinear(ParallelLayer):
    """A linear layer whose inputs are sharded over the group: Y = X Aᵀ + b, summed from each rank's columns of X.

    Input (..., in_features), or this rank's (..., in_features / size) with ``input_is_parallel``. Output
    (..., out_features), the same on every rank. The bias starts at zero and is whole on every rank.
    """

    _sharded = 1

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
        """Return X Aᵀ + b, equal on every rank."""
        self._check_size()
        part = input_ if self.input_is_parallel else mappings.scatter_to_tensor_parallel_region(input_, self._state)
        output = mappings.reduce_from_tensor_parallel_region(F.linear(part, self.weight), self._state)
        return output if self.bias is None else output + self.bias
