"""Picks: a choice of positions inside each group.

```
pipeline group   [0, 4, 8, 12]
ends             [0, 12]          first and last: where the embeddings live
first            [0]
last             [12]
```

A pick is data, so that a plan with picks can be saved, compared and hashed. A callable is called once, with the
group's ranks in order (as Megatron-Core calls ``get_embedding_ranks``), and what it returns is kept as positions.

>>> ends.positions_in(4), ends.positions_in(1), last.positions_in(4)
((0, 3), (0,), (3,))
>>> Pick.of(lambda ranks: [ranks[0], ranks[len(ranks) // 2]], size=4)
Pick(positions=(0, 2))
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from rankmesh.errors import LayoutError, quoted

__all__ = ["Pick", "PickLike", "ends", "first", "last"]


@dataclass(frozen=True)
class Pick:
    """Chosen positions of a group, in order; -1 is the last."""

    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", _integers(self.positions, self.positions))

    @classmethod
    def of(cls, pick: PickLike, size: int) -> Pick:
        """Return a checked pick for groups of ``size`` ranks; a callable is asked with ``range(size)``."""
        if isinstance(pick, Pick):
            chosen = pick
        elif callable(pick):
            chosen = cls(_integers(pick(range(size)), pick))
        else:
            chosen = cls(pick)  # type: ignore[arg-type]  # any iterable is kept as a tuple
        chosen.positions_in(size)
        return chosen

    def positions_in(self, size: int) -> tuple[int, ...]:
        """Return the positions inside a group of ``size`` ranks, each once, in the order of choice."""
        for position in self.positions:
            if not -size <= position < size:
                raise LayoutError(
                    f"a pick has position {position}, but groups have {size} ranks; give {-size} to {size - 1}",
                    position=position,
                    size=size,
                )
        return tuple(dict.fromkeys(position % size for position in self.positions))

    def __str__(self) -> str:
        return _NAMES.get(self.positions) or "positions " + ", ".join(map(str, self.positions))


PickLike = Pick | Callable[[Sequence[int]], Iterable[int]] | Iterable[int]


def _integers(positions: object, pick: object) -> tuple[int, ...]:
    try:
        numbers = tuple(_position(position) for position in positions)  # type: ignore[attr-defined]  # TypeError is caught
    except TypeError:
        raise LayoutError(
            f"pick {quoted(pick)} gives {quoted(positions)}; give a list of positions, or a callable that takes the "
            "ranks of a group and returns some of them",
            received=positions,
        ) from None
    if not numbers:
        raise LayoutError(f"pick {quoted(pick)} chooses no position; choose at least one", received=positions)
    return numbers


def _position(position: SupportsIndex) -> int:
    if isinstance(position, bool):  # a mask is not a list of positions
        raise TypeError
    return operator.index(position)


ends = Pick((0, -1))
first = Pick((0,))
last = Pick((-1,))

_NAMES = {ends.positions: "ends", first.positions: "first", last.positions: "last"}
