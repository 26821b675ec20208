"""Ranks as ranges, which take little space where they are equally far apart.

>>> ranges([0, 8, 16, 24, 3]), ranks_in([[0, 32, 8], [3, 4, 1]])
([[0, 32, 8], [3, 4, 1]], [0, 8, 16, 24, 3])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["ranges", "ranks_in"]


def ranges(ranks: Iterable[int]) -> list[list[int]]:
    """Return different ranks, in their order, as ranges: (start, stop, step)."""
    found: list[list[int]] = []
    for rank in ranks:
        start, stop, step = found[-1] if found else (rank, rank, 0)
        if stop - start == step == 1:  # one rank, whose step is open
            found[-1] = [start, 2 * rank - start, rank - start]
        elif step and rank == stop:
            found[-1][1] += step
        else:
            found.append([rank, rank + 1, 1])
    return found


def ranks_in(ranges: Iterable[Sequence[int]]) -> list[int]:
    """Return the ranks in ranges, in their order."""
    return [rank for each in ranges for rank in range(*each)]
