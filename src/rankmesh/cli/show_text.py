"""An overview for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

from rankmesh.cli.columns import Column, print_columns
from rankmesh.core.mesh import Mesh
from rankmesh.viz.grid import grid
from rankmesh.viz.overview import KindRow, Overview, nodes_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["GRID_LIMIT", "members_text", "print_overview"]

GRID_LIMIT = 64


def print_overview(console: Console, mesh: Mesh, facts: Overview) -> None:
    """Print the header, the axes, the picture of a small mesh, the kinds of group, the communicators."""
    _print_header(console, facts)
    print_columns(console, _axes(facts))
    console.print()
    if mesh.size <= GRID_LIMIT:
        console.print(grid(mesh, line=console.width), no_wrap=True, overflow="ignore", crop=False)
        console.print()
    print_columns(console, _kinds(facts))
    console.print()
    for line in _communicators(facts):
        console.print(fill(line, console.width))


def _print_header(console: Console, facts: Overview) -> None:
    from rich.text import Text

    origin = facts.origin
    title = Text(origin.spec, "bold")
    console.print(title.append(f"  {origin.title}", "not bold") if origin.title else title)
    for name, text in (("source", origin.source), ("note", origin.note)):
        if text:
            console.print(Text(fill(f"{name}: {text}", console.width), "dim"))
    console.print(_world(facts))
    console.print()


def _world(facts: Overview) -> str:
    words = [f"{facts.world_size:,} ranks"]
    if (facts.first, facts.last) != (0, facts.world_size - 1):
        words.append(f"mesh over ranks {facts.first:,} to {facts.last:,}")
    if facts.nodes is not None:
        words.append(nodes_text(facts))
    return ", ".join([*words, f"digest {facts.digest[:12]}"])


def _axes(facts: Overview) -> list[Column]:
    rows = [
        (("mesh" if layout.view is None else layout.view) if number == 0 else "", axis)
        for layout in facts.layouts
        for number, axis in enumerate(layout.axes)
    ]
    columns = [
        Column("layout", [name for name, _ in rows], style="bold"),
        Column("axis", [axis.name for _, axis in rows]),
        Column("size", [f"{axis.size:,}" for _, axis in rows], right=True),
        Column("stride", [f"{axis.stride:,}" for _, axis in rows], right=True),
    ]
    shared = ["shared with the mesh" if axis.shared else "" for _, axis in rows]
    return [*columns, Column("", shared)] if any(shared) else columns


def _kinds(facts: Overview) -> list[Column]:
    kinds = facts.kinds
    columns = [
        Column("group", [kind.name for kind in kinds], style="bold"),
        Column("axes", ["-".join(kind.axes) for kind in kinds]),
        *_if_any(Column("view", [kind.view or "" for kind in kinds])),
        *_if_any(Column("part", [kind.part or "" for kind in kinds])),
        Column("groups", [f"{kind.count:,}" for kind in kinds], right=True),
        Column("size", [f"{kind.size:,}" for kind in kinds], right=True),
        Column("stride", [kind.stride for kind in kinds]),
        Column("communicator", [str(kind.communicator) for kind in kinds]),
        *(_crossings(kinds) if facts.nodes is not None else []),
    ]
    examples = [members_text(kind, 10**6) for kind in kinds]
    members = Column("members", examples, fit=True, shorten=lambda row, room: members_text(kinds[row], room))
    options = [", ".join(f"{name} {value}" for name, value in kind.options.items()) for kind in kinds]
    return [*columns, *_if_any(Column("options", options, fit=True)), members]


def _if_any(column: Column) -> list[Column]:
    return [column] if any(column.cells) else []


def _crossings(kinds: tuple[KindRow, ...]) -> list[Column]:
    rows = [kind.crossings for kind in kinds if kind.crossings is not None]
    levels = [kind.level or "" for kind in kinds]
    return [
        *_if_any(Column("level", levels)),
        Column("cross nodes", [f"{row.crossing:,} of {row.groups:,}" for row in rows], right=True),
        Column("nodes", [f"{row.nodes:,}" for row in rows], right=True),
        Column("hops", [f"{row.hops:,}" for row in rows], right=True),
    ]


def members_text(kind: KindRow, width: int) -> str:
    """The first groups of a kind in at most ``width`` characters: two groups if three members of each fit.

    >>> from rankmesh.cli.show import shown
    >>> dp = shown("tp=2,dp=8").kinds[1]
    >>> members_text(dp, 38), members_text(dp, 20)
    ('[0, 2, 4, 6, 8, …] [1, 3, 5, 7, 9, …]', '[0, 2, 4, 6, 8, …]')
    """
    most = len(kind.examples[0])
    for groups in range(min(2, kind.count), 0, -1):
        for members in range(most, min(3, most) - 1 if groups > 1 else 0, -1):
            if len(_listed(kind, groups, members)) <= width:
                return _listed(kind, _widest(kind, groups, members, width), members)
    return "…"


def _widest(kind: KindRow, groups: int, members: int, width: int) -> int:
    while groups < len(kind.examples) and len(_listed(kind, groups + 1, members)) <= width:
        groups += 1
    return groups


def _listed(kind: KindRow, groups: int, members: int) -> str:
    tail = ", …]" if members < kind.size else "]"
    listed = [f"[{', '.join(map(str, ranks[:members]))}{tail}" for ranks in kind.examples[:groups]]
    return " ".join(listed) + (" …" if groups < kind.count and members == kind.size else "")


def _communicators(facts: Overview) -> Iterator[str]:
    least, most = facts.communicators_least, facts.communicators_most
    each = f"{least}" if least == most else f"{least} to {most}"
    yield f"communicators per rank: {each}; in the job: {facts.communicators_total:,}"
    sharing = [kind.name for kind in facts.kinds if kind.communicator.shares]
    alone = [kind.name for kind in facts.kinds if kind.communicator.single_rank]
    if sharing:
        yield f"sharing another kind's: {len(sharing)} of {len(facts.kinds)} kinds ({', '.join(sharing)})"
    if alone:
        yield f"groups of one rank, no communicator: {', '.join(alone)}"
    for pair in facts.unshared:
        yield f"same members, not shared: {pair.kind} and {pair.other}, {pair.why}"
