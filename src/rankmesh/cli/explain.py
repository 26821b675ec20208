"""``rankmesh explain``: one rank, its coordinate, its groups, its neighbours, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from rankmesh.cli.console import write, write_json
from rankmesh.cli.options import Json, Spec, Variables, WorldSize, config_of, noted, source_of

__all__ = ["EXAMPLES", "command"]

EXAMPLES = """\
$ rankmesh explain tp=2,dp=2 3
rank 3 of 4: tp=1, dp=1
  3 = 0 + tp 1·1 + dp 1·2
  tp  [2, 3]  position 1 of 2, prev 2, next 2   varies tp by 1; fixed dp=1
  dp  [1, 3]  position 1 of 2, prev 1, next 1   varies dp by 2; fixed tp=1
"""


def command(
    spec: Spec,
    rank: Annotated[int, typer.Argument(metavar="RANK", min=0, help="A global rank.")],
    world_size: WorldSize = None,
    variables: Variables = None,
    json: Json = False,
) -> None:
    """Explain one rank: where it sits, which groups it is in, who its neighbours are, and why."""
    source = noted(source_of(spec, world_size, variables))
    if json:
        write_json({**source.plan.describe(rank), **config_of(source)})
    else:
        write(source.plan.explain(rank))
