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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Column", "cut", "pages", "print_columns", "ranks_text"]

_GAP = 2


@dataclass(frozen=True)
class Column:
    """A heading and its cells. A column with ``fit`` takes what is left of the line, ``least`` or more.

    ``shorten`` makes a cell of a fitting column shorter; by default it is cut at a space.
    """

    head: str
    cells: Sequence[str]
    right: bool = False
    style: str = ""
    fit: bool = False
    least: int = 24
    shorten: Callable[[int, int], str] | None = None

    @cached_property  # each line asks for it
    def width(self) -> int:
        """The width that every cell needs."""
        return max(map(len, (self.head, *self.cells)))

    @property
    def need(self) -> int:
        """The width below which the column goes to another table."""
        return min(self.width, self.least) if self.fit else self.width

    def fitted(self, width: int) -> Column:
        """The column no wider than ``width``."""
        if not self.fit or self.width <= width:
            return self
        shorten = self.shorten or (lambda row, width: cut(self.cells[row], width))
        cells = [shorten(row, width) for row in range(len(self.cells))]
        return Column(self.head, cells, self.right, self.style)


def cut(text: str, width: int) -> str:
    """The text if it fits, else its first words and an ellipsis.

    >>> cut("one two three", 9), cut("one two three", 13)
    ('one two …', 'one two three')
    """
    if len(text) <= width:
        return text
    words = text[: width - 1].rsplit(" ", 1)[0] if " " in text[: width - 1] else text[: width - 1]
    return f"{words} …" if len(words) + 2 <= width else f"{words[: width - 1]}…"


def ranks_text(ranks: Sequence[int], size: int, width: int) -> str:
    """A group of ``size`` ranks by its first ones, as many as fit: whole numbers, never a part of one.

    >>> ranks_text(range(0, 256, 2), 128, 20), ranks_text((0, 10), 2, 20)
    ('[0, 2, 4, …] of 128', '[0, 10]')
    """
    for shown in range(len(ranks), 0, -1):
        tail = "]" if shown == size else f", …] of {size:,}"
        text = f"[{', '.join(map(str, ranks[:shown]))}{tail}"
        if len(text) <= width:
            return text
    return "…"


def pages(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """The columns in tables of at most ``width``, each headed by the first column.

    >>> wide = [Column(head, ["x" * 30]) for head in ("a", "b", "c")]
    >>> [[column.head for column in page] for page in pages(wide, 70)]
    [['a', 'b'], ['a', 'c']]
    """
    found = [[columns[0]]]
    for column in columns[1:]:
        taken = sum(other.need + _GAP for other in found[-1])
        if taken + column.need > width and len(found[-1]) > 1:
            found.append([columns[0]])
        found[-1].append(column)
    return [_fitted(page, width) for page in found]


def _fitted(page: list[Column], width: int) -> list[Column]:
    """Share what is left of the line evenly between the fitting columns; what one does not use goes on."""
    left = width - sum(column.need + _GAP for column in page) + _GAP
    waiting = sum(column.fit for column in page)
    fitted = []
    for column in page:
        share = max(0, left) // waiting if column.fit else 0
        waiting -= column.fit
        done = column.fitted(column.need + share)
        left -= done.width - column.need
        fitted.append(done)
    return fitted


def print_columns(console: Console, columns: Sequence[Column]) -> None:
    """Print the columns, in as many tables as the width asks for."""
    for number, page in enumerate(pages(columns, console.width)):
        if number:
            console.print()
        console.print(Text("\n").join(_lines(page)), soft_wrap=True)


def _lines(page: list[Column]) -> Iterator[Text]:
    yield _line([(column, column.head, "bold") for column in page])
    yield _line([(column, "─" * column.width, "dim") for column in page])
    for cells in zip(*(column.cells for column in page), strict=True):
        yield _line([(column, cell, column.style) for column, cell in zip(page, cells, strict=True)])


def _line(cells: list[tuple[Column, str, str]]) -> Text:
    line = Text()
    for number, (column, cell, style) in enumerate(cells):
        padded = cell.rjust(column.width) if column.right else cell.ljust(column.width)
        line.append(" " * _GAP * bool(number)).append(padded, style)
    line.rstrip()
    return line
