"""``rankmesh groups``: the rank lists of one kind.

>>> from rankmesh.readers.source import read
>>> kind_groups(read("tp=2,dp=2"), "dp")["groups"]
[[0, 2], [1, 3]]
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rankmesh.cli.console import write
from rankmesh.cli.options import Reading, Spec, config_of
from rankmesh.cli.shell import Answer
from rankmesh.readers.source import Source

__all__ = ["command", "kind_groups"]


def kind_groups(source: Source, name: str, *, rank: int | None = None) -> dict[str, Any]:
    """Return all groups of a kind, or the one that ``rank`` is in (``NotAMember`` if it is in none), as data.

    ``first``: the number of the first group that is listed.
    """
    kind, groups = source.plan.spec(name), source.plan.groups(name)
    return {
        "name": name,
        "axes": list(kind.axes),
        "view": kind.view,
        "count": len(groups),
        "size": groups.size,
        "first": 0 if rank is None else groups.index_of(rank),
        "groups": groups.tolist() if rank is None else [list(groups.of(rank))],
    }


def command(
    spec: Spec,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A kind of group, such as dp_cp.")],
    *,
    rank: Annotated[
        int | None,
        typer.Option("--rank", "-r", min=0, metavar="R", help="Only the group that this rank is in."),
    ] = None,
    reading: Reading,
) -> Answer:
    """List the groups of one kind: number and ranks, one group a line.

    $ rankmesh groups tp=2,cp=2,dp=2 dp
    $ rankmesh groups llama3-405b tp --rank 16383
    """
    source = reading.source(spec)
    found = kind_groups(source, name, rank=rank)
    return Answer(
        lambda: found | config_of(source),
        lambda: write("\n".join(f"{number}: {ranks}" for number, ranks in enumerate(found["groups"], found["first"]))),
    )
