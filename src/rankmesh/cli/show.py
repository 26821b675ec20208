"""``rankmesh show``: a layout before its launch."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from rankmesh.cli.columns import print_columns
from rankmesh.cli.console import out, write_json
from rankmesh.cli.options import (
    Cluster,
    GpusPerNode,
    Hosts,
    Json,
    Kinds,
    Spec,
    Variables,
    WorldSize,
    cluster_of,
    config_of,
    noted,
    source_of,
    words_of,
)
from rankmesh.cli.outputs import Output, check_stdout, deliver
from rankmesh.core.mesh import Mesh
from rankmesh.errors import quoted
from rankmesh.readers.source import Source
from rankmesh.viz.grid import grid
from rankmesh.viz.overview import Overview, overview
from rankmesh.viz.tables import axes, communicators, header, kinds

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLES", "command", "print_overview"]

EXAMPLES = """\
$ rankmesh show tp=2,cp=2,dp=2,pp=2 --gpus-per-node 8
tp=2,cp=2,dp=2,pp=2
16 ranks, 2 nodes of 8, digest 0ac2e5d99a6a

layout  axis  size  stride
──────  ────  ────  ──────
mesh    tp       2       1
        cp       2       2
        dp       2       4
        pp       2       8

     dp=0                  dp=1
     cp=0       cp=1       cp=0       cp=1
     tp=0 tp=1  tp=0 tp=1  tp=0 tp=1  tp=0 tp=1
pp=0    0    1     2    3     4    5     6    7
pp=1    8    9    10   11    12   13    14   15

group  axes   part  groups  size  stride  communicator  cross nodes  nodes
─────  ─────  ────  ──────  ────  ──────  ────────────  ───────────  ─────
tp     tp                8     2  2x1     own                0 of 8      1
cp     cp                8     2  2x2     own                0 of 8      1
dp     dp                8     2  2x4     own                0 of 8      1
pp     pp                8     2  2x8     own                8 of 8      2
dp_cp  dp-cp             4     4  4x2     own                0 of 4      1
embd   pp     ends       8     2  2x8     shares pp          8 of 8      2

group  hops  members
─────  ────  ─────────────────────────────────────────────────────────────
tp        0  [0, 1] [2, 3] [4, 5] [6, 7] [8, 9] [10, 11] [12, 13] [14, 15]
cp        0  [0, 2] [1, 3] [4, 6] [5, 7] [8, 10] [9, 11] [12, 14] [13, 15]
dp        0  [0, 4] [1, 5] [2, 6] [3, 7] [8, 12] [9, 13] [10, 14] [11, 15]
pp        2  [0, 8] [1, 9] [2, 10] [3, 11] [4, 12] [5, 13] [6, 14] [7, 15]
dp_cp     0  [0, 2, 4, 6] [1, 3, 5, 7] [8, 10, 12, 14] [9, 11, 13, 15]
embd      2  [0, 8] [1, 9] [2, 10] [3, 11] [4, 12] [5, 13] [6, 14] [7, 15]

communicators per rank: 5; in the job: 36
sharing another kind's: 1 of 6 kinds (embd)
"""


def command(
    spec: Spec,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="With --run: the script's arguments, options after --."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run SPEC, a launch script, with recorders in the place of its launchers.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --run: do not ask.")] = False,
    sandbox: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="With --run: namespaces, bubblewrap, or none (the script runs for real)."),
    ] = None,
    launch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --run: the launch that is meant, from 1 on.")
    ] = None,
    gpus_per_node: GpusPerNode = None,
    cluster: Cluster = None,
    hosts: Hosts = None,
    members: Annotated[int, typer.Option(min=1, metavar="K", help="List up to K members of a group.")] = 8,
    groups: Kinds = None,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write a picture; of a large world, one part. - is stdout.")
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Also write a page of tables and pictures.")] = None,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the plan as JSON, which is a SPEC. - is stdout.")
    ] = None,
    world_size: WorldSize = None,
    variables: Variables = None,
    json: Json = False,
) -> None:
    """Show a layout: axes, strides, every kind of group, who shares a communicator, what crosses nodes.

    communicator: own, shares pp (it uses those of pp, with the same members), or
    none needed (one rank). hops: changes of node along a group's ring, the most.
    """
    given: str | Source = spec
    if run:
        from rankmesh.cli.script_run import recorded_source

        given = recorded_source(
            spec,
            arguments or (),
            world_size=world_size,
            variables=variables or (),
            launch=launch,
            sandbox=sandbox,
            yes=yes,
        )
    elif unused := [*(arguments or ())[:1], *_named({"--launch": launch, "--sandbox": sandbox, "--yes": yes})]:
        raise typer.BadParameter(f"{quoted(unused[0])} is for a script that runs; add --run, or leave it out")
    source, names = noted(source_of(given, world_size, variables)), words_of(groups)
    if hosts is not None and cluster is None:
        raise typer.BadParameter("--hosts is of a cluster; add --cluster, or leave it out")
    machine = (
        None
        if cluster is None
        else cluster_of(cluster, source.plan.world_size, hosts, gpus_per_node, placed_on=source.hosts)
    )
    facts = overview(source, cluster=machine, gpus_per_node=gpus_per_node, members=members, kinds=names)
    outputs = _outputs(source, facts, names, {"--svg": svg, "--html": html, "--save": save})
    taken = check_stdout(outputs, json=json)

    def printed() -> None:
        if json:
            write_json({**facts.to_dict(), **config_of(source)})
        elif not taken:
            print_overview(out(), source.plan.mesh, facts)

    deliver(outputs, printed)


def _named(options: Mapping[str, object]) -> list[str]:
    return [name for name, value in options.items() if value]


def _outputs(source: Source, facts: Overview, names: list[str], paths: Mapping[str, str | None]) -> list[Output]:
    def svg() -> str:
        from rankmesh.viz.svg import picture

        return picture(source.plan, names, cluster=facts.cluster)

    def html() -> str:
        from rankmesh.viz.html import page

        return page(source, facts)

    made = {
        "--svg": ((".svg",), svg),
        "--html": ((".html", ".htm"), html),
        "--save": ((".json",), source.plan.to_json),
    }
    return [Output(option, path, *made[option]) for option, path in paths.items() if path is not None]


# -- the terminal -----------------------------------------------------------------------------------------------------


GRID_LIMIT = 64


def print_overview(console: Console, mesh: Mesh, facts: Overview) -> None:
    """Print the header, the axes, the picture of a small mesh, the kinds of group, the communicators."""
    _print_header(console, facts)
    print_columns(console, axes(facts))
    console.print()
    if mesh.size <= GRID_LIMIT:
        console.print(grid(mesh, line=console.width), no_wrap=True, overflow="ignore", crop=False)
        console.print()
    print_columns(console, kinds(facts))
    console.print()
    for line in communicators(facts):
        console.print(fill(line, console.width))


def _print_header(console: Console, facts: Overview) -> None:
    from rich.text import Text

    origin = facts.origin
    title = Text(origin.spec, "bold")
    console.print(title.append(f"  {origin.title}", "not bold") if origin.title else title)
    for name, text in (("source", origin.source), ("note", origin.note)):
        if text:
            console.print(Text(fill(f"{name}: {text}", console.width), "dim"))
    console.print(header(facts))
    console.print()
