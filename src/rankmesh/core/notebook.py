"""What a notebook shows of a value in the last line of a cell: small tables, whatever the size of the world.

Every package may need it, so it is here and draws no picture; pictures are `rankmesh.viz`'s.

>>> table(("axis", "size"), [("tp", 2), ("dp", 4)])
'<table><tr><th>axis</th><th>size</th></tr><tr><td>tp</td><td>2</td></tr><tr><td>dp</td><td>4</td></tr></table>'
>>> Text("rank 3 of 4")
rank 3 of 4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankmesh.core.mesh import Mesh

__all__ = ["ROWS", "Text", "mesh_tables", "ranks_text", "section", "table"]

# Up to so many ranks of a mesh are drawn, so many in a row where the axes allow it.
_DRAWN, _ACROSS = 64, 8
# How many rows of a table are shown, and how many ranks of a group.
ROWS, _RANKS = 20, 8


class Text(str):
    """A string of several lines that is shown as it is, not quoted, where a prompt or a notebook shows it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table of up to ``ROWS`` rows; a last line says how many more there are."""
    lines = [tuple(row) for row in rows]
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in lines[:ROWS])
    more = len(lines) - ROWS
    if more > 0:
        body += f'<tr><td colspan="{len(heads)}">and {more:,} more</td></tr>'
    return f"<table><tr>{_cells('th', heads)}</tr>{body}</table>"


def section(title: str, *tables: str) -> str:
    """A title above tables."""
    return f"<p><b>{escape(title)}</b></p>{''.join(tables)}"


def ranks_text(ranks: Iterable[int], size: int) -> str:
    """The first ranks of a group, and how many there are.

    >>> ranks_text(range(4), 4), ranks_text(range(64), 64)
    ('[0, 1, 2, 3]', '[0, 1, 2, 3, 4, 5, 6, 7, ... 64 ranks]')
    """
    listed = ", ".join(map(str, islice(ranks, _RANKS)))
    return f"[{listed}]" if size <= _RANKS else f"[{listed}, ... {size:,} ranks]"


def mesh_tables(mesh: Mesh) -> str:
    """Sizes and strides of a mesh and its views, and of a small mesh every rank in its place."""
    rows = [
        (name, axis, size, layout.strides[axis])
        for name, layout in {"mesh": mesh, **mesh.views}.items()
        for axis, size in layout.axes.items()
    ]
    tables = [table(("layout", "axis", "size", "stride"), rows)]
    if mesh.size <= _DRAWN:
        tables.append(_drawing(mesh))
    return section(f"{mesh}: {mesh.rank_range}", *tables)


def _drawing(mesh: Mesh) -> str:
    """The ranks as a table: the first axes from left to right, up to eight ranks, the others downward."""
    sizes, strides = mesh.axes, mesh.strides
    names = [name for name, size in sizes.items() if size > 1] or list(sizes)[:1]
    count = 1
    while count < len(names) and prod(sizes[axis] for axis in names[: count + 1]) <= _ACROSS:
        count += 1
    across, down = names[:count], names[count:]
    width = prod(sizes[axis] for axis in across)

    def at(position: int, axes: list[str]) -> str:
        return " ".join(f"{axis}={position // strides[axis] % sizes[axis]}" for axis in axes)

    rows = [
        (at(start, down), *(mesh.rank_range.rank(start + number) for number in range(width)))
        for start in range(0, mesh.size, width)
    ]
    return table(("", *(at(number, across) for number in range(width))), rows)


def _cells(tag: str, row: Sequence[object]) -> str:
    return "".join(f"<{tag}>{escape(str(value))}</{tag}>" for value in row)
