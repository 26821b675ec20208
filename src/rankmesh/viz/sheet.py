"""Positions of ranks in a picture of a mesh, and the mesh as text: the fastest axes across, the slowest as blocks.

```
tp=2, dp=8, pp=2              pp=0                     pp=1
                              tp=0  tp=1               tp=0  tp=1
                        dp=0     0     1         dp=0    16    17
                        dp=1     2     3         dp=1    18    19
```

A row holds consecutive positions, so nodes are runs of cells.

>>> from rankmesh.core import Mesh
>>> drawn = sheet(Mesh(tp=2, dp=8, pp=2), width=2)
>>> drawn.headers, [block.label for block in drawn.blocks], drawn.blocks[1].rows[1]
((('tp=0', 'tp=1'),), ['pp=0', 'pp=1'], Row(label='dp=1', ranks=(18, 19)))
>>> print(grid(Mesh(tp=2, cp=2, dp=2, pp=2), width=4))
     pp=0                   pp=1
     cp=0       cp=1        cp=0       cp=1
     tp=0 tp=1  tp=0 tp=1   tp=0 tp=1  tp=0 tp=1
dp=0    0    1     2    3      8    9    10   11
dp=1    4    5     6    7     12   13    14   15
"""

from __future__ import annotations

from colorsys import hls_to_rgb
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

from rankmesh.core.mesh import Mesh
from rankmesh.core.strided import IntArray, Strided

__all__ = ["Block", "Part", "Row", "Sheet", "colours", "grid", "part_of", "sheet"]

_Axes = list[tuple[str, int]]


@dataclass(frozen=True)
class Row:
    """Consecutive positions side by side."""

    label: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """The rows of one position of the slowest axis; the label is empty when there is one block."""

    label: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Sheet:
    """The drawing: ``headers`` are lines of column labels, the slowest axis first."""

    headers: tuple[tuple[str, ...], ...]
    blocks: tuple[Block, ...]

    @property
    def columns(self) -> int:
        """Number of cells in a row."""
        return len(self.headers[0])


def sheet(mesh: Mesh, *, width: int = 8, part: Part | None = None) -> Sheet:
    """Draw up to ``width`` cells across, of a ``part`` of the mesh where given; axes of size 1 are left out."""
    shown = part or part_of(mesh, mesh.size)
    axes = [(name, size) for name, size in shown.sizes.items() if size > 1] or list(shown.sizes.items())[:1]
    across = _across(axes, width)
    rest = axes[len(across) :]
    ranks = shown.ranks
    if prod(size for _, size in across) > width:
        return _wrapped(across[0], rest, ranks, width)
    blocks, down = (rest[-1:], rest[:-1]) if len(rest) > 1 else ([], rest)
    columns = prod(size for _, size in across)
    table = ranks.reshape(-1, prod(size for _, size in down), columns)
    headers = tuple(
        tuple(f"{name}={digit}" for digit in _digits(across, number)) for number, (name, _) in enumerate(across)
    )
    return Sheet(headers[::-1], _blocks(table, blocks, _labels(down)))


def _across(axes: _Axes, width: int) -> _Axes:
    """Return the leading axes that fit, at least one."""
    count = 1
    while count < len(axes) and prod(size for _, size in axes[: count + 1]) <= width:
        count += 1
    return axes[:count]


def _digits(axes: _Axes, number: int) -> list[int]:
    """Return the position along one of the axes for every cell that they span, in order."""
    before = prod(size for _, size in axes[:number])
    return [index // before % axes[number][1] for index in range(prod(size for _, size in axes))]


def _labels(axes: _Axes) -> list[str]:
    if not axes:
        return [""]
    digits = [_digits(axes, number) for number in range(len(axes))]
    return [" ".join(f"{axes[i][0]}={digit}" for i, digit in enumerate(row)) for row in zip(*digits, strict=True)]


def _blocks(table: IntArray, axes: _Axes, labels: list[str]) -> tuple[Block, ...]:
    return tuple(
        Block(label, tuple(Row(row, tuple(ranks)) for row, ranks in zip(labels, part, strict=True)))
        for label, part in zip(_labels(axes), table.tolist(), strict=True)
    )


def _wrapped(axis: tuple[str, int], rest: _Axes, ranks: IntArray, width: int) -> Sheet:
    """Return a long fastest axis in rows of ``width``; the last row of each may be shorter. The rest are blocks."""
    name, size = axis
    starts = range(0, size, width)
    blocks = [
        Block(
            label,
            tuple(
                Row(f"{name}={start}-{min(start + width, size) - 1}", tuple(line[start : start + width]))
                for start in starts
            ),
        )
        for label, line in zip(_labels(rest), ranks.reshape(-1, size).tolist(), strict=True)
    ]
    return Sheet((tuple(f"+{column}" for column in range(width)),), tuple(blocks))


# -- text -------------------------------------------------------------------------------------------------------------

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
    """Count the columns between two wider gaps: one run of the fastest axis."""
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


# -- the part of a large mesh -----------------------------------------------------------------------------------------


# So many ranks are enough to see how groups lie.
_ENOUGH = 64


@dataclass(frozen=True)
class Part:
    """The first positions along each axis, the ranks there in order, and words for what is left out (none: empty)."""

    sizes: dict[str, int]
    ranks: IntArray
    left_out: str


def part_of(mesh: Mesh, most: int) -> Part:
    """Return the part of a mesh that a picture shows: what repeats is drawn once.

    Up to ``most`` ranks it is the mesh. Of a larger one the largest axis is cut first, to one position where the rest
    is enough to see.

    >>> from rankmesh.core import Mesh
    >>> shown = part_of(Mesh(tp=8, pp=16, dp=128), 512)
    >>> shown.sizes, shown.left_out, len(shown.ranks)
    ({'tp': 8, 'pp': 16, 'dp': 1}, 'dp=0 of 128', 128)
    """
    sizes = dict(mesh.axes)
    while prod(sizes.values()) > most:
        name = max(sizes, key=lambda axis: (sizes[axis], mesh.strides[axis]))
        rest = prod(sizes.values()) // sizes[name]
        sizes[name] = max(1, min(sizes[name] - 1, _ENOUGH // rest))
    pattern = Strided(tuple((size, mesh.strides[name]) for name, size in sizes.items()))
    last = {name: f" to {sizes[name] - 1}" if sizes[name] > 1 else "" for name in sizes}
    cut = [f"{name}=0{last[name]} of {size}" for name, size in mesh.axes.items() if sizes[name] < size]
    return Part(sizes, mesh.rank_range.ranks(pattern.values()), ", ".join(cut))


# -- colours ----------------------------------------------------------------------------------------------------------


# The golden ratio spreads any number of hues evenly, and puts consecutive ones far apart.
_STEP = 0.6180339887498949
_FIRST = 0.593
_LIGHTNESS = (0.78, 0.70, 0.88)
_SATURATION = 0.80


def colours(count: int) -> list[str]:
    """``count`` colours as hexadecimal RGB, light enough for dark text, neighbours far apart.

    Lightness changes after every twelve.

    >>> colours(3)
    ['#9ac2f4', '#dcf49a', '#f19af4']
    """
    return [_hex((_FIRST + number * _STEP) % 1.0, _LIGHTNESS[number // 12 % 3]) for number in range(count)]


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in hls_to_rgb(hue, lightness, _SATURATION))
