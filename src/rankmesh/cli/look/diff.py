"""``rankmesh diff``: what differs between two layouts, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from rankmesh.cli.columns import print_table, ranks_text
from rankmesh.cli.console import note, write, write_filled
from rankmesh.cli.options import SPEC_HELP, Variables, WorldSize, config_of, noted, source_of
from rankmesh.cli.shell import Answer, ExitCode
from rankmesh.core.difference import Difference, OnlyKind, difference
from rankmesh.core.grouped import grouped

__all__ = ["command"]


def command(
    left: Annotated[str, typer.Argument(metavar="LEFT", help=SPEC_HELP)],
    right: Annotated[str, typer.Argument(metavar="RIGHT", help="The layout to compare with.")],
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
) -> Answer:
    """Compare two layouts rank by rank: axes, kinds, groups, options. Exits with 1 when they differ.

    $ rankmesh diff tp=2,dp=4 dp=4,tp=2
    $ rankmesh diff train.sh megatron:world=64,tp=4,pp=2 --set TP=4
    """
    sides = ((left, variables_left), (right, variables_right))
    one, other = (noted(source_of(spec, world_size, [*(variables or ()), *(given or ())])) for spec, given in sides)
    found = difference(one.plan, other.plan, examples=examples, members=8)
    configs = config_of(one, "left_config") | config_of(other, "right_config")
    return Answer(
        lambda: {"different": found.different, "left": left, "right": right, **asdict(found), **configs},
        lambda: _print(found),
        ExitCode.DIFFERENT if found.different else ExitCode.OK,
    )


# -- the terminal -----------------------------------------------------------------------------------------------------


def _print(found: Difference) -> None:
    """Print what differs, then the names of the kinds that are equal."""
    tables: dict[tuple[str, ...], list[tuple[str | int, ...]]] = {
        ("world", "left", "right"): list(_sides(found)),
        ("axis", "left", "right"): list(_axes(found)),
        ("kind", ">ranks", ">rank", "left", "right"): list(_groups(found)),
        ("option", "left", "right", "kinds"): list(_options(found)),
    }
    separated = False
    for heads, rows in tables.items():
        if rows:
            if separated:
                write("")
            print_table(heads, rows)
            separated = True
    for line in _lines(found):
        if separated:
            write("")
        write_filled(line)
        separated = False
    if not found.different:
        note("the same: every rank sees the same groups with the same options")
        if found.digests[0] != found.digests[1]:
            note("they are spelled differently: their digests differ, and live ranks must hold the same one")


def _sides(found: Difference) -> Iterator[tuple[str | int, ...]]:
    if found.world_sizes[0] != found.world_sizes[1]:
        yield ("ranks", *(f"{size:,}" for size in found.world_sizes))
    if found.spans[0] != found.spans[1]:
        yield ("mesh", *(f"{start:,} to {start + size - 1:,}" for start, size in found.spans))


def _axes(found: Difference) -> Iterator[tuple[str | int, ...]]:
    for axis in found.axes:
        name = axis.axis if axis.view is None else f"{axis.view}: {axis.axis}"
        yield (
            name,
            *("none" if pair is None else f"{pair[0]:,}, stride {pair[1]:,}" for pair in (axis.left, axis.right)),
        )


def _groups(found: Difference) -> Iterator[tuple[str | int, ...]]:
    for kind in found.groups:
        ranks = "all" if kind.ranks == max(found.world_sizes) else f"{kind.ranks:,}"
        for number, example in enumerate(kind.examples):
            left, right = _group(example.left, kind.left_size), _group(example.right, kind.right_size)
            yield (*(("", "") if number else (kind.name, ranks)), example.rank, left, right)


def _group(ranks: tuple[int, ...] | None, size: int) -> str:
    return "none" if ranks is None else ranks_text(ranks, size)


def _options(found: Difference) -> Iterator[tuple[str | int, ...]]:
    """Yield one row for all the kinds whose option differs alike."""
    kinds = grouped(((item.option, str(item.left), str(item.right)), item.kind) for item in found.options)
    for option, names in kinds.items():
        yield (*option, ", ".join(names))


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
