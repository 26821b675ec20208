"""Orders: in which order positions of a mesh take the devices of a cluster, uneven ones included.

```
mesh tp=2,dp=4       factors tp, dp         order tp-dp   positions 0 1 2 3 4 5 6 7   onto devices in nested order
                                            order dp-tp   positions 0 2 4 6 1 3 5 7
view ep=2,edp=4      cuts dp in two         factors tp, dp/2, dp/2: ep may go anywhere, too
```

An order is a list of factors, the first on neighbouring devices; its blocks (the products of its first factors) are
kept inside hosts and racks as far as they go: a host of 6 takes one block of 4, what is left of it is joined to others.

>>> mesh_factors(Mesh(tp=2, dp=4).with_view("expert", ep=4, edp=2))
(Factor(axis='tp', size=2, stride=1), Factor(axis='dp', size=2, stride=2), Factor(axis='dp', size=2, stride=4))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt, lgamma, log
from operator import mul

import numpy as np

from rankmesh.core.mesh import Mesh
from rankmesh.core.strided import IntArray, Strided
from rankmesh.placement.cost import DeviceUnits

__all__ = ["Factor", "Filler", "labelings", "mesh_factors", "positions_in", "primes", "words"]


@dataclass(frozen=True)
class Factor:
    """A part of an axis: ``size`` positions ``stride`` apart."""

    axis: str
    size: int
    stride: int


def mesh_factors(mesh: Mesh) -> tuple[Factor, ...]:
    """Return the axes of a mesh, cut where an axis of a view ends inside of them; axes of size 1 are left out."""
    cuts = sorted({stride for layout in (mesh, *mesh.views.values()) for stride in layout.strides.values()})
    factors = []
    for axis, size in mesh.axes.items():
        start, end = mesh.strides[axis], mesh.strides[axis] * size
        edges = [start]
        for cut in cuts:
            if edges[-1] < cut < end and cut % edges[-1] == 0 and end % cut == 0:
                edges.append(cut)
        edges.append(end)
        factors += [Factor(axis, stop // begin, begin) for begin, stop in pairwise(edges)]
    return tuple(factor for factor in factors if factor.size > 1)


def primes(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Cut factors into prime sizes, so that half of an axis may stay inside a host."""
    found = []
    for axis, left, stride in ((factor.axis, factor.size, factor.stride) for factor in factors):
        while left > 1:
            prime = next((each for each in range(2, isqrt(left) + 1) if left % each == 0), left)
            found.append(Factor(axis, prime, stride))
            left, stride = left // prime, stride * prime
    return tuple(found)


def positions_in(order: Sequence[Factor]) -> IntArray:
    """Return all positions of the mesh in the order of its factors, the first fastest."""
    return Strided(tuple((factor.size, factor.stride) for factor in order)).values()


def words(mesh: Mesh, device: IntArray) -> str:
    """Return the order of the axes under a placement: those with neighbours on near devices first.

    >>> words(Mesh(tp=2, dp=2), np.array([0, 2, 1, 3]))
    'dp-tp'
    """
    far = {}
    for number, (axis, size) in enumerate(mesh.axes.items()):
        apart = np.abs(np.diff(device.reshape(tuple(mesh.axes.values()), order="F"), axis=number))
        far[axis] = (float(apart.mean()) if size > 1 else float("inf"), number)
    return "-".join(sorted(far, key=lambda axis: far[axis]))


class Filler:
    """The devices of a machine in the order in which blocks fill them, cached by the sizes of the blocks."""

    def __init__(self, machine: DeviceUnits) -> None:
        self._machine = machine
        self._known: dict[tuple[int, ...], IntArray] = {}
        self._sizes = [set(np.bincount(units).tolist()) for units in machine.units]
        self._largest = [max(sizes) for sizes in self._sizes]

    def devices(self, sizes: Sequence[int]) -> IntArray:
        """Return the devices in order for blocks of these nested sizes (each divides the next)."""
        blocks = tuple(max([1, *(size for size in sizes if size <= most)]) for most in self._largest)
        if blocks not in self._known:
            self._known[blocks] = self._fill(blocks)
        return self._known[blocks]

    def place(self, positions: IntArray, sizes: Sequence[int]) -> IntArray:
        """Return the device of each position, when positions in this order take the devices."""
        devices = np.empty(len(positions), dtype=np.int64)
        devices[positions] = self.devices(sizes)
        return devices

    def of(self, order: Sequence[Factor]) -> IntArray:
        """Return the device of each position under an order of factors."""
        return self.place(positions_in(order), list(accumulate((factor.size for factor in order), mul)))

    def _fill(self, blocks: tuple[int, ...]) -> IntArray:
        """From the hosts outward: whole blocks first, then what is left of each unit, joined to blocks again."""
        units = self._machine.units
        if all(size % block == 0 for sizes, block in zip(self._sizes, blocks, strict=True) for size in sizes):
            return np.arange(units.shape[1])
        parts = [([device], list[int]()) for device in range(units.shape[1])]
        for level, block in enumerate(blocks):
            around: dict[int, tuple[list[int], list[int]]] = {}
            for whole, rest in parts:
                kept = around.setdefault(int(units[level][(whole or rest)[0]]), ([], []))
                kept[0].extend(whole)
                kept[1].extend(rest)
            parts = [_cut(whole, rest, block) for whole, rest in around.values()]
        return np.array([device for whole, rest in parts for device in (*whole, *rest)], dtype=np.int64)


def _cut(whole: list[int], rest: list[int], block: int) -> tuple[list[int], list[int]]:
    devices = [*whole, *rest]
    end = len(devices) // block * block
    return devices[:end], devices[end:]


def labelings(counts: Sequence[int], most: int) -> IntArray | None:
    """Return every way to give ``counts[h]`` positions to each host ``h``; None if there are more than ``most``.

    >>> labelings((1, 2), 10).tolist()
    [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    """
    ways = lgamma(sum(counts) + 1) - sum(lgamma(count + 1) for count in counts)  # the logarithm
    if ways > log(most + 0.5):
        return None
    return np.array(list(_labelings(list(counts), [])), dtype=np.int64)


def _labelings(left: list[int], given: list[int]) -> Iterator[list[int]]:
    if not any(left):
        yield list(given)
    for host, count in enumerate(left):
        if count:
            left[host] -= 1
            yield from _labelings(left, [*given, host])
            left[host] += 1
