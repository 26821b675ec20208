"""A placement in words: before, after, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankmesh.placement.place import KindCost, Placed

__all__ = ["duration", "report"]


def duration(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> duration(0.01234), duration(2.5e-5), duration(3.0), duration(0)
    ('12.3 ms', '25 µs', '3 s', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e6:.2g} µs"


def report(placed: Placed) -> str:
    """Lines for a person: the order, what it saves, and each kind that moved."""
    return "\n".join(_lines(placed))


def _lines(placed: Placed) -> Iterator[str]:
    saved = placed.before - placed.cost
    share = f"{saved / placed.before:.0%} less" if placed.before and saved > 1e-12 else "nothing is cheaper"
    yield f"{placed.order} on {placed.cluster}"
    yield f"predicted communication of a step: {duration(placed.before)} before, {duration(placed.cost)} after, {share}"
    for kind in sorted(placed.kinds, key=lambda kind: kind.cost - kind.before):
        yield f"  {kind.name}: {_why(kind)}"
    for name, level in placed.within.items():
        yield f"  {name} stays within {level}, as asked"
    tried = "all placements" if placed.exact else f"{placed.tried:,} placements"
    yield f"the least of {tried}; predicted, not measured (rankmesh measure)"
    yield from (f"note: {note}" for note in placed.notes)


def _why(kind: KindCost) -> str:
    where = (
        f"within {kind.level}" if kind.level == kind.level_before else f"within {kind.level}, was {kind.level_before}"
    )
    if abs(kind.cost - kind.before) <= 1e-9 * max(kind.cost, kind.before):
        return f"{where}, {duration(kind.cost)} as before"
    word = "saves" if kind.cost < kind.before else "costs"
    return f"{where}, {duration(kind.before)} -> {duration(kind.cost)}: {word} {duration(abs(kind.before - kind.cost))}"
