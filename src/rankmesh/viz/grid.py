"""A mesh as text: every rank in its place.

>>> from rankmesh.core import Mesh
>>> print(grid(Mesh(tp=2, cp=2, dp=2, pp=2), width=4))
     pp=0                   pp=1
     cp=0       cp=1        cp=0       cp=1
     tp=0 tp=1  tp=0 tp=1   tp=0 tp=1  tp=0 tp=1
dp=0    0    1     2    3      8    9    10   11
dp=1    4    5     6    7     12   13    14   15
"""

from __future__ import annotations

from itertools import zip_longest

from rankmesh.core.mesh import Mesh
from rankmesh.viz.sheet import Block, Sheet, sheet

__all__ = ["grid"]

_GAP = "   "


def grid(mesh: Mesh, *, width: int = 8, line: int = 100) -> str:
    """Return the mesh as text, ``width`` ranks across and ``line`` characters to a line."""
    drawn = sheet(mesh, width=width)
    labels = [row.label for row in drawn.blocks[0].rows]
    margin = max(map(len, labels)) + 1 if any(labels) else 0
    blocks = [_block(drawn, block, _cell(drawn)) for block in drawn.blocks]
    across = max(1, (line - margin + len(_GAP)) // (_width(drawn) + len(_GAP)))
    bands = [blocks[start : start + across] for start in range(0, len(blocks), across)]
    return "\n\n".join(_band(band, labels, margin) for band in bands)


def _cell(drawn: Sheet) -> int:
    ranks = max(len(str(rank)) for block in drawn.blocks for row in block.rows for rank in row.ranks)
    return max(ranks, *(len(label) for header in drawn.headers for label in header))


def _step(drawn: Sheet) -> int:
    """Return how many columns lie between two wider gaps: one run of the fastest axis."""
    return len(set(drawn.headers[-1]))


def _width(drawn: Sheet) -> int:
    return drawn.columns * (_cell(drawn) + 1) + drawn.columns // _step(drawn) - 2


def _line(cells: list[str], step: int) -> str:
    runs = [" ".join(cells[start : start + step]) for start in range(0, len(cells), step)]
    return "  ".join(runs)


def _block(drawn: Sheet, block: Block, cell: int) -> list[str]:
    step, lines = _step(drawn), [block.label] if block.label else []
    for header in drawn.headers:
        shown = [label if index == 0 or header[index - 1] != label else "" for index, label in enumerate(header)]
        lines.append(_line([label.ljust(cell) for label in shown], step))
    lines += [_line([str(rank).rjust(cell) for rank in row.ranks], step) for row in block.rows]
    return [line.ljust(_width(drawn)) for line in lines]


def _band(blocks: list[list[str]], labels: list[str], margin: int) -> str:
    heads = len(blocks[0]) - len(labels)
    rows = zip_longest([*[""] * heads, *labels], *blocks, fillvalue="")
    return "\n".join((row[0].ljust(margin) + _GAP.join(row[1:])).rstrip() for row in rows)
