"""The span of a mesh: the contiguous global ranks that it covers, and the order in which it takes them.

    rank = offset + position                  without a rank map
    rank = rank_map[position]                 with one: a permutation of offset ... offset + size - 1

```
position   0  1  2  3            position   0  1  2  3
rank       4  5  6  7            rank       4  6  5  7        rank_map=(4, 6, 5, 7)
```

A coordinate always belongs to a *position*; the rank map says which process sits there. So a group's members are
listed in the order of their coordinates, whatever their rank numbers are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rankmesh.core.axes import integer
from rankmesh.core.strided import IntArray
from rankmesh.errors import LayoutError

__all__ = ["RankRange"]


@dataclass(frozen=True)
class RankRange:
    """``size`` global ranks from ``offset`` on, taken in the order of ``rank_map`` (None: ascending)."""

    offset: int
    size: int
    rank_map: tuple[int, ...] | None = None

    @classmethod
    def of(cls, offset: object, size: int, rank_map: Iterable[int] | None) -> RankRange:
        """A checked span; the identity map is normalised to None."""
        start = integer(offset, "offset", least=0)
        if rank_map is None:
            return cls(start, size)
        if not isinstance(rank_map, Iterable):
            raise LayoutError(
                f"received {rank_map!r} as rank_map; list the global rank at each position, such as (0, 2, 1, 3)",
                received=rank_map,
            )
        ranks = np.asarray(list(rank_map))
        if not _permutes(ranks, start, size):
            raise LayoutError(
                f"received a rank_map of {ranks.size} entries for a mesh of {size} ranks from {start}; it must list "
                f"each of {start} to {start + size - 1} exactly once, in the order of positions",
                received=tuple(ranks.tolist()),
                offset=start,
                size=size,
            )
        if np.array_equal(ranks, np.arange(start, start + size)):
            return cls(start, size)
        return cls(start, size, tuple(int(rank) for rank in ranks.tolist()))

    @property
    def stop(self) -> int:
        """One past the last rank of the span."""
        return self.offset + self.size

    @property
    def members(self) -> range:
        """The ranks of the span, ascending."""
        return range(self.offset, self.stop)

    def __contains__(self, rank: object) -> bool:
        try:
            return self.offset <= operator.index(rank) < self.stop  # type: ignore[arg-type]  # TypeError is caught
        except TypeError:
            return False

    @cached_property
    def _forward(self) -> IntArray | None:
        return None if self.rank_map is None else np.asarray(self.rank_map, dtype=np.int64)

    @cached_property
    def _inverse(self) -> IntArray | None:
        return None if self._forward is None else np.argsort(self._forward)

    def ranks(self, positions: IntArray) -> IntArray:
        """The global ranks at these positions, same shape."""
        return positions + self.offset if self._forward is None else self._forward[positions]

    def rank(self, position: int) -> int:
        """The global rank at one position."""
        return self.offset + position if self.rank_map is None else self.rank_map[position]

    def position(self, rank: object) -> int:
        """The position of one global rank; a rank outside the span is refused."""
        number = integer(rank, "rank", least=0)
        if number not in self:
            raise LayoutError(
                f"received rank {number}; this mesh covers ranks {self.offset} to {self.stop - 1}; "
                "ask for a rank inside, or set the mesh's offset and sizes to cover it",
                rank=number,
                first=self.offset,
                last=self.stop - 1,
            )
        return number - self.offset if self._inverse is None else int(self._inverse[number - self.offset])


def _permutes(ranks: IntArray, start: int, size: int) -> bool:
    if ranks.shape != (size,) or ranks.dtype.kind not in "iu":
        return False
    return bool(np.array_equal(np.sort(ranks), np.arange(start, start + size)))
