"""``rankmesh diff``: what differs between two layouts, rank by rank.

>>> compared("tp=2,dp=4", "tp=2,dp=4").different
False
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rankmesh.cli.complete import spec_names
from rankmesh.cli.console import note, out, write_json
from rankmesh.cli.diff_text import print_difference
from rankmesh.cli.exit_codes import ExitCode
from rankmesh.cli.options import SPEC_HELP, Debug, Json, Variables, WorldSize, config_of, source_of, tell
from rankmesh.core.difference import Difference, difference
from rankmesh.readers.source import Source

__all__ = ["EXAMPLES", "command", "compared"]

EXAMPLES = """\
$ rankmesh diff tp=2,dp=4 dp=4,tp=2
axis  left         right
────  ───────────  ───────────
tp    2, stride 1  2, stride 4
dp    4, stride 2  4, stride 1

kind  ranks  rank  left          right
────  ─────  ────  ────────────  ────────────
tp      all     0  [0, 1]        [0, 4]
                1  [0, 1]        [1, 5]
                2  [2, 3]        [2, 6]
dp      all     0  [0, 2, 4, 6]  [0, 1, 2, 3]
                1  [1, 3, 5, 7]  [0, 1, 2, 3]
                2  [0, 2, 4, 6]  [0, 1, 2, 3]

order: the kinds that both have come in another order
"""


def compared(
    left: str | Source, right: str | Source, *, world_size: int | None = None, examples: int = 3, members: int = 8
) -> Difference:
    """The difference of two specs."""
    ours, theirs = source_of(left, world_size), source_of(right, world_size)
    return difference(ours.plan, theirs.plan, examples=examples, members=members)


def command(
    left: Annotated[str, typer.Argument(metavar="LEFT", help=SPEC_HELP, autocompletion=spec_names)],
    right: Annotated[
        str, typer.Argument(metavar="RIGHT", help="The layout to compare with.", autocompletion=spec_names)
    ],
    examples: Annotated[
        int,
        typer.Option("--examples", "-n", min=1, metavar="N", help="Ranks to list for each kind that differs."),
    ] = 3,
    world_size: WorldSize = None,
    variables: Variables = None,
    variables_left: Annotated[
        list[str] | None, typer.Option("--set-left", metavar="NAME=VALUE", help="--set for LEFT alone.")
    ] = None,
    variables_right: Annotated[
        list[str] | None, typer.Option("--set-right", metavar="NAME=VALUE", help="--set for RIGHT alone.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare two layouts rank by rank: axes, kinds, groups, options. Exits with 1 when they differ."""
    both = variables or []
    sources = (
        source_of(left, world_size, [*both, *(variables_left or [])]),
        source_of(right, world_size, [*both, *(variables_right or [])]),
    )
    tell(*sources)
    found = compared(*sources, examples=examples)
    if json:
        configs = {**config_of(sources[0], "left_config"), **config_of(sources[1], "right_config")}
        write_json({"different": found.different, "left": left, "right": right, **asdict(found), **configs})
    else:
        print_difference(out(), found)
        _say(found)
    if found.different:
        raise typer.Exit(ExitCode.DIFFERENT)


def _say(found: Difference) -> None:
    if found.different:
        return
    note("the same: every rank sees the same groups with the same options")
    if found.digests[0] != found.digests[1]:
        note("they are spelled differently: their digests differ, and live ranks must hold the same one")
