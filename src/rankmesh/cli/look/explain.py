"""``rankmesh explain``: one rank, its coordinate, its groups, its neighbours, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from rankmesh.cli.console import write
from rankmesh.cli.options import Reading, Spec, config_of
from rankmesh.cli.shell import Answer

__all__ = ["command"]


def command(
    spec: Spec,
    rank: Annotated[int, typer.Argument(metavar="RANK", min=0, help="A global rank.")],
    reading: Reading,
) -> Answer:
    """Explain one rank: its place, its groups, its neighbours, and why.

    $ rankmesh explain tp=2,dp=2 3
    """
    source = reading.source(spec)
    return Answer(lambda: {**source.plan.describe(rank), **config_of(source)}, lambda: write(source.plan.explain(rank)))
