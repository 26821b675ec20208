"""Tables that fit the terminal: columns that do not fit go to a further table, headed by the first column.

```
width enough          narrow
name  size  members   name  size
tp       2  [0, 1]    tp       2

                      name  members
                      tp    [0, 1]
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.text import Text

from rankmesh.viz.tables import Column

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Column", "bytes_text", "pages", "print_columns", "print_facts"]

_GAP = 2
# The last column of a table is cut to this width at the least.
_LEAST = 24
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def pages(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Return the columns in tables of at most ``width``, each headed by the first; its last column takes what is left.

    >>> wide = [Column(head, ["x" * 30]) for head in ("a", "b", "c")]
    >>> [[column.head for column in page] for page in pages(wide, 70)]
    [['a', 'b'], ['a', 'c']]
    """
    found = [[columns[0]]]
    for column in columns[1:]:
        if _taken(found[-1]) + min(column.width, _LEAST) > width and len(found[-1]) > 1:
            found.append([columns[0]])
        found[-1].append(column)
    return [[*page[:-1], page[-1].fitted(max(_LEAST, width - _taken(page[:-1])))] for page in found]


def _taken(columns: Sequence[Column]) -> int:
    return sum(column.width + _GAP for column in columns)


def print_columns(console: Console, columns: Sequence[Column]) -> None:
    """Print the columns, in as many tables as the width asks for."""
    for number, page in enumerate(pages(columns, console.width)):
        if number:
            console.print()
        console.print(Text("\n").join(_lines(page)), soft_wrap=True)


def print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Print names with their texts beside them, wrapped to the width."""
    listed = list(facts)
    margin = max(len(name) for name, _ in listed) + _GAP
    for name, text in listed:
        for number, line in enumerate(wrap(text, max(40, console.width - margin))):
            console.print(f"{'' if number else name:<{margin}}{line}", soft_wrap=True)


def _lines(page: list[Column]) -> Iterator[Text]:
    yield _line(page, [column.head for column in page], "bold", "bold")
    yield _line(page, ["─" * column.width for column in page], "dim", "dim")
    for cells in zip(*(column.cells for column in page), strict=True):
        yield _line(page, cells, "bold", "")


def _line(page: list[Column], cells: Sequence[str], first: str, others: str) -> Text:
    line = Text()
    for number, (column, cell) in enumerate(zip(page, cells, strict=True)):
        padded = cell.rjust(column.width) if column.right else cell.ljust(column.width)
        line.append(" " * _GAP * bool(number)).append(padded, others if number else first)
    line.rstrip()
    return line


def bytes_text(count: int) -> str:
    """Format a number of bytes.

    >>> bytes_text(512), bytes_text(3 << 20), bytes_text(1536)
    ('512 B', '3 MiB', '1.5 KiB')
    """
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
