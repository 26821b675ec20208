"""``rankmesh diff``: what differs between two layouts, rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from rankmesh.cli.columns import Column, print_columns
from rankmesh.cli.console import note, out, write_json
from rankmesh.cli.options import Json, Variables, WorldSize, config_of, noted, source_of, spec_argument
from rankmesh.cli.shell import ExitCode
from rankmesh.core.difference import Difference, KindDiff, OnlyKind, difference
from rankmesh.viz.tables import ranks_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLES", "command", "print_difference"]

EXAMPLES = """\
$ rankmesh diff tp=2,dp=4 dp=4,tp=2
$ rankmesh diff train.sh megatron:world=64,tp=4,pp=2 --set TP=4
"""


def command(
    left: Annotated[str, spec_argument("LEFT")],
    right: Annotated[str, spec_argument("RIGHT", "The layout to compare with.")],
    examples: Annotated[
        int,
        typer.Option("--examples", "-n", min=1, metavar="N", help="Ranks to list for each kind that differs."),
    ] = 3,
    world_size: WorldSize = None,
    variables: Variables = None,
    variables_left: Annotated[
        list[str] | None, typer.Option("--set-left", metavar="NAME=VALUE", help="--set for LEFT only.")
    ] = None,
    variables_right: Annotated[
        list[str] | None, typer.Option("--set-right", metavar="NAME=VALUE", help="--set for RIGHT only.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare two layouts rank by rank: axes, kinds, groups, options. Exits with 1 when they differ."""
    both = variables or []
    sources = (
        noted(source_of(left, world_size, [*both, *(variables_left or [])])),
        noted(source_of(right, world_size, [*both, *(variables_right or [])])),
    )
    found = difference(sources[0].plan, sources[1].plan, examples=examples, members=8)
    if json:
        configs = {**config_of(sources[0], "left_config"), **config_of(sources[1], "right_config")}
        write_json({"different": found.different, "left": left, "right": right, **asdict(found), **configs})
    else:
        print_difference(out(), found)
        _note_equal(found)
    if found.different:
        raise typer.Exit(ExitCode.DIFFERENT)


def _note_equal(found: Difference) -> None:
    if found.different:
        return
    note("the same: every rank sees the same groups with the same options")
    if found.digests[0] != found.digests[1]:
        note("they are spelled differently: their digests differ, and live ranks must hold the same one")


# -- the terminal -----------------------------------------------------------------------------------------------------


def print_difference(console: Console, found: Difference) -> None:
    """Print what differs, then the names of the kinds that are equal."""
    for number, columns in enumerate(_tables(found)):
        if number:
            console.print()
        print_columns(console, columns)
    lines = list(_lines(found))
    if lines and found.different:
        console.print()
    for line in lines:
        console.print(fill(line, console.width))


def _tables(found: Difference) -> Iterator[list[Column]]:
    if sides := list(_sides(found)):
        yield _table(("world", "left", "right"), sides)
    if found.axes:
        axes = [
            (
                axis.axis if axis.view is None else f"{axis.view}: {axis.axis}",
                _axis(axis.left),
                _axis(axis.right),
            )
            for axis in found.axes
        ]
        yield _table(("axis", "left", "right"), axes)
    if found.groups:
        yield _groups(found)
    if found.options:
        yield _options(found)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[Column]:
    cells = list(zip(*rows, strict=True))
    return [Column(head, column) for head, column in zip(heads, cells, strict=True)]


def _sides(found: Difference) -> Iterator[tuple[str, ...]]:
    if found.world_sizes[0] != found.world_sizes[1]:
        yield ("ranks", *(f"{size:,}" for size in found.world_sizes))
    if found.spans[0] != found.spans[1]:
        yield ("mesh", *(f"{start:,} to {start + size - 1:,}" for start, size in found.spans))


def _axis(pair: tuple[int, int] | None) -> str:
    return "none" if pair is None else f"{pair[0]:,}, stride {pair[1]:,}"


def _options(found: Difference) -> list[Column]:
    """Return one row for all the kinds whose option differs alike."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for item in found.options:
        kinds.setdefault((item.option, str(item.left), str(item.right)), []).append(item.kind)
    columns = _table(("option", "left", "right"), list(kinds))
    return [*columns, Column("kinds", [", ".join(names) for names in kinds.values()])]


def _groups(found: Difference) -> list[Column]:
    world = max(found.world_sizes)
    rows = [(kind, number, example) for kind in found.groups for number, example in enumerate(kind.examples)]

    def heads(text: Callable[[KindDiff], str]) -> list[str]:
        return ["" if number else text(kind) for kind, number, _ in rows]

    return [
        Column("kind", heads(lambda kind: kind.name)),
        Column("ranks", heads(lambda kind: "all" if kind.ranks == world else f"{kind.ranks:,}"), right=True),
        Column("rank", [f"{example.rank:,}" for _, _, example in rows], right=True),
        Column("left", [_group(example.left, kind.left_size) for kind, _, example in rows]),
        Column("right", [_group(example.right, kind.right_size) for kind, _, example in rows]),
    ]


def _group(ranks: tuple[int, ...] | None, size: int) -> str:
    return "none" if ranks is None else ranks_text(ranks, size)


def _lines(found: Difference) -> Iterator[str]:
    for side, kinds in (("left", found.only_left), ("right", found.only_right)):
        if kinds:
            yield f"only {side}: {', '.join(map(_only, kinds))}"
    if found.order:
        yield "order: the kinds that both have come in another order"
    if found.equal:
        yield f"equal: {', '.join(found.equal)}"


def _only(kind: OnlyKind) -> str:
    return kind.name + (f" (same groups as {' '.join(kind.same_as)})" if kind.same_as else "")
