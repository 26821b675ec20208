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
from rankmesh.cli.outputs import check_outputs, write_output
from rankmesh.core.mesh import Mesh
from rankmesh.errors import quoted
from rankmesh.readers.source import Source
from rankmesh.viz.overview import Overview, overview
from rankmesh.viz.sheet import grid
from rankmesh.viz.tables import axes, communicators, header, kinds

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLES", "command", "print_overview"]

EXAMPLES = """\
$ rankmesh show tp=2,cp=2,dp=2,pp=2 --gpus-per-node 8
$ rankmesh show megatron:world=64,tp=2,pp=2,ep=4 --groups tp,ep --json
$ rankmesh show llama3-405b --cluster 'host=8,leaf=32,spine=*'
$ rankmesh show --run train.sh
"""


def command(
    spec: Spec,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="With --run: the script's arguments, options after --."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run SPEC, a launch script, with recorders in place of its launchers.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --run: do not ask.")] = False,
    sandbox: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="With --run: namespaces, bubblewrap, or none (the script runs for real)."),
    ] = None,
    launch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --run: which launch to show, from 1 on.")
    ] = None,
    gpus_per_node: GpusPerNode = None,
    cluster: Cluster = None,
    hosts: Hosts = None,
    members: Annotated[int, typer.Option(min=1, metavar="K", help="List up to K members of a group.")] = 8,
    groups: Kinds = None,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write a picture; of a large world, one part. - is stdout.")
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the page of rankmesh explore. - is stdout.")
    ] = None,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the plan as JSON, usable as SPEC. - is stdout.")
    ] = None,
    world_size: WorldSize = None,
    variables: Variables = None,
    json: Json = False,
) -> None:
    """Show a layout: axes, strides, every kind of group, who shares a communicator, what crosses nodes.

    communicator: own, shares pp (it uses the communicators of pp, which have the same
    members), or none needed (one rank). hops: how often the ring of a group changes nodes, at most.
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
    paths = {"--svg": svg, "--html": html, "--save": save}
    taken = check_outputs(paths, json=json)
    if svg is not None:
        from rankmesh.viz.svg import picture

        write_output(svg, picture(source.plan, names, cluster=facts.cluster))
    if html is not None:
        from rankmesh.cli.explore import explored
        from rankmesh.viz.explorer import page

        write_output(html, page(explored(source, gpus_per_node=gpus_per_node, cluster=cluster, hosts=hosts)))
    if save is not None:
        write_output(save, source.plan.to_json())
    if json:
        write_json({**facts.to_dict(), **config_of(source)})
    elif not taken:
        print_overview(out(), source.plan.mesh, facts)


def _named(options: Mapping[str, object]) -> list[str]:
    return [name for name, value in options.items() if value]


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
