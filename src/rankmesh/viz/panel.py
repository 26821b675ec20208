"""One panel of the picture: every rank of a mesh as a cell, coloured by its group of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement

from rankmesh.core.groups import Groups
from rankmesh.core.plan import Plan
from rankmesh.viz.sheet import Block, Part, Sheet, colours, part_of, sheet

if TYPE_CHECKING:
    from rankmesh.placement import Cluster

__all__ = ["GAP", "Panel", "document", "panel", "put"]

GAP = 20
_CELL_WIDTH, _CELL_HEIGHT = 42, 36
_LINE, _LETTER = 16, 7
_BLOCKS_WIDTH = 900
_LEGEND, _LEGEND_RANKS = 12, 6

_STYLE = (
    "text{font-family:ui-sans-serif,system-ui,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif;fill:#1b1f24}"
    ".title{font-size:15px;font-weight:600}.kind{font-size:14px;font-weight:600}"
    ".label{font-size:11px;fill:#57606a}.rank{font-size:13px;font-weight:600;text-anchor:middle}"
    ".group{font-size:9px;fill:#424a53;text-anchor:middle}.end{text-anchor:end}"
    ".node{fill:none;stroke:#1b1f24;stroke-width:2.5;stroke-linecap:square}"
)


@dataclass(frozen=True)
class Panel:
    """A drawing from (0, 0) to (width, height), in pixels."""

    drawing: Element
    width: int
    height: int


def put(parent: Element, tag: str, text: str | None = None, **attributes: object) -> Element:
    """Add an element; the text is escaped when the tree is written."""
    element = SubElement(parent, tag, {name.replace("_", "-"): str(value) for name, value in attributes.items()})
    element.text = text
    return element


def document(width: int, height: int, label: str) -> Element:
    """Return an empty white picture of this size in pixels; ``label`` is read by screen readers."""
    size = {"viewBox": f"0 0 {width} {height}", "width": str(width), "height": str(height)}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "role": "img", "aria-label": label})
    put(root, "style", _STYLE)
    put(root, "rect", x=0, y=0, width=width, height=height, fill="#ffffff")
    return root


def panel(plan: Plan, name: str, cluster: Cluster | None, part: Part | None = None) -> Panel:
    """Return the mesh of a plan with the groups of one kind in colour, and a legend."""
    groups = plan.groups(name)
    shown = part or part_of(plan.mesh, plan.mesh.size)
    drawn = sheet(plan.mesh, part=shown)
    group_of = _groups_of(groups, shown)
    numbers = sorted(set(group_of.values()))
    paint = _Paint(
        dict(zip(numbers, colours(len(numbers)), strict=True)),
        group_of,
        None if cluster is None else cluster.hosts_of(range(plan.mesh.rank_range.stop)).tolist(),
    )
    root = Element("g")
    view = plan.spec(name).view
    words = f"{name}: {_count(len(groups), 'group')} of {groups.size}" + (f", view {view}" if view else "")
    put(root, "text", words, x=0, y=12, **{"class": "kind"})
    width, y = len(words) * 8, 24
    margin = max(len(row.label) for row in drawn.blocks[0].rows) * _LETTER + 6
    block_width = drawn.columns * _CELL_WIDTH + GAP
    across = max(1, (_BLOCKS_WIDTH - margin) // block_width)
    for start in range(0, len(drawn.blocks), across):
        band = drawn.blocks[start : start + across]
        heights = [
            _block(root, drawn, block, paint, (margin, number * block_width, y)) for number, block in enumerate(band)
        ]
        width, y = max(width, margin + len(band) * block_width - GAP), y + max(heights) + _LINE
    legend_width, legend_height = _legend(root, groups, paint, y)
    return Panel(root, max(width, legend_width), y + legend_height)


def _groups_of(groups: Groups, part: Part) -> dict[int, int]:
    """Return the number of the group of each rank that is drawn and in one."""
    if not part.left_out:
        return {rank: index for index, ranks in enumerate(groups.tolist()) for rank in ranks}
    return {rank: groups.index_of(rank) for rank in part.ranks.tolist() if groups.has(rank)}


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class _Paint:
    """The colour of each group, the group of each rank, and the host of each if they are known."""

    colours: Mapping[int, str]
    group_of: Mapping[int, int]
    hosts: list[int] | None

    def node(self, rank: int) -> int:
        return 0 if self.hosts is None else self.hosts[rank]


def _block(root: Element, drawn: Sheet, block: Block, paint: _Paint, place: tuple[int, int, int]) -> int:
    margin, shift, y = place
    left, top = margin + shift, y
    for line in ([[block.label]] if block.label else []) + [list(header) for header in drawn.headers]:
        top += _LINE
        for column, label in enumerate(line):
            if column == 0 or line[column - 1] != label:
                put(root, "text", label, x=left + column * _CELL_WIDTH + 3, y=top - 5, **{"class": "label"})
    for number, row in enumerate(block.rows):
        y_row = top + number * _CELL_HEIGHT
        if shift == 0:
            put(root, "text", row.label, x=margin - 6, y=y_row + 22, **{"class": "label end"})
        for column, rank in enumerate(row.ranks):
            _cell(root, rank, paint, left + column * _CELL_WIDTH, y_row)
    put(root, "path", d=" ".join(_edges(block, paint, left, top)), **{"class": "node"})
    return top - y + len(block.rows) * _CELL_HEIGHT


def _cell(root: Element, rank: int, paint: _Paint, x: int, y: int) -> None:
    group = paint.group_of.get(rank)
    cell = put(root, "g", **{"class": "cell"})
    put(cell, "title", f"rank {rank}, " + ("in no group of this kind" if group is None else f"group {group}"))
    fill, stroke = ("#ffffff", "#d0d7de") if group is None else (paint.colours[group], "#ffffff")
    put(
        cell,
        "rect",
        x=x + 2,
        y=y + 2,
        width=_CELL_WIDTH - 4,
        height=_CELL_HEIGHT - 4,
        rx=4,
        fill=fill,
        stroke=stroke,
    )
    middle = x + _CELL_WIDTH // 2
    put(cell, "text", str(rank), x=middle, y=y + (22 if group is None else 18), **{"class": "rank"})
    if group is not None:
        put(cell, "text", f"g{group}", x=middle, y=y + 30, **{"class": "group"})


def _edges(block: Block, paint: _Paint, left: int, top: int) -> Iterator[str]:
    """Yield the sides of cells where a node ends."""
    node = {
        (column, line): paint.node(rank) for line, row in enumerate(block.rows) for column, rank in enumerate(row.ranks)
    }
    for (column, line), here in node.items():
        x, y = left + column * _CELL_WIDTH, top + line * _CELL_HEIGHT
        if node.get((column - 1, line)) != here:
            yield f"M{x} {y}v{_CELL_HEIGHT}"
        if node.get((column + 1, line)) != here:
            yield f"M{x + _CELL_WIDTH} {y}v{_CELL_HEIGHT}"
        if node.get((column, line - 1)) != here:
            yield f"M{x} {y}h{_CELL_WIDTH}"
        if node.get((column, line + 1)) != here:
            yield f"M{x} {y + _CELL_HEIGHT}h{_CELL_WIDTH}"


def _legend(root: Element, groups: Groups, paint: _Paint, y: int) -> tuple[int, int]:
    """Return two columns of swatches with the first members; its width and height."""
    numbers = list(paint.colours)[:_LEGEND]
    words = [f"g{number}: {_ranks(list(groups[number][: _LEGEND_RANKS + 1]))}" for number in numbers]
    column = max(map(len, words)) * 6 + 34
    lines = -(-len(words) // 2)
    for number, text in enumerate(words):
        x, line = number // lines * column, y + number % lines * _LINE
        put(root, "rect", x=x, y=line, width=12, height=12, rx=3, fill=paint.colours[numbers[number]])
        put(root, "text", text, x=x + 18, y=line + 10, **{"class": "label"})
    left = len(groups) - len(numbers)
    if left:
        put(
            root,
            "text",
            f"and {_count(left, 'more group')}",
            x=18,
            y=y + lines * _LINE + 10,
            **{"class": "label"},
        )
    return column * (2 if len(words) > 1 else 1), (lines + (1 if left else 0)) * _LINE


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_LEGEND_RANKS]))
    return shown + (" …" if len(ranks) > _LEGEND_RANKS else "")
