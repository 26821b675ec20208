"""Boxes: one (start, stop) for each dimension of a tensor.

```
((0, 2), (4, 8))      rows 0..1, columns 4..7: eight elements, counted row by row
```

>>> size(((0, 2), (4, 8)))
8
>>> meet(((0, 2), (4, 8)), ((1, 5), (0, 6)))
((1, 2), (4, 6))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from math import prod

import numpy as np

__all__ = ["Box", "meet", "minus", "size", "stretch", "uncovered"]

Box = tuple[tuple[int, int], ...]


def size(box: Box) -> int:
    """Return the number of elements of a box; the box of a scalar, without dimensions, has one."""
    return prod(stop - start for start, stop in box)


def meet(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if they do not meet."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def minus(box: Box, other: Box) -> list[Box]:
    """Return a box without another one, as boxes that do not meet.

    >>> minus(((0, 4), (0, 4)), ((1, 2), (2, 6)))
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (0, 2))]
    """
    shared = meet(box, other)
    if shared is None:
        return [box]
    found: list[Box] = []
    for dim, (start, stop) in enumerate(shared):
        first, last = box[dim]
        before, after = shared[:dim], box[dim + 1 :]
        found += [(*before, ends, *after) for ends in ((first, start), (stop, last)) if ends[0] < ends[1]]
    return found


def uncovered(box: Box, parts: Iterable[Box]) -> int:
    """Count the elements of a box that are in none of the parts, which lie inside of it and may overlap.

    >>> uncovered(((0, 4),), [((0, 2),), ((0, 2),)])
    2
    """
    parts = list(parts)
    if not box or not parts:
        return 0 if parts else size(box)
    # The edges of all parts cut the box into cells, each of which is wholly in a part or wholly outside of it.
    edges = [np.unique([*box[dim], *(edge for part in parts for edge in part[dim])]) for dim in range(len(box))]
    covered = np.zeros([len(along) - 1 for along in edges], dtype=bool)
    for part in parts:
        covered[tuple(slice(*np.searchsorted(along, ends)) for along, ends in zip(edges, part, strict=True))] = True
    sizes = reduce(np.multiply.outer, map(np.diff, edges))
    return int(sizes[~covered].sum())


def stretch(boxes: Iterable[Box], start: int, stop: int) -> list[Box]:
    """Return the elements ``start`` to ``stop - 1`` of boxes, counted row by row through one after the other, as boxes.

    >>> stretch([((0, 3), (0, 4))], 2, 9)
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    found: list[Box] = []
    for box in boxes:
        count = size(box)
        if start < count and stop > 0:
            found.extend(_stretch(box, max(start, 0), min(stop, count)))
        start, stop = start - count, stop - count
    return found


def _stretch(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield a stretch of one box: the rest of the first row, whole rows, the beginning of the last."""
    count = size(box)
    if start == 0 and stop == count:
        yield box
        return
    (first, end), rest = box[0], box[1:]
    row = count // (end - first)
    top, below = -(-start // row), stop // row
    if top > below:  # inside one row
        yield from _rows(first + below, rest, start - below * row, stop - below * row)
        return
    if start < top * row:
        yield from _rows(first + top - 1, rest, start - (top - 1) * row, row)
    if top < below:
        yield ((first + top, first + below), *rest)
    if below * row < stop:
        yield from _rows(first + below, rest, 0, stop - below * row)


def _rows(row: int, rest: Box, start: int, stop: int) -> Iterator[Box]:
    for box in _stretch(rest, start, stop):
        yield ((row, row + 1), *box)
