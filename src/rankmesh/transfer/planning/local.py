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
from rankmesh.transfer.planning.classes import TensorClass
from rankmesh.transfer.planning.flows import Flows

__all__ = ["LocalMoves", "Move", "local_moves"]


class Move(NamedTuple):
    """One box of a whole tensor on its way: ``box`` is (start, stop) by dimension, ``source`` and ``target`` ranks."""

    name: str
    box: tuple[tuple[int, int], ...]
    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class LocalMoves:
    """The moves of one rank: ``sends`` and ``receives`` in the order in which each pair of ranks exchanges them.

    ``missing`` are the boxes that it needs and nobody has, by tensor, of a transfer that is ``partial``.
    """

    rank: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    copies: tuple[Move, ...]
    missing: tuple[tuple[str, Box], ...] = ()

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


def local_moves(classes: Sequence[TensorClass], flows: Flows, rank: int) -> LocalMoves:
    """Return the part of one rank, from its flows and shards alone."""
    return LocalMoves(
        rank,
        tuple(_moves(classes, flows, np.flatnonzero(flows.source == rank))),
        tuple(_moves(classes, flows, np.flatnonzero(flows.target == rank))),
        tuple(_copies(classes, rank)),
        tuple(_missing(classes, flows, rank)),
    )


def _moves(classes: Sequence[TensorClass], flows: Flows, local: IntArray) -> Iterator[Move]:
    columns = (flows.tensor_class, flows.shard, flows.source, flows.target, flows.low, flows.high)
    for number, shard, source, target, low, high in zip(*(column[local].tolist() for column in columns), strict=True):
        one = classes[number]
        boxes = one.boxes(shard, one.target_of(target))
        elements = sum(map(size, boxes))
        # The tensors of the class are laid end to end; this flow has elements of some of them.
        first, last = low // one.itemsize, high // one.itemsize
        for place in range(first // elements, -(-last // elements)):
            start, stop = max(first - place * elements, 0), min(last - place * elements, elements)
            for box in boxes if (start, stop) == (0, elements) else stretch(boxes, start, stop):
                yield Move(one.names[place], box, source, target, size(box) * one.itemsize)


def _copies(classes: Sequence[TensorClass], rank: int) -> Iterator[Move]:
    for one in classes:
        target = one.target_of(rank)
        if target >= 0:
            boxes = [box for source in one.sources(rank) for box in one.boxes(source, target)]
            yield from (Move(name, box, rank, rank, size(box) * one.itemsize) for name in one.names for box in boxes)


def _missing(classes: Sequence[TensorClass], flows: Flows, rank: int) -> Iterator[tuple[str, Box]]:
    for number, source, target in flows.missing.tolist():
        one = classes[number]
        if target == one.target_of(rank) and source not in one.sources(rank):
            yield from ((name, box) for name in one.names for box in one.boxes(source, target))
