"""Deltas: what a version has changed, by tensor and box.

```
None                                          everything
{"embedding": None}                           one tensor, whole
{"embedding": (((0, 8), (0, 64)),)}           rows 0..7 of it
```

>>> merged({"a": None}, {"b": (((0, 2),),)})
{'a': None, 'b': (((0, 2),),)}
>>> merged({"b": (((0, 2),),)}, {"b": (((1, 4),),)})
{'b': (((0, 2),), ((2, 4),))}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rankmesh.core.boxes import Box, meet, minus, size
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError, quoted
from rankmesh.transfer.planning.local import LocalMoves, Move

__all__ = ["Changed", "Delta", "History", "delta_of", "merged", "restricted"]

# What a user gives: names, or names with boxes, or with None for the whole tensor.
Changed = Iterable[str] | Mapping[str, Iterable[Sequence[Sequence[int]]] | None] | None
Delta = dict[str, tuple[Box, ...] | None]

# Versions whose changes are remembered, and names and boxes in all: who is further behind gets everything.
_VERSIONS, _ENTRIES = 8, 20_000


def delta_of(changed: Changed, shardings: Mapping[str, Sharding]) -> Delta | None:
    """Check what a user gives as changed, and return it: boxes that do not meet; None for everything.

    Raises ``PlanError`` for a name that no sharding has, and for a box that is not one of its tensor.
    """
    if changed is None:
        return None
    if isinstance(changed, str):
        raise PlanError(f"changed is the text {quoted(changed)}; give a list of names, such as [{quoted(changed)}]")
    given = changed if isinstance(changed, Mapping) else dict.fromkeys(changed)
    found: Delta = {}
    for name, boxes in given.items():
        if name not in shardings:
            raise PlanError(
                f"changed names {quoted(name)}, which the layouts do not have; give names of the engine's layout",
                name=name,
            )
        found[name] = None if boxes is None else _apart(_checked(name, boxes, shardings[name].shape))
    return found


def _checked(name: str, boxes: Iterable[Sequence[Sequence[int]]], shape: tuple[int, ...]) -> Iterator[Box]:
    for given in boxes:
        try:
            box = tuple((int(start), int(stop)) for start, stop in given)
            inside = all(0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=True))
        except (TypeError, ValueError):
            inside = False
        if not inside:
            raise PlanError(
                f"changed gives {quoted(given)} as a box of {quoted(name)} of shape {shape}; give (start, stop) for "
                "each dimension, inside of the tensor",
                name=name,
                box=given,
            )
        if size(box):
            yield box


def _apart(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Cut boxes into boxes of the same elements that do not meet."""
    found: list[Box] = []
    for box in boxes:
        parts = [box]
        for other in found:
            parts = [left for part in parts for left in minus(part, other)]
        found += parts
    return tuple(found)


def merged(one: Delta | None, other: Delta | None) -> Delta | None:
    """Return the changes of two versions as one."""
    if one is None or other is None:
        return None
    found = dict(one)
    for name, boxes in other.items():
        before = found.get(name, ())
        found[name] = None if boxes is None or before is None else _apart((*before, *boxes))
    return found


def restricted(moves: LocalMoves, delta: Delta | None) -> LocalMoves:
    """Return the part of a rank's moves that a delta has changed; both ends of a move cut it alike."""
    if delta is None:
        return moves
    sends, receives, copies = (tuple(_restricted(one, delta)) for one in (moves.sends, moves.receives, moves.copies))
    return LocalMoves(moves.rank, sends, receives, copies, moves.missing)


def _restricted(moves: Iterable[Move], delta: Delta) -> Iterator[Move]:
    for move in moves:
        boxes = delta.get(move.name, ())
        if boxes is None:
            yield move
            continue
        itemsize = move.bytes // max(size(move.box), 1)
        for box in boxes:
            if (shared := meet(move.box, box)) is not None:
                yield move._replace(box=shared, bytes=size(shared) * itemsize)


class History:
    """The deltas of the last versions, oldest first; ``data`` is what `to_data` gave."""

    def __init__(self, data: Iterable[tuple[int, Delta | None]] = ()) -> None:
        self._versions: list[tuple[int, Delta | None]] = [(int(version), _delta(delta)) for version, delta in data]

    def add(self, version: int, delta: Delta | None) -> None:
        """Add a version, with what it changed since the one before."""
        self._versions = [*self._versions, (version, delta)][-_VERSIONS:]
        entries = 0
        for number, (_, one) in reversed(list(enumerate(self._versions))):
            entries += sum(1 + len(boxes or ()) for boxes in (one or {}).values())
            if entries > _ENTRIES:
                self._versions[number] = (self._versions[number][0], None)

    @property
    def newest(self) -> int | None:
        """The last version, None before the first."""
        return self._versions[-1][0] if self._versions else None

    def since(self, version: int | None) -> Delta | None:
        """Return the changes since a version; None, for everything, if the history does not have that version."""
        places = [place for place, (known, _) in enumerate(self._versions) if known == version]
        if not places:
            return None
        found: Delta | None = {}
        for _, delta in self._versions[places[-1] + 1 :]:
            found = merged(found, delta)
        return found

    def to_data(self) -> list[tuple[int, Delta | None]]:
        """Return the history as JSON data."""
        return list(self._versions)


def _delta(data: Delta | None) -> Delta | None:
    if data is None:
        return None
    return {
        name: None if boxes is None else tuple(tuple((int(a), int(b)) for a, b in box) for box in boxes)
        for name, boxes in data.items()
    }
