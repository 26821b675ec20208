"""Sizes that must divide, and pieces of tensors and vocabularies. The module's name is ezpz's.

>>> divide_and_check_no_remainder(12, 4)
3
>>> VocabUtility.vocab_range_from_global_vocab_size(100, rank=1, world_size=4)
(25, 50)
"""

from __future__ import annotations

import torch

from rankmesh.errors import SizesError

__all__ = ["VocabUtility", "divide_and_check_no_remainder", "ensure_divisibility", "split_tensor_along_last_dim"]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ``SizesError``, an ``AssertionError``, unless the denominator divides the numerator.

    >>> ensure_divisibility(10, 4)
    Traceback (most recent call last):
    rankmesh.errors.SizesError: 4 does not divide 10 without remainder; change one of them
    """
    if denominator == 0 or numerator % denominator:
        raise SizesError(
            f"{denominator} does not divide {numerator} without remainder; change one of them",
            numerator=numerator,
            denominator=denominator,
        )


def divide_and_check_no_remainder(numerator: int, denominator: int) -> int:
    """Return the quotient; ``SizesError`` unless it is whole."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the tensor of shape (..., n) as ``num_partitions`` tensors of shape (..., n / num_partitions).

    They are views of it, unless ``contiguous_split_chunks`` asks for tensors of their own.
    """
    width = divide_and_check_no_remainder(tensor.size(-1), num_partitions)
    pieces = torch.split(tensor, width, dim=-1)
    return tuple(piece.contiguous() for piece in pieces) if contiguous_split_chunks else tuple(pieces)


class VocabUtility:
    """Which rows of a vocabulary a rank holds: from the first index to one before the last."""

    @staticmethod
    def get_vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, _: int = 0
    ) -> tuple[int, int]:
        """Return a rank's range where each has ``per_partition_vocab_size`` rows; the last argument is not used."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the range of a rank where ``world_size`` ranks share the vocabulary; ``SizesError`` unless equally."""
        rows = divide_and_check_no_remainder(global_vocab_size, world_size)
        return VocabUtility.get_vocab_range_from_per_partition_vocab_size(rows, rank, world_size)
