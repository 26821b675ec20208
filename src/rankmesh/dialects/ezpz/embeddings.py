"""Embeddings cut over the tensor-parallel group: by rows, the vocabulary, or by columns, the embedding dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own habit
from torch.nn import init

from rankmesh.dialects.ezpz import mappings
from rankmesh.dialects.ezpz.layer import ParallelLayer
from rankmesh.dialects.ezpz.state import TensorParallel
from rankmesh.dialects.ezpz.utils import VocabUtility, divide_and_check_no_remainder
from rankmesh.dialects.ezpz.weights import InitMethod
from rankmesh.errors import PlanError, SizesError

__all__ = ["ParallelEmbedding", "VocabParallelEmbedding"]


class VocabParallelEmbedding(ParallelLayer):
    """An embedding whose rows are spread over the group: each rank holds the range of the vocabulary that is its own.

    Input: indices of any shape; output: that shape with ``embedding_dim`` behind it, the same on every rank.
    """

    _cut = 0

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
        *,
        state: TensorParallel | None = None,
    ) -> None:
        super().__init__(state)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _row(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, self._state.get_tensor_parallel_rank(), self._built_for
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        self._make_weight(self.num_embeddings_per_partition, embedding_dim, init_method, 1, keep=False)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """The rows of the indices, each from the rank that holds it."""
        self._check_size()
        if self._built_for == 1:
            return self._look_up(input_)
        local = input_ - self.vocab_start_index
        own = (local >= 0) & (local < self.num_embeddings_per_partition)
        # An index outside the vocabulary is nobody's: it stays, and the table refuses it on every rank.
        elsewhere = ~own & (input_ >= 0) & (input_ < self.num_embeddings)
        if self.max_norm is None and not self.scale_grad_by_freq:
            rows = self._look_up(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        else:
            # These two act on each row that is looked up, so only own rows may be.
            empty = self.weight.new_zeros(*input_.shape, self.embedding_dim)
            rows = empty.masked_scatter(~elsewhere.unsqueeze(-1), self._look_up(local[~elsewhere]))
        return mappings.reduce_from_tensor_parallel_region(rows, self._state)

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(
            rows,
            self.weight,
            self._own_padding,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )

    @property
    def _own_padding(self) -> int | None:
        """The padding row in this rank's part of the table, None where another rank holds it."""
        if self.padding_idx is None or not self.vocab_start_index <= self.padding_idx < self.vocab_end_index:
            return None
        return self.padding_idx - self.vocab_start_index


class ParallelEmbedding(ParallelLayer):
    """An embedding whose columns are spread over the group; input and output as ``torch.nn.Embedding``.

    ``max_norm`` is refused in a group: the norm of a row needs its columns on all ranks.
    """

    _cut = 1

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
        if max_norm is not None and self._built_for > 1:
            raise PlanError(
                f"max_norm {max_norm} cannot be kept by a ParallelEmbedding over {self._built_for} ranks; a row's norm "
                "needs all its columns, and each rank holds some; use VocabParallelEmbedding, or leave max_norm out",
                max_norm=max_norm,
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _row(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.embedding_dim_per_partition = divide_and_check_no_remainder(embedding_dim, self._built_for)
        self._make_weight(
            num_embeddings, self.embedding_dim_per_partition, init_method, 1, keep=keep_master_weight_for_test
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """The rows of the indices, gathered from the group."""
        self._check_size()
        columns = F.embedding(
            input_,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        return mappings.gather_from_tensor_parallel_region(columns, self._state)


def _row(index: int | None, rows: int) -> int | None:
    """A padding index counted from the front; ``SizesError`` for one outside the table."""
    if index is None:
        return None
    if not -rows <= index < rows:
        raise SizesError(
            f"padding_idx {index} is outside a table of {rows} rows; give one from {-rows} to {rows - 1}",
            padding_idx=index,
            rows=rows,
        )
    return index % rows
