"""Cuts: how one tensor dimension is cut over axes, as intervals.

    each = ⌈length / size⌉      piece d = [d · each, (d + 1) · each) ∩ [0, length)      as ``torch.chunk`` cuts

A dimension that several axes cut is cut by the outermost first, and each piece again by the next. The *shard* along a
dimension is the number that the positions along those axes make, the innermost varying fastest:

```
length 10 over "dp-tp", dp=2, tp=2      shard  0      1      2      3
                                        holds  0..2   3..4   5..7   8..9
```

``parts`` cut a fused dimension part by part, so that a shard holds a piece of each (here query, key and value):

```
parts (8, 2, 2) over tp=2               shard 0 holds 0..3, 8, 10     shard 1 holds 4..7, 9, 11
```

``padded`` is the length that is cut where more is stored: the pieces divide the padded length, and no shard
holds elements beyond the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from rankmesh.core.strided import IntArray

__all__ = ["Cut", "Overlaps", "overlaps"]


@dataclass(frozen=True)
class Cut:
    """One dimension: the sizes of the axes that cut it (outermost first), its parts, and the length that is cut."""

    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    padded: int

    @property
    def length(self) -> int:
        """Number of elements of the dimension, without padding."""
        return sum(self.parts)

    @property
    def shards(self) -> int:
        """Number of shards of the dimension."""
        return prod(self.sizes)

    def intervals(self, digits: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the parts of the shard at these positions, each as (start, stop, its start in the shard).

        >>> Cut((2,), (8, 2, 2), 12).intervals((1,))
        [(4, 8, 0), (9, 10, 4), (11, 12, 5)]
        """
        found: list[tuple[int, int, int]] = []
        begin, place = 0, 0
        for length, stored in zip(self.parts, self._stored, strict=True):
            low, high = _piece(stored, self.sizes, digits)
            first, last = begin + min(low, length), begin + min(high, length)
            if found and first == found[-1][1]:  # goes on where the part before ended
                found[-1] = (found[-1][0], last, found[-1][2])
            elif first < last:
                found.append((first, last, place))
            begin, place = begin + length, place + high - low
        return found

    def extent(self, digits: Sequence[int]) -> int:
        """Return the length of the shard at these positions, its padding included."""
        pieces = (_piece(stored, self.sizes, digits) for stored in self._stored)
        return sum(high - low for low, high in pieces)

    @property
    def _stored(self) -> tuple[int, ...]:
        """The parts as they are stored: padding follows the one part that there is."""
        return (self.padded,) if len(self.parts) == 1 else self.parts

    def bounds(self) -> tuple[IntArray, IntArray]:
        """Return the starts of the pieces, ascending, and the shard of each; together they cover the dimension."""
        shards = np.arange(self.shards, dtype=np.int64)
        starts, owners, begin = [], [], 0
        for length, stored in zip(self.parts, self._stored, strict=True):
            low, high = _pieces(stored, self.sizes, shards)
            low, high = np.minimum(low, length), np.minimum(high, length)
            starts.append((begin + low)[low < high])
            owners.append(shards[low < high])
            begin += length
        return np.concatenate(starts), np.concatenate(owners)


def _piece(length: int, sizes: Sequence[int], digits: Sequence[int]) -> tuple[int, int]:
    low, high = 0, length
    for size, digit in zip(sizes, digits, strict=True):
        each = -(-(high - low) // size)
        low = min(low + digit * each, high)
        high = min(low + each, high)
    return low, high


def _pieces(length: int, sizes: Sequence[int], shards: IntArray) -> tuple[IntArray, IntArray]:
    """Return ``_piece`` of many shards at once."""
    low, high = np.zeros_like(shards), np.full_like(shards, length)
    rest = prod(sizes)
    for size in sizes:
        rest //= size
        each = -(-(high - low) // size)
        low = np.minimum(low + shards // rest % size * each, high)
        high = np.minimum(low + each, high)
    return low, high


@dataclass(frozen=True)
class Overlaps:
    """Intervals of two cuts of a dimension: [``start[k]``, ``stop[k]``) is in shards ``source[k]`` and ``target[k]``.

    ``pairs`` has each pair of shards once, as (source, target, elements).
    """

    source: IntArray
    target: IntArray
    start: IntArray
    stop: IntArray
    pairs: tuple[IntArray, IntArray, IntArray]

    def between(self, source: int, target: int) -> list[tuple[int, int]]:
        """Return the intervals that this pair of shards has in common."""
        both = (self.source == source) & (self.target == target)
        return list(zip(self.start[both].tolist(), self.stop[both].tolist(), strict=True))


@lru_cache(maxsize=1024)
def overlaps(source: Cut, target: Cut) -> Overlaps:
    """Intersect the shards of two cuts; each element of the dimension is in one interval.

    >>> found = overlaps(Cut((2,), (12,), 12), Cut((3,), (12,), 12))
    >>> [array.tolist() for array in (found.source, found.target, found.start, found.stop)]
    [[0, 0, 1, 1], [0, 1, 1, 2], [0, 4, 6, 8], [4, 6, 8, 12]]
    """
    (left, left_shards), (right, right_shards) = source.bounds(), target.bounds()
    starts = np.sort(np.concatenate([left, right]))
    ours = left_shards[np.searchsorted(left, starts, "right") - 1]
    theirs = right_shards[np.searchsorted(right, starts, "right") - 1]
    new = np.ones(len(starts), dtype=bool)
    new[1:] = (ours[1:] != ours[:-1]) | (theirs[1:] != theirs[:-1])
    ours, theirs, starts = ours[new], theirs[new], starts[new]
    stops = np.append(starts[1:], source.length)[: len(starts)]
    return Overlaps(ours, theirs, starts, stops, _totals(ours, theirs, stops - starts, target.shards))


def _totals(ours: IntArray, theirs: IntArray, lengths: IntArray, shards: int) -> tuple[IntArray, IntArray, IntArray]:
    keys, pair = np.unique(ours * shards + theirs, return_inverse=True)
    totals = np.zeros(len(keys), dtype=np.int64)
    np.add.at(totals, pair, lengths)
    return keys // shards, keys % shards, totals
