"""The rank range of a mesh: the global ranks that it covers, and the order in which it takes them.

    rank = offset + position                  without a rank map
    rank = rank_map[position]                 with one

```
position   0  1  2  3
rank       4  5  6  7        Mesh(tp=2, dp=2, offset=4)
rank       4  6  5  7        the same with rank_map=(4, 6, 5, 7)
rank       1  3  5  7        a slice of a larger mesh, whose ranks are apart: rank_map=(1, 3, 5, 7)
```

A coordinate always belongs to a *position*; the rank map has the rank of each position. So a group's members are
listed in the order of their coordinates, whatever their rank numbers are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rankmesh.core.axes import integer, items_of
from rankmesh.core.strided import IntArray
from rankmesh.errors import LayoutError, in_words, quoted

__all__ = ["RankRange"]


@dataclass(frozen=True)
class RankRange:
    """``size`` global ranks, the lowest of them ``offset``, taken in the order of ``rank_map``.

    Without a map they are consecutive and ascend.
    """

    offset: int
    size: int
    rank_map: tuple[int, ...] | None = None

    @classmethod
    def of(cls, offset: object, size: int, rank_map: Iterable[int] | None) -> RankRange:
        """Return consecutive ranks from ``offset`` on, in any order; the identity map counts as none."""
        start = integer(offset, "offset", least=0)
        return cls(start, size).ordered(rank_map)

    @classmethod
    def at(cls, ranks: IntArray) -> RankRange:
        """Return these ranks, all different, in this order; they may be apart.

        >>> RankRange.at(np.array([1, 5])), RankRange.at(np.array([4, 5]))
        (RankRange(offset=1, size=2, rank_map=(1, 5)), RankRange(offset=4, size=2, rank_map=None))
        """
        first = int(ranks.min())
        ascending = np.array_equal(ranks, np.arange(first, first + len(ranks)))
        return cls(first, len(ranks), None if ascending else tuple(ranks.tolist()))

    def ordered(self, rank_map: Iterable[int] | None, *, consecutive: bool = True) -> RankRange:
        """Return the range in the order of a map, which lists each of its ranks once; None: ascending.

        A map that is not ``consecutive`` lists as many other ranks, which may be apart.
        """
        if rank_map is None:
            return self if self.rank_map is None else RankRange.at(self.ascending)
        given = items_of(rank_map)
        if given is None:
            raise LayoutError(
                f"rank_map is {quoted(rank_map)}; list the global rank at each position, such as (0, 2, 1, 3)",
                received=rank_map,
            )
        try:
            ranks = np.asarray(given)
        except ValueError:  # lists of several lengths
            ranks = np.asarray(given, dtype=object)
        integers = ranks.shape == (self.size,) and ranks.dtype.kind in "iu" and int(ranks.min()) >= 0
        if not integers or not np.array_equal(np.sort(ranks), self.ascending if consecutive else np.unique(ranks)):
            wanted = f"each of {self}" if consecutive else f"{self.size} different ranks"
            raise LayoutError(
                f"rank_map {quoted(ranks.tolist())} has {ranks.size} entries for a mesh of {self.size} ranks; list "
                f"{wanted} exactly once, in the order of positions",
                received=tuple(ranks.tolist()),
                offset=self.offset,
                size=self.size,
            )
        return RankRange.at(ranks)

    def moved(self, offset: int) -> RankRange:
        """Move all ranks so that the lowest is ``offset``; their order stays."""
        step = offset - self.offset
        return RankRange(offset, self.size, self.rank_map and tuple(rank + step for rank in self.rank_map))

    @cached_property
    def stop(self) -> int:
        """One past the last rank."""
        return self.offset + self.size if self.rank_map is None else max(self.rank_map) + 1

    @cached_property
    def consecutive(self) -> bool:
        """True if no rank between the first and the last is left out."""
        return self.stop - self.offset == self.size

    @property
    def members(self) -> range | tuple[int, ...]:
        """The ranks, ascending."""
        return range(self.offset, self.stop) if self.consecutive else tuple(self.ascending.tolist())

    @cached_property
    def ascending(self) -> IntArray:
        """The ranks as an int64 array of shape ``(size,)``, ascending."""
        return np.arange(self.offset, self.stop) if self.consecutive else np.sort(self._ranks)

    def __contains__(self, rank: object) -> bool:
        try:
            number = operator.index(rank)  # type: ignore[arg-type]  # TypeError is caught
        except TypeError:
            return False
        return self.offset <= number < self.stop and (
            self.consecutive or int(self._positions[number - self.offset]) >= 0
        )

    @cached_property
    def _ranks(self) -> IntArray:
        return np.asarray(self.rank_map, dtype=np.int64)

    @cached_property
    def _positions(self) -> IntArray:
        """The position of each rank from the first to the last, -1 for ranks that are left out."""
        positions = np.full(self.stop - self.offset, -1, dtype=np.int64)
        positions[self.ranks(np.arange(self.size)) - self.offset] = np.arange(self.size)
        return positions

    def ranks(self, positions: IntArray) -> IntArray:
        """Return the global ranks at these positions, same shape."""
        return positions + self.offset if self.rank_map is None else self._ranks[positions]

    def rank(self, position: int) -> int:
        """Return the global rank at one position."""
        return self.offset + position if self.rank_map is None else self.rank_map[position]

    def positions(self, ranks: IntArray) -> IntArray:
        """Return the position of each of these ranks, same shape; -1 for those outside."""
        inside = (ranks >= self.offset) & (ranks < self.stop)
        if self.rank_map is None:
            return np.where(inside, ranks - self.offset, -1)
        return np.where(inside, self._positions[np.where(inside, ranks - self.offset, 0)], -1)

    def position(self, rank: object) -> int:
        """Return the position of one global rank; a rank outside is refused."""
        number = integer(rank, "rank", least=0)
        if number not in self:
            raise LayoutError(
                f"rank {number} is outside this mesh, which covers {self}; "
                "ask for a rank inside, or set the mesh's offset and sizes to cover it",
                rank=number,
                first=self.offset,
                last=self.stop - 1,
            )
        return number - self.offset if self.rank_map is None else int(self._positions[number - self.offset])

    def __str__(self) -> str:
        """Return the ranks for a message: ``ranks 4 to 7``, or ``ranks 1, 3, 5, 7`` where they are apart."""
        if self.consecutive:
            return f"ranks {self.offset} to {self.stop - 1}"
        return in_words(self.members)
