"""Strided copies: which element of one memory is which element of another, without either memory.

```
Copy(offset to, offset from, dims)      element  to + Σ i·stride_to   is element  from + Σ i·stride_from
```

A view of a tensor (a slice, a transpose, a reshape) is such a map from its elements, counted row by row, to addresses;
a ``copy_`` is one map after another (`compose`), and a later write hides what it covers of an earlier one (`outside`).
Both memories are cut along the same *digits* of an address, which is exact as long as each stride divides the next:

```
strides 1, 4, 12      address = d0 + 4·d1 + 12·d2      a region of whole digits is a box
```

>>> rows = Copy(0, 8, ((2, 4, 4), (4, 1, 1)))              # rows 2..3 of a matrix of width 4
>>> column = view(1, (2,), (4,))                        # the second column of what they make
>>> compose(rows, column)
[Copy(to=0, start=9, dims=(Dim(size=2, to=1, start=4),))]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

from rankmesh.errors import LayoutError

__all__ = ["Copy", "Fragment", "compose", "contiguous", "fragments", "merged", "outside", "union", "view"]


class Dim(NamedTuple):
    """``size`` steps, of ``to`` elements in the one memory and of ``start`` elements in the other."""

    size: int
    to: int
    start: int


@dataclass(frozen=True)
class Copy:
    """Elements of one memory that are elements of another: where both begin, and the dims that both count through."""

    to: int
    start: int
    dims: tuple[Dim | tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        """The number of elements that it maps."""
        return prod(size for size, _, _ in self.dims)

    @cached_property
    def last(self) -> int:
        """The last element that it writes."""
        return self.to + sum((size - 1) * to for size, to, _ in self.dims)

    @cached_property
    def run(self) -> int:
        """The number of elements that it maps, if adjacent ones to adjacent ones in order; otherwise 0."""
        length = 1
        for size, to, start in reversed(self.dims):
            if size != 1:
                if to != length or start != length:
                    return 0
                length *= size
        return length


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose last dimension is adjacent.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def view(offset: int, shape: Sequence[int], strides: Sequence[int]) -> Copy:
    """Return the elements of a view, counted row by row, as addresses in its memory."""
    numbers = contiguous(shape)
    return Copy(0, offset, tuple(map(Dim, shape, numbers, strides)))


def turned(copy: Copy) -> Copy:
    """Swap the two memories."""
    return Copy(copy.start, copy.to, tuple(Dim(size, start, to) for size, to, start in copy.dims))


def compose(first: Copy, then: Copy) -> list[Copy]:
    """From where ``first`` reads to where ``then`` writes, over the memory that the one writes and the other reads."""
    if first.run and then.size:  # most are: whole tensors, and rows of them
        low, high = then.start, then.start + sum((size - 1) * start for size, _, start in then.dims)
        if first.to <= low and high <= first.last:
            return [_joined(Copy(then.to, then.start - first.to + first.start, then.dims))]
    if then.run and then.start <= first.to and first.last < then.start + then.run:
        return [_joined(Copy(first.to - then.start + then.to, first.start, first.dims))]
    units = _units([dim[1] for dim in first.dims], [dim[2] for dim in then.dims])
    spread = tuple(dim for dim in then.dims if dim[2] == 0 and dim[0] > 1)
    moved = Copy(then.to, then.start, tuple(dim for dim in then.dims if dim[2] != 0))
    found = []
    for left in _boxes(first, units):
        for right in _boxes(turned(moved), units):
            met = _meet(left, right)
            if met is not None:
                found.append(_joined(Copy(met.to, met.start, (*met.dims, *spread))))
    return found


def outside(copy: Copy, written: Copy) -> list[Copy]:
    """Return the parts of a copy that are left after another copy to the same memory."""
    if _apart(copy, written):
        return [copy]
    units = _units([dim[1] for dim in copy.dims], [dim[1] for dim in written.dims])
    rest = _boxes(copy, units)
    for box in _boxes(written, units):
        rest = [piece for one in rest for piece in _minus(one, box)]
    return [_joined(box.copy()) for box in rest]


def _apart(one: Copy, other: Copy) -> bool:
    return one.to > other.last or other.to > one.last


def _units(*strides: Iterable[int]) -> list[int]:
    """Return the digits of an address that all of these strides step through, ascending."""
    units = sorted({1, *(stride for some in strides for stride in some if stride)})
    for low, high in pairwise(units):
        if high % low:
            raise LayoutError(
                f"a view steps by {low} and another by {high} elements through one memory, and neither divides the "
                "other; reshape in steps that keep rows whole"
            )
    return units


@dataclass(frozen=True)
class _Box:
    """A range of each digit of the shared address, with the address in the other memory and its step a digit."""

    units: list[int]
    low: tuple[int, ...]
    high: tuple[int, ...]
    start: int
    steps: tuple[int, ...]

    def copy(self) -> Copy:
        to = sum(unit * low for unit, low in zip(self.units, self.low, strict=True))
        every = zip(self.units, self.low, self.high, self.steps, strict=True)
        return Copy(to, self.start, tuple(Dim(high - low, unit, step) for unit, low, high, step in every))

    def within(self, low: tuple[int, ...], high: tuple[int, ...]) -> _Box:
        moved = sum((new - old) * step for new, old, step in zip(low, self.low, self.steps, strict=True))
        return _Box(self.units, low, high, self.start + moved, self.steps)


def _boxes(copy: Copy, units: list[int]) -> list[_Box]:
    """Cut a copy so that each piece is a box of digits of the memory that it writes."""
    for number, (size, to, start) in enumerate(copy.dims):
        if size == 0:
            return []
        if size == 1:
            continue
        others = copy.dims[:number] + copy.dims[number + 1 :]
        place = units.index(to)
        if place + 1 == len(units):
            continue
        capacity = units[place + 1] // to
        digit = copy.to // to % capacity
        if digit + size <= capacity:
            continue
        cuts = [0, *([capacity - digit] if digit else [])]
        whole = (size - cuts[-1]) // capacity * capacity
        cuts += [cuts[-1] + whole] if whole else []
        cuts += [size] if cuts[-1] != size else []
        found: list[_Box] = []
        for low, high in pairwise(cuts):
            dims = [Dim(high - low, to, start)]
            if high - low > capacity:
                dims = [Dim((high - low) // capacity, to * capacity, start * capacity), Dim(capacity, to, start)]
            elif high - low == capacity:
                dims = [Dim(capacity, to, start)]
            found += _boxes(Copy(copy.to + low * to, copy.start + low * start, (*others, *dims)), units)
        return found
    return [_box(copy, units)]


def _box(copy: Copy, units: list[int]) -> _Box:
    low, rest = [0] * len(units), copy.to
    for place in range(len(units) - 1, -1, -1):
        low[place], rest = divmod(rest, units[place])
    high, steps = [digit + 1 for digit in low], [0] * len(units)
    for size, to, start in copy.dims:
        if size > 1:
            place = units.index(to)
            if steps[place] or high[place] - low[place] > 1:
                raise LayoutError("two dimensions of a view step through the same elements of its memory")
            high[place], steps[place] = low[place] + size, start
    return _Box(units, tuple(low), tuple(high), copy.start, tuple(steps))


def _meet(left: _Box, right: _Box) -> Copy | None:
    low = tuple(map(max, left.low, right.low))
    high = tuple(map(min, left.high, right.high))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    one, other = left.within(low, high), right.within(low, high)
    dims = (Dim(b - a, to, start) for a, b, to, start in zip(low, high, other.steps, one.steps, strict=True))
    return Copy(other.start, one.start, tuple(dims))


def _minus(box: _Box, hole: _Box) -> Iterator[_Box]:
    low, high = list(map(max, box.low, hole.low)), list(map(min, box.high, hole.high))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        yield box
        return
    begin, end = list(box.low), list(box.high)
    for place in range(len(low)):
        for first, last in ((begin[place], low[place]), (high[place], end[place])):
            if first < last:
                yield box.within((*begin[:place], first, *begin[place + 1 :]), (*end[:place], last, *end[place + 1 :]))
        begin[place], end[place] = low[place], high[place]


def _joined(copy: Copy) -> Copy:
    """Join dimensions that one step describes; the longest step comes first."""
    dims: list[Dim] = []
    for size, to, start in sorted((Dim(*dim) for dim in copy.dims if dim[0] != 1), key=lambda dim: (dim.to, dim.start)):
        if dims and to == dims[-1].size * dims[-1].to and start == dims[-1].size * dims[-1].start:
            dims[-1] = Dim(dims[-1].size * size, dims[-1].to, dims[-1].start)
        else:
            dims.append(Dim(size, to, start))
    return Copy(copy.to, copy.start, tuple(dims[::-1]))


class Fragment(NamedTuple):
    """A box of a tensor, and where it is in a parameter: the offset there, and the step of each of its dimensions."""

    box: tuple[tuple[int, int], ...]
    offset: int
    strides: tuple[int, ...]


def fragments(copy: Copy, shape: Sequence[int]) -> list[Fragment]:
    """Return the boxes of a contiguous tensor of this shape that a copy reads.

    >>> fragments(Copy(0, 8, ((2, 1, 4), (4, 2, 1))), (4, 4))
    [Fragment(box=((2, 4), (0, 4)), offset=0, strides=(1, 2))]
    """
    strides = contiguous(shape)
    units = _units([dim[2] for dim in copy.dims], strides)
    found = []
    for box in _boxes(turned(copy), units):
        found += _fragment(box, shape, strides)
    return found


def merged(found: Iterable[Fragment]) -> list[Fragment]:
    """Join boxes that are neighbours along one dimension, a step apart.

    >>> merged([Fragment(((0, 1), (0, 4)), 0, (0, 1)), Fragment(((1, 2), (0, 4)), 4, (0, 1))])
    [Fragment(box=((0, 2), (0, 4)), offset=0, strides=(4, 1))]
    """
    boxes = sorted(found)
    for dim in range(len(boxes[0].box) - 1, -1, -1) if boxes else ():
        boxes.sort(key=lambda one, dim=dim: (one.box[:dim], one.box[dim + 1 :], one.box[dim]))  # type: ignore[misc]
        kept = boxes[:1]
        for one in boxes[1:]:
            joined = _join(kept[-1], one, dim)
            kept[-1:] = [joined] if joined else [kept[-1], one]
        boxes = kept
    return sorted(boxes)


def union(boxes: Iterable[tuple[tuple[int, int], ...]]) -> list[tuple[tuple[int, int], ...]]:
    """Join boxes that are neighbours, wherever they are in a parameter.

    >>> union([((0, 2), (0, 4)), ((2, 4), (0, 4))])
    [((0, 4), (0, 4))]
    """
    found = list(boxes)
    steps = contiguous([max(box[dim][1] for box in found) for dim in range(len(found[0]))]) if found else ()
    starts = [sum(low * step for (low, _), step in zip(box, steps, strict=True)) for box in found]
    # As if each were where it is in the whole tensor.
    return [one.box for one in merged(Fragment(box, at, steps) for box, at in zip(found, starts, strict=True))]


def _join(one: Fragment, other: Fragment, dim: int) -> Fragment | None:
    (low, middle), (begin, high) = one.box[dim], other.box[dim]
    rest = [number for number in range(len(one.box)) if number != dim]
    if middle != begin or any(one.box[d] != other.box[d] or one.strides[d] != other.strides[d] for d in rest):
        return None
    away = other.offset - one.offset
    step = one.strides[dim] or away // (middle - low)
    if away != step * (middle - low) or other.strides[dim] not in (0, step) or step <= 0:
        return None
    box = (*one.box[:dim], (low, high), *one.box[dim + 1 :])
    return Fragment(box, one.offset, (*one.strides[:dim], step, *one.strides[dim + 1 :]))


def _fragment(box: _Box, shape: Sequence[int], strides: Sequence[int]) -> list[Fragment]:
    """Return a box of digits as boxes of the tensor, each of whose dimensions is some digits."""
    ranges, steps = [], []
    for dim, stride in enumerate(strides):
        above = min((strides[d] for d in range(dim) if strides[d] > stride), default=stride * shape[dim])
        if shape[dim] == 1:
            ranges.append((0, 1))
            steps.append(0)
            continue
        places = [place for place, unit in enumerate(box.units) if stride <= unit < above]
        low, count, step = 0, 1, 0
        for place in places:
            digit, size, unit = box.low[place], box.high[place] - box.low[place], box.units[place] // stride
            if size > 1:
                if count != unit or (step and box.steps[place] != step * unit):
                    # Not one range of this dimension: the shorter part element by element.
                    return _apart_along(box, place, shape, strides)
                step = step or box.steps[place]
                count *= size
            low += digit * unit
        ranges.append((low, low + count))
        steps.append(step)
    return [Fragment(tuple(ranges), box.start, tuple(steps))]


def _apart_along(box: _Box, place: int, shape: Sequence[int], strides: Sequence[int]) -> list[Fragment]:
    if box.high[place] - box.low[place] > 4096:
        raise LayoutError(
            f"every {box.units[place]}th element of a tensor of shape {tuple(shape)} goes somewhere else; it has no "
            "boxes that say so"
        )
    found = []
    for digit in range(box.low[place], box.high[place]):
        low = (*box.low[:place], digit, *box.low[place + 1 :])
        high = (*box.high[:place], digit + 1, *box.high[place + 1 :])
        found += _fragment(box.within(low, high), shape, strides)
    return found
