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
from typing import NamedTuple

from rich.text import Text

from rankmesh.cli.console import out

__all__ = ["bytes_text", "cut", "pages", "print_facts", "print_table", "ranks_text"]

_GAP = 2
# The last column of a table is cut to this width at the least.
_LEAST = 24
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
Row = Sequence[str | int]


class _Column(NamedTuple):
    """A heading and its cells, as wide as the widest; the sign ``<`` or ``>`` says where the texts are."""

    head: str
    cells: Sequence[str]
    sign: str
    width: int

    def texts(self) -> Iterator[str]:
        for text in (self.head, "─" * self.width, *self.cells):
            yield f"{text:{self.sign}{self.width}}"


def print_table(heads: Sequence[str], rows: Iterable[Row]) -> None:
    """Print rows under their headings, as many columns in a table as fit; a column without a text is left out.

    A heading that begins with ``>`` is of a column that is aligned to the right; numbers have commas.
    """
    console = out()
    for number, page in enumerate(pages(_columns(heads, rows), console.width)):
        lines = [Text()] if number else []
        for place, (first, *others) in enumerate(zip(*(column.texts() for column in page), strict=True)):
            line = Text(first, "dim" if place == 1 else "bold")
            line.append(" " * _GAP + (" " * _GAP).join(others) if others else "", ("bold", "dim", "")[min(place, 2)])
            line.rstrip()
            lines.append(line)
        console.print(Text("\n").join(lines), soft_wrap=True)


def _columns(heads: Sequence[str], rows: Iterable[Row]) -> list[_Column]:
    listed = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    found = []
    for head, cells in zip(heads, zip(*listed, strict=True) if listed else [()] * len(heads), strict=True):
        if any(cells) or not listed:
            text = head.removeprefix(">")
            found.append(_Column(text, cells, "<" if text == head else ">", max(map(len, (text, *cells)))))
    return found


def pages(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Return the columns in tables of at most ``width``, each headed by the first; its last column takes what is left.

    >>> wide = _columns(("a", "b", "c"), [("x" * 30,) * 3])
    >>> [[column.head for column in page] for page in pages(wide, 70)]
    [['a', 'b'], ['a', 'c']]
    """
    found = [[columns[0]]]
    for column in columns[1:]:
        if _taken(found[-1]) + min(column.width, _LEAST) > width and len(found[-1]) > 1:
            found.append([columns[0]])
        found[-1].append(column)
    return [[*page[:-1], _fitted(page[-1], max(_LEAST, width - _taken(page[:-1])))] for page in found]


def _taken(columns: Sequence[_Column]) -> int:
    return sum(column.width + _GAP for column in columns)


def _fitted(column: _Column, width: int) -> _Column:
    if column.width <= width:
        return column
    cells = [cut(cell, width) for cell in column.cells]
    return column._replace(cells=cells, width=max(map(len, (column.head, *cells))))


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names with their texts beside them, wrapped to the width."""
    listed, console = list(facts), out()
    margin = max(len(name) for name, _ in listed) + _GAP
    for name, text in listed:
        for number, line in enumerate(wrap(text, max(40, console.width - margin))):
            console.print(f"{'' if number else name:<{margin}}{line}", soft_wrap=True)


def cut(text: str, width: int) -> str:
    """Return the text if it fits, else its first words and an ellipsis: whole numbers, and whole groups if one fits.

    >>> cut("one two three", 9), cut("[0, 2, 4] [1, 3, 5]", 17), cut("[0, 2, 4] [1, 3, 5]", 9), cut("one two", 7)
    ('one two …', '[0, 2, 4] …', '[0, 2, …', 'one two')
    """
    if len(text) <= width:
        return text
    words = text[: width - 1].rpartition(" ")[0] or text[: width - 2]
    if words.startswith("[") and not words.endswith("]"):
        groups, bracket, _ = words.rpartition("]")
        words = groups + bracket or words
    return f"{words} …"


def ranks_text(ranks: Sequence[int], size: int) -> str:
    """Return the first ranks of a group of ``size``.

    >>> ranks_text((0, 2, 4), 128), ranks_text((0, 10), 2)
    ('[0, 2, 4, …]', '[0, 10]')
    """
    return f"[{', '.join(map(str, ranks))}{', …' if len(ranks) < size else ''}]"


def bytes_text(count: int) -> str:
    """Format a number of bytes.

    >>> bytes_text(512), bytes_text(3 << 20), bytes_text(1536)
    ('512 B', '3 MiB', '1.5 KiB')
    """
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
