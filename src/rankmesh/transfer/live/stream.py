"""Streams: what one rank sends another, cut into the same messages on both ranks.

```
moves of a pair     | qkv box | up box | down box ........ | norm |
messages, limit c   [ qkv   up ][ down ...  ][ down ... ][ norm ]        a large box has messages to itself
```

Each piece of a message is a box of one tensor, at a place in the message that is aligned to its elements. A message of
one piece that is contiguous in memory needs no buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rankmesh.core.boxes import Box, size
from rankmesh.core.sharding import Shard, Sharding
from rankmesh.transfer.planning.local import Move

__all__ = ["DIRECT", "Message", "Piece", "Slices", "located", "messages", "where"]

Slices = tuple[slice, ...]

# A box of so many bytes is sent by itself in less time than it is copied into and out of a buffer.
DIRECT = 256 << 10


class Piece(NamedTuple):
    """A box of a rank's own tensor, and its place in a message: ``offset`` and ``bytes``."""

    name: str
    here: Slices
    offset: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Message:
    """Pieces that travel together, to or from one peer."""

    peer: int
    pieces: tuple[Piece, ...]
    bytes: int
    payload: int


def where(shard: Shard, box: Box) -> Slices:
    """Return the place of a box of the whole tensor in the rank's own tensor."""
    return located({"": shard}, box)[1]


def located(shards: Mapping[str, Shard], box: Box) -> tuple[str, Slices]:
    """Return the first of a rank's shards of one tensor that has a box, by name, and where in it the box is."""
    for name, shard in shards.items():
        for whole, place in zip(shard.boxes, shard.places, strict=True):
            if all(start <= low and high <= stop for (low, high), (start, stop) in zip(box, whole, strict=True)):
                shifts = [begin - start for begin, (start, _) in zip(place, whole, strict=True)]
                return name, tuple([slice(low + by, high + by) for (low, high), by in zip(box, shifts, strict=True)])
    raise LookupError(f"box {box} is in none of {shards}")  # pragma: no cover  - the plan cuts along these boxes


def messages(
    moves: Iterable[Move],
    peer: int,
    shards: Mapping[str, Mapping[str, Shard]],
    shardings: Mapping[str, Sharding],
    limit: int,
    direct: int,
) -> list[Message]:
    """Return the moves of two ranks as messages of at most ``limit`` bytes; boxes from ``direct`` on go alone."""
    done: list[Message] = []
    pieces: list[Piece] = []
    end = 0

    def close() -> None:
        nonlocal pieces, end
        if pieces:
            done.append(Message(peer, tuple(pieces), end, sum(piece.bytes for piece in pieces)))
        pieces, end = [], 0

    for move in moves:
        itemsize = shardings[move.name].itemsize
        large = move.bytes >= min(limit // 2, direct)
        if large or end + move.bytes + itemsize > limit:
            close()
        for box in _fitting(move.box, limit // itemsize):
            begin = -(-end // itemsize) * itemsize
            end = begin + size(box) * itemsize
            pieces.append(Piece(*located(shards[move.name], box), begin, end - begin))
            if large:
                close()
    close()
    return done


def _fitting(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``limit`` elements: whole rows if a row fits."""
    count = size(box)
    if count <= limit:
        yield box
        return
    low, high = box[0]
    row = count // (high - low)
    if row <= limit:
        step = limit // row
        for start in range(low, high, step):
            yield ((start, min(start + step, high)), *box[1:])
    else:
        for start in range(low, high):
            for rest in _fitting(box[1:], limit):
                yield ((start, start + 1), *rest)
