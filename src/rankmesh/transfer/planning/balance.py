"""Balance: how much each holder of copies sends, so that the busiest of all ranks sends as little as it can.

Each *set* of holders is asked for some bytes, which its members may share in any way; a rank is a member of many sets:

```
set {0, 1} is asked for 6      set {1, 2} for 2            rank 0   1   2
                                                           4   2 + 0   2          the busiest sends 4
```

The sets of one *block* share no ranks, so the best shares of a whole block, given what its ranks send otherwise, are
one pass: fill the least busy members of each set up to one level. Passing over the blocks again and again ends where
no load can be lowered, since the sum of squared loads is convex and what one set gives does not bind another.

The loads give a bound of the least possible: whatever is asked of sets that lie wholly inside the
k busiest ranks must be sent by these, so 1/k of it is a bound (by duality the best k makes it exact at the end).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from rankmesh.core.strided import IntArray

__all__ = ["Sets", "share"]

Floats = npt.NDArray[np.float64]

# Loads this near to the bound are as good as equal; passes over the blocks beyond this many gain next to nothing.
_NEAR, _PASSES = 1.001, 200


@dataclass(frozen=True, eq=False)
class Sets:
    """Sets of ranks, the members of each listed one after the other.

    ``start``   where each set's members start, and one past the last
    ``ranks``   the members
    ``asked``   the bytes that each set is asked for, multiples of one unit
    ``block``   of each set: sets of one block share no ranks
    """

    start: IntArray
    ranks: IntArray
    asked: IntArray
    block: IntArray

    @property
    def of(self) -> IntArray:
        """The set of each member."""
        return np.repeat(np.arange(len(self.asked)), np.diff(self.start))


def share(sets: Sets, unit: int) -> tuple[IntArray, int]:
    """Return the bytes that each member of each set sends, and the least that the busiest rank could send.

    The shares are multiples of ``unit`` that add up to what the set is asked for.
    """
    if not len(sets.asked):
        return sets.ranks, 0
    of, sizes = sets.of, np.diff(sets.start)
    shares = sets.asked[of] / np.maximum(sizes, 1)[of]
    free = sizes[of] > 1
    blocks = [np.flatnonzero(free & (sets.block[of] == block)) for block in _present(sets.block[of[free]])]
    if len(blocks) > 1 or (blocks and not free.all()):
        _fill(sets, shares, blocks)
    load: Floats = np.bincount(sets.ranks, shares).astype(np.float64)
    return _whole(sets, shares, unit), ceil(_bound(sets, load) - 1e-6)


def _present(blocks: IntArray) -> IntArray:
    """Return the blocks that occur, ascending."""
    return np.flatnonzero(np.bincount(blocks))


def _fill(sets: Sets, shares: Floats, blocks: list[IntArray]) -> None:
    """Level the loads, block by block, until the busiest is as good as the bound."""
    of = sets.of
    load: Floats = np.bincount(sets.ranks, shares).astype(np.float64)
    for _ in range(_PASSES):
        for members in blocks:
            ranks = sets.ranks[members]
            others = load[ranks] - shares[members]
            level = _level(of[members], others, sets.asked)
            shares[members] = np.maximum(level - others, 0.0)
            load[ranks] = others + shares[members]
        if load.max() <= _NEAR * _bound(sets, load):
            return


def _level(of: IntArray, others: Floats, asked: IntArray) -> Floats:
    """Return the level to which the least busy members of each set are filled when they send what is asked of it."""
    order = np.lexsort((others, of))
    owner, base = of[order], others[order]
    first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    counts = np.diff(np.append(first, len(owner)))
    so_far = np.cumsum(base)
    before = np.repeat(so_far[first] - base[first], counts)
    place = np.arange(len(owner)) - np.repeat(first, counts) + 1
    levels = (asked[owner] + so_far - before) / place
    last = np.maximum.reduceat(np.where(levels >= base, np.arange(len(owner)), 0), first)
    found = np.empty_like(levels)
    found[order] = np.repeat(levels[last], counts)
    return found


def _bound(sets: Sets, load: Floats) -> float:
    """Return the bound that the loads prove: the k busiest ranks send all that is asked of sets that lie among them."""
    order = np.argsort(-load, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    last = np.maximum.reduceat(place[sets.ranks], sets.start[:-1])
    inside = np.cumsum(np.bincount(last, sets.asked, minlength=len(order)))
    return float((inside / np.arange(1, len(order) + 1)).max())


def _whole(sets: Sets, shares: Floats, unit: int) -> IntArray:
    """Round shares down to whole units, and give the rest of each set to its least busy members."""
    whole = (shares / unit + 1e-9).astype(np.int64) * unit
    of = sets.of
    left = (sets.asked - np.bincount(of, whole, minlength=len(sets.asked)).astype(np.int64)) // unit
    load = np.bincount(sets.ranks, whole).astype(np.int64)
    for block in _present(sets.block[left > 0]):
        members = np.flatnonzero((sets.block[of] == block) & (left[of] > 0))
        order = members[np.lexsort((load[sets.ranks[members]], of[members]))]
        owner = of[order]
        first = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
        place = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
        more = order[place < left[owner]]
        whole[more] += unit
        load[sets.ranks[more]] += unit
    return whole
