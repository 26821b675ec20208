"""A mesh as an SVG picture: one panel a kind of group, each group in a colour, nodes outlined.

```
tp: 4 groups of 2, stride 2x1
┏━━━━┯━━━━┳━━━━┯━━━━┓
┃ 0  │ 1  ┃ 2  │ 3  ┃      a cell: the rank, and the number of its group; white: in no group of this kind
┃ g0 │ g0 ┃ g1 │ g1 ┃      a heavy line: the edge of a node
┗━━━━┷━━━━┻━━━━┷━━━━┛
```

>>> from rankmesh.readers.source import read
>>> text = picture(read("tp=2,dp=2").plan, ["tp"], gpus_per_node=2)
>>> text.startswith("<svg"), text.count('class="cell"'), "2 groups of 2" in text
(True, 4, True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, tostring

from rankmesh.core.groups import Groups
from rankmesh.core.plan import Plan
from rankmesh.errors import counted
from rankmesh.viz.sheet import Block, Part, Sheet, colours, part_of, sheet

if TYPE_CHECKING:
    from rankmesh.core.clusters.cluster import Cluster

__all__ = ["LIMIT", "picture", "pictured_kinds"]

LIMIT = 512
_TARGET_WIDTH = 1000


def picture(
    plan: Plan, names: Sequence[str] | None = None, *, cluster: Cluster | None = None, gpus_per_node: int | None = None
) -> str:
    """SVG text with one panel for each kind in ``names``; by default each that leads a communicator.

    The ``cluster`` gives the hosts; without, each has ``gpus_per_node`` consecutive ranks.

    Of a mesh of more than 512 ranks one part is drawn, such as one replica: the rest repeats it.
    """
    part = part_of(plan.mesh, LIMIT)
    if cluster is None and gpus_per_node is not None:
        from rankmesh.core.clusters.cluster import Cluster

        cluster = Cluster.of_nodes(gpus_per_node, plan.mesh.rank_range.stop)
    panels = [_panel(plan, name, cluster, part) for name in names or pictured_kinds(plan)]
    return tostring(_sheet_of(plan, panels, cluster, part), encoding="unicode")


def pictured_kinds(plan: Plan) -> list[str]:
    """Return the kinds worth a panel: the first of each class that shares, without groups of one rank."""
    canonical = [names[0] for names in plan.sharing if plan.groups(names[0]).size > 1]
    return canonical or [spec.name for spec in plan.specs[:1]]


def _sheet_of(plan: Plan, panels: list[_Panel], cluster: Cluster | None, part: Part) -> Element:
    """Return the panels in rows, as many side by side as fit the target width."""
    places, width, height = _flow(panels)
    title = f"{plan.mesh}: {plan.mesh.size} ranks"
    if part.left_out:
        title += f", of which {len(part.ranks)} are drawn ({part.left_out})"
    if cluster is not None:
        title += f", heavy lines are nodes of {max(cluster.host_sizes)}"
    root = _document(width, height, title)
    _put(root, "text", title, x=_GAP, y=_GAP + 8, style="title")
    for drawn, (x, y) in zip(panels, places, strict=True):
        drawn.drawing.set("transform", f"translate({x} {y})")
        root.append(drawn.drawing)
    return root


def _flow(panels: list[_Panel]) -> tuple[list[tuple[int, int]], int, int]:
    places: list[tuple[int, int]] = []
    x, y, tallest, width = _GAP, 3 * _GAP, 0, 420
    for part in panels:
        if x > _GAP and x + part.width > _TARGET_WIDTH:
            x, y, tallest = _GAP, y + tallest + _GAP, 0
        places.append((x, y))
        x += part.width + 2 * _GAP
        width, tallest = max(width, x - _GAP), max(tallest, part.height)
    return places, width, y + tallest + _GAP


# -- one panel: every rank of a mesh as a cell, coloured by its group of one kind ------------------------------------

_GAP = 20
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
class _Panel:
    """A drawing from (0, 0) to (width, height), in pixels."""

    drawing: Element
    width: int
    height: int


def _put(parent: Element, tag: str, text: str | None = None, style: str = "", **attributes: object) -> Element:
    """Add an element, with a class of the style sheet; the text is escaped when the tree is written."""
    named = {name: str(value) for name, value in attributes.items()}
    element = SubElement(parent, tag, named | ({"class": style} if style else {}))
    element.text = text
    return element


def _document(width: int, height: int, label: str) -> Element:
    """Return an empty white picture of this size in pixels; ``label`` is read by screen readers."""
    size = {"viewBox": f"0 0 {width} {height}", "width": str(width), "height": str(height)}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "role": "img", "aria-label": label})
    _put(root, "style", _STYLE)
    _put(root, "rect", x=0, y=0, width=width, height=height, fill="#ffffff")
    return root


def _panel(plan: Plan, name: str, cluster: Cluster | None, part: Part) -> _Panel:
    """Return the mesh of a plan with the groups of one kind in colour, and a legend."""
    groups = plan.groups(name)
    drawn = sheet(plan.mesh, part=part)
    group_of = _groups_of(groups, part)
    numbers = sorted(set(group_of.values()))
    paint = _Paint(
        dict(zip(numbers, colours(len(numbers)), strict=True)),
        group_of,
        None if cluster is None else cluster.hosts_of(range(plan.mesh.rank_range.stop)).tolist(),
    )
    root = Element("g")
    view = plan.spec(name).view
    words = f"{name}: {counted(len(groups), 'group')} of {groups.size}" + (f", view {view}" if view else "")
    _put(root, "text", words, x=0, y=12, style="kind")
    width, y = len(words) * 8, 24
    margin = max(len(row.label) for row in drawn.blocks[0].rows) * _LETTER + 6
    block_width = drawn.columns * _CELL_WIDTH + _GAP
    across = max(1, (_BLOCKS_WIDTH - margin) // block_width)
    for start in range(0, len(drawn.blocks), across):
        band = drawn.blocks[start : start + across]
        heights = [
            _block(root, drawn, block, paint, (margin, number * block_width, y)) for number, block in enumerate(band)
        ]
        width, y = max(width, margin + len(band) * block_width - _GAP), y + max(heights) + _LINE
    legend_width, legend_height = _legend(root, groups, paint, y)
    return _Panel(root, max(width, legend_width), y + legend_height)


def _groups_of(groups: Groups, part: Part) -> dict[int, int]:
    """Return the number of the group of each rank that is drawn and in one."""
    if not part.left_out:
        return {rank: index for index, ranks in enumerate(groups.tolist()) for rank in ranks}
    return {rank: groups.index_of(rank) for rank in part.ranks.tolist() if groups.has(rank)}


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
                _put(root, "text", label, x=left + column * _CELL_WIDTH + 3, y=top - 5, style="label")
    for number, row in enumerate(block.rows):
        y_row = top + number * _CELL_HEIGHT
        if shift == 0:
            _put(root, "text", row.label, x=margin - 6, y=y_row + 22, style="label end")
        for column, rank in enumerate(row.ranks):
            _cell(root, rank, paint, left + column * _CELL_WIDTH, y_row)
    _put(root, "path", d=" ".join(_edges(block, paint, left, top)), style="node")
    return top - y + len(block.rows) * _CELL_HEIGHT


def _cell(root: Element, rank: int, paint: _Paint, x: int, y: int) -> None:
    group = paint.group_of.get(rank)
    cell = _put(root, "g", style="cell")
    _put(cell, "title", f"rank {rank}, " + ("in no group of this kind" if group is None else f"group {group}"))
    fill, stroke = ("#ffffff", "#d0d7de") if group is None else (paint.colours[group], "#ffffff")
    width, height = _CELL_WIDTH - 4, _CELL_HEIGHT - 4
    _put(cell, "rect", x=x + 2, y=y + 2, width=width, height=height, rx=4, fill=fill, stroke=stroke)
    middle = x + _CELL_WIDTH // 2
    _put(cell, "text", str(rank), x=middle, y=y + (22 if group is None else 18), style="rank")
    if group is not None:
        _put(cell, "text", f"g{group}", x=middle, y=y + 30, style="group")


def _edges(block: Block, paint: _Paint, left: int, top: int) -> Iterator[str]:
    """Yield the sides of cells where a node ends."""
    node = {
        (column, line): paint.node(rank) for line, row in enumerate(block.rows) for column, rank in enumerate(row.ranks)
    }
    for (column, line), here in node.items():
        x, y = left + column * _CELL_WIDTH, top + line * _CELL_HEIGHT
        sides = {(-1, 0): (0, 0, "v"), (1, 0): (1, 0, "v"), (0, -1): (0, 0, "h"), (0, 1): (0, 1, "h")}
        for (right, down), (across, below, way) in sides.items():
            if node.get((column + right, line + down)) != here:
                length = _CELL_HEIGHT if way == "v" else _CELL_WIDTH
                yield f"M{x + across * _CELL_WIDTH} {y + below * _CELL_HEIGHT}{way}{length}"


def _legend(root: Element, groups: Groups, paint: _Paint, y: int) -> tuple[int, int]:
    """Return two columns of swatches with the first members; its width and height."""
    numbers = list(paint.colours)[:_LEGEND]
    words = [f"g{number}: {_ranks(list(groups[number][: _LEGEND_RANKS + 1]))}" for number in numbers]
    column = max(map(len, words)) * 6 + 34
    lines = -(-len(words) // 2)
    for number, text in enumerate(words):
        x, line = number // lines * column, y + number % lines * _LINE
        _put(root, "rect", x=x, y=line, width=12, height=12, rx=3, fill=paint.colours[numbers[number]])
        _put(root, "text", text, x=x + 18, y=line + 10, style="label")
    left = len(groups) - len(numbers)
    if left:
        _put(root, "text", f"and {counted(left, 'more group')}", x=18, y=y + lines * _LINE + 10, style="label")
    return column * (2 if len(words) > 1 else 1), (lines + (1 if left else 0)) * _LINE


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_LEGEND_RANKS]))
    return shown + (" …" if len(ranks) > _LEGEND_RANKS else "")
