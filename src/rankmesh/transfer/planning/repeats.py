"""Repeats: the digits of a rank on which nothing of a transfer depends, so that one of each class of ranks is planned.

```
Mesh(tp=2, dp=4, pp=2) -> Mesh(tp=4, dp=2, pp=2)       rank = tp + 2·(…) + 4·d + 8·pp        d: 2 values, to no effect

ranks          0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15        what 4..7 need and hold is what 0..3 do
planned        0 1 2 3           | 4 5  6  7                      the rest has the same shares
```

Ranks with all digits but these in common hold the same, ask for the same and send as much. So shares are computed
among the planned ranks, whose number does not grow with the digits, and each set of copies that a digit does not
leave repeats its members and those that ask of it for each value of the digit. Where they stand is closed form.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import NamedTuple, TypeVar

from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Axis, ShardMap
from rankmesh.core.strided import IntArray

__all__ = ["ByteRange", "Repeated", "Repeats"]

_Rank = TypeVar("_Rank", int, IntArray)


@dataclass(frozen=True)
class Repeats:
    """``digits``: the size and stride of each digit to no effect, the lowest first; none: every rank is planned."""

    digits: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, maps: Iterable[ShardMap], widths: Sequence[int] = ()) -> Repeats:
        """Return the digits on which no shard map depends; ``widths``: ranks of a unit, at each level of a cluster.

        A digit may tell the units of a level apart, as long as it lies inside them or outside of them.
        """
        known = dict.fromkeys(maps)
        ranges = {where.mesh.rank_range for where in known}
        if not ranges or any(each.rank_map is not None for each in ranges):
            return cls()
        axes = {axis for where in known for axis in (*(a for of in where.axes for a in of), *(a for a, _ in where.at))}
        common = gcd(*(number for each in ranges for number in (each.offset, each.size)))
        edges = {edge for size, stride in axes for edge in (stride, stride * size)}
        found = []
        for low, high in pairwise(sorted({1, common, *(edge for edge in (*edges, *widths) if edge <= common)})):
            apart = all(stride % high == 0 or low % (stride * size) == 0 for size, stride in axes)
            if apart and high % low == 0 and common % high == 0 and all(w % high == 0 or low % w == 0 for w in widths):
                found.append((high // low, low))
        return cls(tuple(found))

    def planned(self, rank: _Rank) -> _Rank:
        """Return which planned rank each of these is, by its number among the planned ones."""
        for size, stride in reversed(self.digits):
            rank = rank // (size * stride) * stride + rank % stride
        return rank

    def values(self, rank: int) -> tuple[int, ...]:
        """Return the digits of a rank, the lowest first."""
        return tuple(rank // stride % size for size, stride in self.digits)

    def rank(self, planned: int, values: Iterable[int]) -> int:
        """Return the rank of a planned one with these digits."""
        for (size, stride), value in zip(self.digits, values, strict=True):
            planned = (planned // stride * size + value) * stride + planned % stride
        return planned

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each digit among planned ranks."""
        before = accumulate((size for size, _ in self.digits), lambda one, other: one * other, initial=1)
        return tuple(stride // lower for (_, stride), lower in zip(self.digits, before, strict=False))

    def within(self, width: int) -> Repeats:
        """Return the digits inside the units of so many ranks."""
        return Repeats(tuple(digit for digit in self.digits if digit[0] * digit[1] <= width))

    def unit(self, planned: _Rank, width: int) -> _Rank:
        """Return the unit of so many ranks that each planned rank is in, numbered as planned ranks are."""
        return planned // (width // prod(size for size, _ in self.within(width).digits))

    def map(self, where: ShardMap) -> ShardMap:
        """Return a shard map of the planned ranks."""

        def axis(of: Axis) -> Axis:
            return of[0], of[1] // prod(size for size, stride in self.digits if stride < of[1])

        each, ranks = prod(size for size, _ in self.digits), where.mesh.rank_range
        mesh = Mesh(ranks=ranks.size // each, offset=ranks.offset // each)
        axes = tuple(tuple(axis(each) for each in of) for of in where.axes)
        return ShardMap(mesh, axes, tuple((axis(of), kept) for of, kept in where.at))


class ByteRange(NamedTuple):
    """Bytes ``start`` to ``stop - 1``, which belong to the rank that is planned as ``rank`` and has these digits."""

    rank: int
    values: tuple[int, ...]
    start: int
    stop: int


class Repeated:
    """Stretches of planned ranks laid side by side in the order of the ranks, each repeated for every digit.

    ``ranks`` ascend, and ``lengths`` has the bytes of each.

    >>> row = Repeated([0, 1], [10, 20], Repeats(((3, 1),)))      # ranks 0 1 2 of 10 bytes, 3 4 5 of 20
    >>> row.byte_range(1, (2,)), row.at(75).values
    (ByteRange(rank=1, values=(2,), start=70, stop=90), (2,))
    """

    def __init__(self, ranks: Sequence[int], lengths: Iterable[int], repeats: Repeats) -> None:
        self.ranks, self._ends = ranks, [0, *accumulate(lengths)]
        self._digits = [*zip((size for size, _ in repeats.digits), repeats.strides, strict=True)][::-1]
        self._many = prod(size for size, _ in self._digits)

    def byte_range(self, rank: int, values: tuple[int, ...]) -> ByteRange:
        """Return the stretch of a planned rank of ``ranks`` with these digits, the lowest first."""
        low, high, start, many = 0, len(self.ranks), 0, self._many
        for (size, stride), value in zip(self._digits, reversed(values), strict=True):
            first, (low, high) = low, self._block(rank, stride, low, high)
            start += self._bytes(first, low) * many
            many //= size
            start += self._bytes(low, high) * many * value
        here = bisect_left(self.ranks, rank, low, high)
        start += self._bytes(low, here)
        return ByteRange(rank, values, start, start + self._bytes(here, here + 1))

    def at(self, place: int) -> ByteRange:
        """Return the stretch that a byte belongs to."""
        low, high, many, values = 0, len(self.ranks), self._many, []
        left = place
        for size, stride in self._digits:
            here = bisect_right(self._ends, self._ends[low] + left // many, low, high) - 1
            first, (low, high) = low, self._block(self.ranks[here], stride, low, high)
            left -= self._bytes(first, low) * many
            many //= size
            value, left = divmod(left, self._bytes(low, high) * many)
            values.append(value)
        here = bisect_right(self._ends, self._ends[low] + left, low, high) - 1
        start = place - left + self._bytes(low, here)
        return ByteRange(self.ranks[here], tuple(values[::-1]), start, start + self._bytes(here, here + 1))

    def over(self, of: ByteRange) -> Iterator[ByteRange]:
        """Yield the stretches that the bytes of another belong to."""
        place = of.start
        while place < of.stop:
            found = self.at(place)
            yield found
            place = found.stop

    def _bytes(self, first: int, last: int) -> int:
        return self._ends[last] - self._ends[first]

    def _block(self, rank: int, stride: int, low: int, high: int) -> tuple[int, int]:
        """Return from where to where ranks have all digits above a stride in common with a rank."""
        first = rank // stride * stride
        return bisect_left(self.ranks, first, low, high), bisect_left(self.ranks, first + stride, low, high)
