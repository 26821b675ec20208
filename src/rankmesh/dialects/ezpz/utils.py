"""Sizes that must divide, and pieces of tensors. The module's name is ezpz's.

>>> divide_and_check_no_remainder(12, 4)
3
"""

from __future__ import annotations

import torch

from rankmesh.errors import SizesError

__all__ = ["divide_and_check_no_remainder", "ensure_divisibility", "split_tensor_along_last_dim"]


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
