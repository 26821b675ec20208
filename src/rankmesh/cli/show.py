"""``rankmesh show``: a layout before its launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from rankmesh.cli.columns import Column, print_columns
from rankmesh.cli.console import out, write_json
from rankmesh.cli.options import (
    Cluster,
    GpusPerNode,
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
from rankmesh.viz.overview import KindRow, Overview, nodes_text, overview

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXAMPLES", "command", "members_text", "print_overview"]

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
    source, kinds = noted(source_of(given, world_size, variables)), words_of(groups)
    machine = None if cluster is None else cluster_of(cluster, source.plan.world_size, gpus_per_node=gpus_per_node)
    facts = overview(source, cluster=machine, gpus_per_node=gpus_per_node, members=members, kinds=kinds)
    outputs = _outputs(source, facts, kinds, {"--svg": svg, "--html": html, "--save": save})
    taken = check_stdout(outputs, json=json)

    def printed() -> None:
        if json:
            write_json({**facts.to_dict(), **config_of(source)})
        elif not taken:
            print_overview(out(), source.plan.mesh, facts)

    deliver(outputs, printed)


def _named(options: Mapping[str, object]) -> list[str]:
    return [name for name, value in options.items() if value]


def _outputs(source: Source, facts: Overview, kinds: list[str], paths: Mapping[str, str | None]) -> list[Output]:
    def svg() -> str:
        from rankmesh.viz.svg import picture

        return picture(source.plan, kinds, cluster=facts.cluster)

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
    print_columns(console, _axes(facts))
    console.print()
    if mesh.size <= GRID_LIMIT:
        console.print(grid(mesh, line=console.width), no_wrap=True, overflow="ignore", crop=False)
        console.print()
    print_columns(console, _kinds(facts))
    console.print()
    for line in _communicators(facts):
        console.print(fill(line, console.width))


def _print_header(console: Console, facts: Overview) -> None:
    from rich.text import Text

    origin = facts.origin
    title = Text(origin.spec, "bold")
    console.print(title.append(f"  {origin.title}", "not bold") if origin.title else title)
    for name, text in (("source", origin.source), ("note", origin.note)):
        if text:
            console.print(Text(fill(f"{name}: {text}", console.width), "dim"))
    console.print(_world(facts))
    console.print()


def _world(facts: Overview) -> str:
    words = [f"{facts.world_size:,} ranks"]
    if (facts.first, facts.last) != (0, facts.world_size - 1):
        words.append(f"mesh over ranks {facts.first:,} to {facts.last:,}")
    if facts.nodes is not None:
        words.append(nodes_text(facts))
    return ", ".join([*words, f"digest {facts.digest[:12]}"])


def _axes(facts: Overview) -> list[Column]:
    rows = [
        (("mesh" if layout.view is None else layout.view) if number == 0 else "", axis)
        for layout in facts.layouts
        for number, axis in enumerate(layout.axes)
    ]
    columns = [
        Column("layout", [name for name, _ in rows], style="bold"),
        Column("axis", [axis.name for _, axis in rows]),
        Column("size", [f"{axis.size:,}" for _, axis in rows], right=True),
        Column("stride", [f"{axis.stride:,}" for _, axis in rows], right=True),
    ]
    shared = ["shared with the mesh" if axis.shared else "" for _, axis in rows]
    return [*columns, Column("", shared)] if any(shared) else columns


def _kinds(facts: Overview) -> list[Column]:
    kinds = facts.kinds
    columns = [
        Column("group", [kind.name for kind in kinds], style="bold"),
        Column("axes", ["-".join(kind.axes) for kind in kinds]),
        *_if_any(Column("view", [kind.view or "" for kind in kinds])),
        *_if_any(Column("part", [kind.part or "" for kind in kinds])),
        Column("groups", [f"{kind.count:,}" for kind in kinds], right=True),
        Column("size", [f"{kind.size:,}" for kind in kinds], right=True),
        Column("stride", [kind.stride for kind in kinds]),
        Column("communicator", [str(kind.communicator) for kind in kinds]),
        *(_crossings(kinds) if facts.nodes is not None else []),
    ]
    examples = [members_text(kind, 10**6) for kind in kinds]
    members = Column("members", examples, fit=True, shorten=lambda row, width: members_text(kinds[row], width))
    options = [", ".join(f"{name} {value}" for name, value in kind.options.items()) for kind in kinds]
    return [*columns, *_if_any(Column("options", options, fit=True)), members]


def _if_any(column: Column) -> list[Column]:
    return [column] if any(column.cells) else []


def _crossings(kinds: tuple[KindRow, ...]) -> list[Column]:
    rows = [kind.crossings for kind in kinds if kind.crossings is not None]
    levels = [kind.level or "" for kind in kinds]
    return [
        *_if_any(Column("level", levels)),
        Column("cross nodes", [f"{row.crossing:,} of {row.groups:,}" for row in rows], right=True),
        Column("nodes", [f"{row.nodes:,}" for row in rows], right=True),
        Column("hops", [f"{row.hops:,}" for row in rows], right=True),
    ]


def members_text(kind: KindRow, width: int) -> str:
    """The first groups of a kind in at most ``width`` characters: two groups if three members of each fit.

    >>> from rankmesh.readers.source import read
    >>> dp = overview(read("tp=2,dp=8")).kinds[1]
    >>> members_text(dp, 38), members_text(dp, 20)
    ('[0, 2, 4, 6, 8, …] [1, 3, 5, 7, 9, …]', '[0, 2, 4, 6, 8, …]')
    """
    most = len(kind.examples[0])
    for groups in range(min(2, kind.count), 0, -1):
        for members in range(most, min(3, most) - 1 if groups > 1 else 0, -1):
            if len(_listed(kind, groups, members)) <= width:
                return _listed(kind, _widest(kind, groups, members, width), members)
    return "…"


def _widest(kind: KindRow, groups: int, members: int, width: int) -> int:
    while groups < len(kind.examples) and len(_listed(kind, groups + 1, members)) <= width:
        groups += 1
    return groups


def _listed(kind: KindRow, groups: int, members: int) -> str:
    tail = ", …]" if members < kind.size else "]"
    listed = [f"[{', '.join(map(str, ranks[:members]))}{tail}" for ranks in kind.examples[:groups]]
    return " ".join(listed) + (" …" if groups < kind.count and members == kind.size else "")


def _communicators(facts: Overview) -> Iterator[str]:
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
