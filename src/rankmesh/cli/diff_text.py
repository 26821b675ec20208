"""A difference for the terminal: a table for each sort of difference, nothing for what is equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rankmesh.cli.columns import Column, print_columns
from rankmesh.viz.difference import Difference, OnlyKind, RankDiff

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_difference"]


def print_difference(console: Console, found: Difference) -> None:
    """Print what differs, then the names of the kinds that are equal."""
    for number, columns in enumerate(_tables(found)):
        if number:
            console.print()
        print_columns(console, columns)
    lines = list(_lines(found))
    if lines and found.different:
        console.print()
    for line in lines:
        console.print(line)


def _tables(found: Difference) -> Iterator[list[Column]]:
    if sides := list(_sides(found)):
        yield _table(("world", "left", "right"), sides)
    if found.axes:
        axes = [
            (
                axis.axis if axis.view is None else f"{axis.view}: {axis.axis}",
                _axis(axis.left),
                _axis(axis.right),
            )
            for axis in found.axes
        ]
        yield _table(("axis", "left", "right"), axes)
    if found.groups:
        yield _groups(found)
    if found.options:
        options = [(item.kind, item.option, str(item.left), str(item.right)) for item in found.options]
        yield _table(("kind", "option", "left", "right"), options)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[Column]:
    cells = list(zip(*rows, strict=True))
    return [Column(head, cells[number], style="" if number else "bold") for number, head in enumerate(heads)]


def _sides(found: Difference) -> Iterator[tuple[str, ...]]:
    if found.world_sizes[0] != found.world_sizes[1]:
        yield ("ranks", *(f"{size:,}" for size in found.world_sizes))
    if found.spans[0] != found.spans[1]:
        yield ("mesh", *(f"{start:,} to {start + size - 1:,}" for start, size in found.spans))


def _axis(pair: tuple[int, int] | None) -> str:
    return "none" if pair is None else f"{pair[0]:,}, stride {pair[1]:,}"


def _groups(found: Difference) -> list[Column]:
    world = max(found.world_sizes)
    rows = []
    for kind in found.groups:
        head = (kind.name, f"{kind.ranks:,} of {world:,}")
        for example in kind.examples:
            rows.append((*head, str(example.rank), *_sides_of(example, kind.left_size, kind.right_size)))
            head = ("", "")
    names, ranks, rank, left, right = zip(*rows, strict=True)
    return [
        Column("kind", names, style="bold"),
        Column("ranks", ranks),
        Column("rank", rank, right=True),
        Column("left", left, fit=True),
        Column("right", right, fit=True),
    ]


def _sides_of(example: RankDiff, left_size: int, right_size: int) -> tuple[str, str]:
    return _members(example.left, left_size), _members(example.right, right_size)


def _members(ranks: tuple[int, ...] | None, size: int) -> str:
    if ranks is None:
        return "none"
    if len(ranks) == size:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks))}, …] {size:,} ranks"


def _lines(found: Difference) -> Iterator[str]:
    for side, kinds in (("left", found.only_left), ("right", found.only_right)):
        if kinds:
            yield f"only {side}: {', '.join(map(_only, kinds))}"
    if found.order:
        yield "order: the common kinds come in another order, which decides who leads a shared communicator"
    if found.equal:
        yield f"equal: {', '.join(found.equal)}"


def _only(kind: OnlyKind) -> str:
    return kind.name + (f" (same groups as {' '.join(kind.same_as)})" if kind.same_as else "")
