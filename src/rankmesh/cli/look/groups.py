"""``rankmesh groups``: the rank lists of one kind.

>>> [listed for listed in kind_groups("tp=2,dp=2", "dp").groups]
[[0, 2], [1, 3]]
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from rankmesh.cli.console import write
from rankmesh.cli.options import Reading, Spec, config_of, source_of
from rankmesh.cli.shell import Answer
from rankmesh.readers.source import Source

__all__ = ["KindGroups", "command", "kind_groups"]


@dataclass(frozen=True)
class KindGroups:
    """The groups of one kind, all or one of them; ``first`` is the number of the first that is listed."""

    name: str
    axes: list[str]
    view: str | None
    count: int
    size: int
    first: int
    groups: list[list[int]]


def kind_groups(spec: str | Source, name: str, *, rank: int | None = None) -> KindGroups:
    """Return all groups of a kind, or the one that ``rank`` is in (``NotAMember`` if it is in none)."""
    plan = source_of(spec).plan
    kind, groups = plan.spec(name), plan.groups(name)
    listed = groups.tolist() if rank is None else [list(groups.of(rank))]
    first = 0 if rank is None else groups.index_of(rank)
    return KindGroups(name, list(kind.axes), kind.view, len(groups), groups.size, first, listed)


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
        lambda: {**asdict(found), **config_of(source)},
        lambda: write("\n".join(f"{number}: {ranks}" for number, ranks in enumerate(found.groups, found.first))),
    )
