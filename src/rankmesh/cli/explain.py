"""``rankmesh explain``: one rank, its coordinate, its groups, its neighbours, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from rankmesh.cli.console import write, write_json
from rankmesh.cli.options import Json, Spec, Variables, WorldSize, config_of, noted, source_of

__all__ = ["EXAMPLES", "command"]

EXAMPLES = """\
$ rankmesh explain tp=2,dp=2 3
"""


def command(
    spec: Spec,
    rank: Annotated[int, typer.Argument(metavar="RANK", min=0, help="A global rank.")],
    world_size: WorldSize = None,
    variables: Variables = None,
    json: Json = False,
) -> None:
    """Explain one rank: its place, its groups, its neighbours, and why."""
    source = noted(source_of(spec, world_size, variables))
    if json:
        write_json({**source.plan.describe(rank), **config_of(source)})
    else:
        write(source.plan.explain(rank))
