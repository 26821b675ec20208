"""Strided patterns: the arithmetic that every mesh and group is made of.

A pattern is a list of (size, stride) pairs, the first pair varying fastest. It stands for the numbers

    value(k) = Σ digit[i](k) · stride[i]      digits of k in the mixed radix of the sizes, first fastest

so ``(2, 1), (4, 8)`` is a drawn table of two columns and four rows:

```
   k   0  1 | 2  3 |  4  5 |  6  7
value  0  1 | 8  9 | 16 17 | 24 25
```

Everything is closed form: stating a pattern is O(pairs), listing it is one numpy array.

The constructor gives the one shortest form: pairs of size 1 are left out, and two pairs that continue each other are
one. So two patterns list the same numbers in the same order if and only if they are equal (the "layout" of CuTe, which
``torch.distributed._mesh_layout`` uses as well).

>>> Strided(((2, 1), (1, 99), (4, 2)))
Strided(pairs=((8, 1),))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["IntArray", "Strided"]

IntArray = npt.NDArray[np.int64]
_Number = TypeVar("_Number", int, IntArray)


@dataclass(frozen=True)
class Strided:
    """An ordered list of (size, stride) pairs, the first varying fastest; equal when it lists the same numbers."""

    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        merged: list[tuple[int, int]] = []
        for size, stride in self.pairs:
            if size == 1:
                continue
            if merged and stride == merged[-1][0] * merged[-1][1]:
                merged[-1] = (merged[-1][0] * size, merged[-1][1])
            else:
                merged.append((size, stride))
        object.__setattr__(self, "pairs", tuple(merged))

    @cached_property
    def size(self) -> int:
        """Number of numbers that the pattern lists."""
        return prod([size for size, _ in self.pairs])

    def value(self, index: int) -> int:
        """Return the number at position ``index``; O(pairs)."""
        total = 0
        for size, stride in self.pairs:
            index, digit = divmod(index, size)
            total += digit * stride
        return total

    def position(self, number: _Number) -> _Number:
        """Return the position of a number, or of each in an array; only the part along the pairs counts."""
        index, weight = number * 0, 1
        for size, stride in self.pairs:
            index = index + number // stride % size * weight
            weight *= size
        return index

    def values(self) -> IntArray:
        """Return all numbers in order, shape ``(size,)``."""
        total = np.zeros(1, dtype=np.int64)
        for size, stride in self.pairs:
            steps = np.arange(size, dtype=np.int64) * stride
            total = (steps[:, None] + total[None, :]).reshape(-1)
        return total

    def complement(self, size: int) -> Strided:
        """Return the pattern of the rest: each number below ``size`` is one value of this pattern plus one of the rest.

        >>> Strided(((2, 1), (4, 8))).complement(64)
        Strided(pairs=((4, 2), (2, 32)))
        """
        pairs, covered = [], 1
        for width, stride in sorted(self.pairs, key=lambda pair: pair[1]):
            pairs.append((stride // covered, covered))
            covered = stride * width
        return Strided((*pairs, (size // covered, covered)))

    def between(self, stride: int, width: int) -> Strided | None:
        """Return the pattern at positions ``0, stride, ... (width - 1) * stride``; None where no pattern lists them.

        >>> Strided(((2, 1), (4, 8))).between(2, 4)
        Strided(pairs=((4, 8),))
        """
        pairs, seen = [], 1
        for size, step in self.pairs:
            low, high = max(seen, stride), min(seen * size, stride * width)
            if low < high:
                if low % seen or high % low or (seen * size) % high:
                    return None
                pairs.append((high // low, step * (low // seen)))
            seen *= size
        return Strided(tuple(pairs))

    def __str__(self) -> str:
        """Sizes and strides for people: ``4x2`` is four numbers two apart.

        >>> str(Strided(((2, 1), (4, 8)))), str(Strided(()))
        ('2x1, 4x8', '1')
        """
        return ", ".join(f"{size}x{stride}" for size, stride in self.pairs) or "1"
