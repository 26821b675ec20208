"""One rank's part of a transfer: what it sends, receives and copies, as boxes of whole tensors.

```
Mesh(tp=2) -> Mesh(tp=4)    rank 1 had rows 4..7, and will have rows 2..3

Move("up", box=((2, 4), (0, 6)), source=0, target=1, bytes=48)      one of its receives
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rankmesh.core.boxes import Box, size, stretch
from rankmesh.core.strided import IntArray
from rankmesh.transfer.planning.kinds import Kind
from rankmesh.transfer.planning.line import Flows

__all__ = ["Move", "OwnMoves", "own_moves"]


class Move(NamedTuple):
    """One box of a whole tensor on its way: ``box`` is (start, stop) by dimension, ``source`` and ``target`` ranks."""

    name: str
    box: tuple[tuple[int, int], ...]
    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class OwnMoves:
    """What one rank does: ``sends`` and ``receives`` in the order in which each pair of ranks exchanges them."""

    rank: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    copies: tuple[Move, ...]

    @cached_property
    def bytes_out(self) -> int:
        """Bytes that the rank sends to others."""
        return sum(move.bytes for move in self.sends)

    @cached_property
    def bytes_in(self) -> int:
        """Bytes that the rank receives from others."""
        return sum(move.bytes for move in self.receives)

    @cached_property
    def bytes_copied(self) -> int:
        """Bytes that the rank has itself."""
        return sum(move.bytes for move in self.copies)


def own_moves(kinds: Sequence[Kind], flows: Flows, rank: int) -> OwnMoves:
    """The part of one rank, from its own flows and shards alone."""
    return OwnMoves(
        rank,
        tuple(_moves(kinds, flows, np.flatnonzero(flows.source == rank))),
        tuple(_moves(kinds, flows, np.flatnonzero(flows.target == rank))),
        tuple(_copies(kinds, rank)),
    )


def _moves(kinds: Sequence[Kind], flows: Flows, own: IntArray) -> Iterator[Move]:
    columns = (flows.kind, flows.cell, flows.source, flows.target, flows.low, flows.high)
    for number, cell, source, target, low, high in zip(*(column[own].tolist() for column in columns), strict=True):
        kind = kinds[number]
        boxes = _shared(kind, cell, target)
        elements = sum(map(size, boxes))
        for name, first, last in _cut(kind, elements, low // kind.itemsize, high // kind.itemsize):
            part = boxes if (first, last) == (0, elements) else stretch(boxes, first, last)
            for box in part:
                yield Move(name, box, source, target, size(box) * kind.itemsize)


def _shared(kind: Kind, cell: int, target: int) -> list[Box]:
    """What the source cell and the target's own cell share."""
    return kind.boxes(cell, int(kind.target.spread.cell_of(np.array([target]))[0]))


def _cut(kind: Kind, elements: int, low: int, high: int) -> Iterator[tuple[str, int, int]]:
    """Elements ``low`` to ``high - 1`` of a kind's tensors, end to end: (name, from, to) in each that they touch."""
    for number in range(low // elements, -(-high // elements)):
        start = number * elements
        yield kind.names[number], max(low - start, 0), min(high - start, elements)


def _copies(kinds: Sequence[Kind], rank: int) -> Iterator[Move]:
    for kind in kinds:
        here = np.array([rank])
        source, target = (int(side.spread.cell_of(here)[0]) for side in (kind.source, kind.target))
        if source < 0 or target < 0:
            continue
        boxes = kind.boxes(source, target)
        for name in kind.names:
            for box in boxes:
                yield Move(name, box, rank, rank, size(box) * kind.itemsize)
