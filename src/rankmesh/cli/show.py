"""``rankmesh show``: a layout before its launch.

>>> shown("tp=2,dp=*", world_size=4).kinds[1].examples
((0, 2), (1, 3))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from rankmesh.cli.complete import group_names
from rankmesh.cli.console import out, write_json
from rankmesh.cli.options import (
    Cluster,
    Debug,
    GpusPerNode,
    Json,
    Spec,
    Variables,
    WorldSize,
    cluster_of,
    config_of,
    source_of,
    tell,
)
from rankmesh.cli.outputs import Output, check_stdout, deliver
from rankmesh.cli.show_text import print_overview
from rankmesh.readers.source import Source
from rankmesh.viz.overview import Overview, overview

__all__ = ["EXAMPLES", "command", "shown"]

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


def shown(
    spec: str,
    *,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    cluster: str | None = None,
    members: int = 8,
    kinds: Sequence[str] | None = None,
) -> Overview:
    """The overview of a spec; ``kinds`` keeps the rows of these kinds of group."""
    source = source_of(spec, world_size)
    machine = None if cluster is None else cluster_of(cluster, source.plan.world_size)
    return overview(source, cluster=machine, gpus_per_node=gpus_per_node, members=members, kinds=kinds)


def command(
    spec: Spec,
    gpus_per_node: GpusPerNode = None,
    cluster: Cluster = None,
    members: Annotated[int, typer.Option(min=1, metavar="K", help="List up to K members of a group.")] = 8,
    groups: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these kinds (tp,pp); may be repeated.", autocompletion=group_names),
    ] = None,
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
    debug: Debug = False,
) -> None:
    """Show a layout: axes, strides, every kind of group, who shares a communicator, what crosses nodes."""
    source = source_of(spec, world_size, variables)
    tell(source)
    kinds = [name for names in groups or () for name in names.split(",")]
    machine = None if cluster is None else cluster_of(cluster, source.plan.world_size)
    facts = overview(source, cluster=machine, gpus_per_node=gpus_per_node, members=members, kinds=kinds)
    outputs = _outputs(source, facts, kinds, {"--svg": svg, "--html": html, "--save": save})
    taken = check_stdout(outputs, json=json)

    def printed() -> None:
        if json:
            write_json({**facts.to_dict(), **config_of(source)})
        elif not taken:
            print_overview(out(), source.plan.mesh, facts)

    deliver(outputs, printed)


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
