"""The tables of an overview: columns of text, which the terminal shows.

>>> from rankmesh.readers.source import read
>>> from rankmesh.viz.overview import overview
>>> [(column.head, list(column.cells)) for column in axes(overview(read("tp=2,dp=4")))]
[('layout', ['mesh', '']), ('axis', ['tp', 'dp']), ('size', ['2', '4']), ('stride', ['1', '2'])]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rankmesh.viz.overview import KindRow, Overview, nodes_text

__all__ = ["Column", "axes", "communicators", "cut", "header", "kinds", "ranks_text"]


@dataclass(frozen=True)
class Column:
    """A heading and its cells."""

    head: str
    cells: Sequence[str]
    right: bool = False

    @cached_property  # each line asks for it
    def width(self) -> int:
        """The width that every cell needs."""
        return max(map(len, (self.head, *self.cells)))

    def fitted(self, width: int) -> Column:
        """Return the column no wider than ``width``."""
        return self if self.width <= width else replace(self, cells=[cut(cell, width) for cell in self.cells])


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


def header(facts: Overview) -> str:
    """Return the size of the world, the nodes if they are known, and the digest."""
    words = [f"{facts.world_size:,} ranks"]
    if (facts.first, facts.last) != (0, facts.world_size - 1):
        words.append(f"mesh over ranks {facts.first:,} to {facts.last:,}")
    if facts.nodes is not None:
        words.append(nodes_text(facts))
    return ", ".join([*words, f"digest {facts.digest[:12]}"])


def axes(facts: Overview) -> list[Column]:
    """Return the axes of the mesh and of its views."""
    rows = [
        (("mesh" if layout.view is None else layout.view) if number == 0 else "", axis)
        for layout in facts.layouts
        for number, axis in enumerate(layout.axes)
    ]
    columns = [
        Column("layout", [name for name, _ in rows]),
        Column("axis", [axis.name for _, axis in rows]),
        Column("size", [f"{axis.size:,}" for _, axis in rows], right=True),
        Column("stride", [f"{axis.stride:,}" for _, axis in rows], right=True),
    ]
    return columns + _if_any(Column("", ["shared with the mesh" if axis.shared else "" for _, axis in rows]))


def kinds(facts: Overview) -> list[Column]:
    """Return the kinds of group, the first members of their groups last."""
    rows = facts.kinds
    options = [", ".join(f"{name} {value}" for name, value in kind.options.items()) for kind in rows]
    return [
        Column("group", [kind.name for kind in rows]),
        Column("axes", ["-".join(kind.axes) for kind in rows]),
        *_if_any(Column("view", [kind.view or "" for kind in rows])),
        *_if_any(Column("part", [kind.part or "" for kind in rows])),
        Column("groups", [f"{kind.count:,}" for kind in rows], right=True),
        Column("size", [f"{kind.size:,}" for kind in rows], right=True),
        Column("stride", [kind.stride for kind in rows]),
        Column("communicator", [str(kind.communicator) for kind in rows]),
        *_crossings(rows),
        *_if_any(Column("options", options)),
        Column("members", [_members(kind) for kind in rows]),
    ]


def _if_any(column: Column) -> list[Column]:
    return [column] if any(column.cells) else []


def _crossings(kinds: tuple[KindRow, ...]) -> list[Column]:
    rows = [kind.crossings for kind in kinds if kind.crossings is not None]
    if not rows:
        return []
    return [
        *_if_any(Column("level", [kind.level or "" for kind in kinds])),
        Column("cross nodes", [f"{row.crossing:,} of {row.groups:,}" for row in rows], right=True),
        *(
            Column(f"cross {name}", [f"{kind.crossing[name]:,} of {kind.count:,}" for kind in kinds], right=True)
            for name in kinds[0].crossing
        ),
        Column("nodes", [f"{row.nodes:,}" for row in rows], right=True),
        Column("hops", [f"{row.hops:,}" for row in rows], right=True),
    ]


def _members(kind: KindRow) -> str:
    listed = " ".join(ranks_text(ranks, kind.size) for ranks in kind.examples)
    return listed + (" …" if len(kind.examples) < kind.count else "")


def communicators(facts: Overview) -> Iterator[str]:
    """Yield lines on how many communicators there are, and which kinds share them."""
    least, most = facts.communicators_least, facts.communicators_most
    each = f"{least}" if least == most else f"{least} to {most}"
    yield f"communicators per rank: {each}; in the job: {facts.communicators_total:,}"
    sharing = [kind.name for kind in facts.kinds if kind.communicator.shares]
    single = [kind.name for kind in facts.kinds if kind.communicator.single_rank]
    if sharing:
        yield f"sharing another kind's: {len(sharing)} of {len(facts.kinds)} kinds ({', '.join(sharing)})"
    if single:
        yield f"groups of one rank, no communicator: {', '.join(single)}"
    for pair in facts.unshared:
        yield f"same members, not shared: {pair.kind} and {pair.other}, {pair.why}"
