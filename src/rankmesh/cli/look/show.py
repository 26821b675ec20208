"""``rankmesh show``: a layout before its launch."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill
from typing import Annotated

import typer

from rankmesh.cli.columns import print_table, ranks_text
from rankmesh.cli.console import out, write, write_filled
from rankmesh.cli.options import (
    Cluster,
    GpusPerNode,
    Hosts,
    Json,
    Kinds,
    Reading,
    Spec,
    cluster_of,
    config_of,
    file_option,
    words_of,
)
from rankmesh.cli.outputs import check_outputs, write_output
from rankmesh.cli.shell import Answer
from rankmesh.core.explain import arithmetic
from rankmesh.core.mesh import Mesh
from rankmesh.errors import quoted
from rankmesh.readers.source import Source
from rankmesh.viz.overview import KindRow, Overview, nodes_text, overview
from rankmesh.viz.sheet import grid

__all__ = ["command"]


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
    svg: Annotated[str | None, file_option("Also write a picture; of a large world, one part. - is stdout.")] = None,
    html: Annotated[str | None, file_option("Also write the page of rankmesh explore. - is stdout.")] = None,
    save: Annotated[str | None, file_option("Also write the plan as JSON, usable as SPEC. - is stdout.")] = None,
    *,
    reading: Reading,
    json: Json = False,
) -> Answer:
    """Show a layout: axes, strides, every kind of group, who shares a communicator, what crosses nodes.

    communicator: own, shares pp (it uses the communicators of pp, which have the same
    members), or none needed (one rank). hops: how often the ring of a group changes nodes, at most.

    $ rankmesh show tp=2,cp=2,dp=2,pp=2 --gpus-per-node 8
    $ rankmesh show megatron:world=64,tp=2,pp=2,ep=4 --groups tp,ep --json
    $ rankmesh show llama3-405b --cluster 'host=8,leaf=32,spine=*'
    $ rankmesh show --run train.sh
    """
    given: str | Source = spec
    only_run = {"--launch": launch, "--sandbox": sandbox, "--yes": yes}
    if run:
        from rankmesh.cli.script_run import recorded_source

        given = recorded_source(
            spec,
            arguments or (),
            world_size=reading.world_size,
            variables=reading.variables or (),
            launch=launch,
            sandbox=sandbox,
            yes=yes,
        )
    elif unused := [*(arguments or ())[:1], *(name for name, value in only_run.items() if value)]:
        raise typer.BadParameter(f"{quoted(unused[0])} is for a script that runs; add --run, or leave it out")
    source, names = reading.source(given), words_of(groups)
    if hosts is not None and cluster is None:
        raise typer.BadParameter("--hosts is of a cluster; add --cluster, or leave it out")
    machine = None
    if cluster is not None:
        machine = cluster_of(cluster, source.plan.world_size, hosts, gpus_per_node, placed_on=source.hosts)
    facts = overview(source, cluster=machine, gpus_per_node=gpus_per_node, members=members, kinds=names)
    paths = {"--svg": svg, "--html": html, "--save": save}
    taken = check_outputs(paths, json=json)
    if svg is not None:
        from rankmesh.viz.svg import picture

        write_output(svg, picture(source.plan, names, cluster=facts.cluster))
    if html is not None:
        from rankmesh.cli.look.explore import explored
        from rankmesh.viz.explorer import page

        write_output(html, page(explored(source, gpus_per_node=gpus_per_node, cluster=cluster, hosts=hosts)))
    if save is not None:
        write_output(save, source.plan.to_json())
    return Answer(
        lambda: {**facts.to_dict(), **config_of(source)},
        lambda: None if taken else _print(source.plan.mesh, facts),
    )


# -- the terminal -----------------------------------------------------------------------------------------------------


_GRID_LIMIT = 64


def _print(mesh: Mesh, facts: Overview) -> None:
    """Print the header, the axes, the picture of a small mesh, the kinds of group, the communicators."""
    from rich.text import Text

    console, origin = out(), facts.origin
    title = Text(origin.spec, "bold")
    console.print(title.append(f"  {origin.title}", "not bold") if origin.title else title)
    for name, text in (("source", origin.source), ("note", origin.note)):
        if text:
            console.print(Text(fill(f"{name}: {text}", console.width), "dim"))
    write_filled(_header(facts))
    write("")
    print_table(("layout", "axis", ">size", ">stride", ""), _axes(facts))
    write("")
    for line in arithmetic(mesh):
        write_filled(line)
    write("")
    if mesh.size <= _GRID_LIMIT:
        write(grid(mesh, line=console.width))
        write("")
    crossings = [] if facts.nodes is None else [f">cross {name}" for name in facts.kinds[0].crossing]
    fields = (">groups", ">size", "stride", "communicator", "level", ">cross nodes", *crossings, ">nodes", ">hops")
    print_table(("group", "axes", "view", "part", *fields, "options", "members"), map(_kind, facts.kinds))
    write("")
    for line in _communicators(facts):
        write_filled(line)


def _header(facts: Overview) -> str:
    """Return the size of the world, the nodes if they are known, and the digest."""
    words = [f"{facts.world_size:,} ranks"]
    if (facts.first, facts.last) != (0, facts.world_size - 1):
        words.append(f"mesh over ranks {facts.first:,} to {facts.last:,}")
    if facts.nodes is not None:
        words.append(nodes_text(facts))
    return ", ".join([*words, f"digest {facts.digest[:12]}"])


def _axes(facts: Overview) -> Iterator[tuple[str | int, ...]]:
    """Yield the axes of the mesh and of its views."""
    for layout in facts.layouts:
        for number, axis in enumerate(layout.axes):
            name = "" if number else layout.view or "mesh"
            yield (name, axis.name, axis.size, axis.stride, "shared with the mesh" if axis.shared else "")


def _kind(kind: KindRow) -> tuple[str | int, ...]:
    """Return the row of a kind of group, the first members of its groups last."""
    crossed = kind.crossings
    hosts: tuple[str | int, ...] = ("", "", "")
    if crossed is not None:
        across = [f"{count:,} of {kind.count:,}" for count in kind.crossing.values()]
        hosts = (f"{crossed.crossing:,} of {crossed.groups:,}", *across, crossed.nodes, crossed.hops)
    members = " ".join(ranks_text(ranks, kind.size) for ranks in kind.examples)
    return (
        kind.name,
        "-".join(kind.axes),
        kind.view or "",
        kind.part or "",
        kind.count,
        kind.size,
        kind.stride,
        str(kind.communicator),
        kind.level or "",
        *hosts,
        ", ".join(f"{name} {value}" for name, value in kind.options.items()),
        members + (" …" if len(kind.examples) < kind.count else ""),
    )


def _communicators(facts: Overview) -> Iterator[str]:
    """Yield lines on how many communicators there are, and which kinds share them."""
    least, most = facts.communicators_least, facts.communicators_most
    each = f"{least}" if least == most else f"{least} to {most}"
    yield f"communicators per rank: {each}; in the job: {facts.communicators_total:,}"
    sharing = [kind.name for kind in facts.kinds if kind.communicator.shares]
    single = [kind.name for kind in facts.kinds if kind.communicator.single_rank]
    if sharing:
        yield f"sharing another kind's: {len(sharing)} of {len(facts.kinds)} kinds ({', '.join(sharing)})"
    if single:
        yield f"groups of one rank, no communicator: {', '.join(single)}"
    for pair in facts.unshared:
        yield f"same members, not shared: {pair.kind} and {pair.other}, {pair.why}"
