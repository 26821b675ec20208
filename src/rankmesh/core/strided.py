"""Strided patterns: the arithmetic that every mesh and group is made of.

A pattern is a list of (size, stride) pairs, the first pair varying fastest. It stands for the numbers

    value(k) = Σ digit[i](k) · stride[i]      digits of k in the mixed radix of the sizes, first fastest

so ``(2, 1), (4, 8)`` is a drawn table of two columns and four rows:

```
   k   0  1 | 2  3 |  4  5 |  6  7
value  0  1 | 8  9 | 16 17 | 24 25
```

Everything is closed form: stating a pattern is O(pairs), listing it is one numpy array.

>>> Strided(((2, 1), (4, 8))).values().tolist()
[0, 1, 8, 9, 16, 17, 24, 25]

Two pairs that continue each other are one pair; ``coalesced`` gives the one shortest form, so two patterns list
the same numbers in the same order if and only if their coalesced forms are equal (the "layout" of CuTe, which
``torch.distributed._mesh_layout`` uses as well).

>>> Strided(((2, 1), (1, 99), (4, 2))).coalesced()
Strided(pairs=((8, 1),))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

__all__ = ["IntArray", "Strided"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Strided:
    """An ordered list of (size, stride) pairs, the first varying fastest."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def dense(cls, sizes: Iterable[int]) -> Strided:
        """The pattern of a dense block: each stride is the product of the sizes before it.

        >>> Strided.dense((2, 3, 4))
        Strided(pairs=((2, 1), (3, 2), (4, 6)))
        """
        pairs, stride = [], 1
        for size in sizes:
            pairs.append((size, stride))
            stride *= size
        return cls(tuple(pairs))

    @property
    def size(self) -> int:
        """How many numbers the pattern lists."""
        return prod(size for size, _ in self.pairs)

    def value(self, index: int) -> int:
        """The number at position ``index``; O(pairs)."""
        total = 0
        for size, stride in self.pairs:
            index, digit = divmod(index, size)
            total += digit * stride
        return total

    def digits(self, number: int) -> tuple[int, ...]:
        """The digit of ``number`` along each pair, for a number of the dense block that the pairs come from."""
        return tuple(number // stride % size for size, stride in self.pairs)

    def position(self, digits: Iterable[int]) -> int:
        """The position at which the pattern lists the number with these digits; inverse of ``value``."""
        index, weight = 0, 1
        for (size, _), digit in zip(self.pairs, digits, strict=True):
            index += digit * weight
            weight *= size
        return index

    def values(self) -> IntArray:
        """All numbers in order, shape ``(size,)``."""
        total = np.zeros(1, dtype=np.int64)
        for size, stride in self.pairs:
            steps = np.arange(size, dtype=np.int64) * stride
            total = (steps[:, None] + total[None, :]).reshape(-1)
        return total

    def coalesced(self) -> Strided:
        """The shortest pattern that lists the same numbers in the same order."""
        merged: list[tuple[int, int]] = []
        for size, stride in self.pairs:
            if size == 1:
                continue
            if merged and stride == merged[-1][0] * merged[-1][1]:
                merged[-1] = (merged[-1][0] * size, merged[-1][1])
            else:
                merged.append((size, stride))
        return Strided(tuple(merged))

    def __str__(self) -> str:
        """Sizes and strides for people: ``4x2`` is four numbers two apart.

        >>> str(Strided(((2, 1), (4, 8)))), str(Strided(()))
        ('2x1, 4x8', '1')
        """
        return ", ".join(f"{size}x{stride}" for size, stride in self.pairs) or "1"
