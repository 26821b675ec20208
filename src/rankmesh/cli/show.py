"""``rankmesh show``: a layout before its launch.

>>> shown("tp=2,dp=*", world_size=4).kinds[1].examples
((0, 2), (1, 3))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rankmesh.cli.complete import group_names
from rankmesh.cli.console import note, out, write_json
from rankmesh.cli.exit_codes import ExitCode
from rankmesh.cli.options import Cluster, Debug, Json, Spec, WorldSize, cluster_of, config_of, plan_of, tell
from rankmesh.cli.shell import Failed
from rankmesh.cli.show_text import print_overview
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
    source = plan_of(spec, world_size)
    machine = None if cluster is None else cluster_of(cluster, source.plan.world_size)
    return overview(source, cluster=machine, gpus_per_node=gpus_per_node, members=members, kinds=kinds)


def command(
    spec: Spec,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node",
            "-g",
            min=1,
            metavar="N",
            help="Count the groups that cross nodes of N ranks; presets know N.",
        ),
    ] = None,
    cluster: Cluster = None,
    members: Annotated[int, typer.Option(min=1, metavar="K", help="List up to K members of a group.")] = 8,
    groups: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these kinds (tp,pp); may be repeated.", autocompletion=group_names),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a picture, up to 512 ranks.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page of tables and pictures.")] = None,
    world_size: WorldSize = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a layout: axes, strides, every kind of group, who shares a communicator, what crosses nodes."""
    source = plan_of(spec, world_size)
    tell(source)
    kinds = [name for names in groups or () for name in names.split(",")]
    machine = None if cluster is None else cluster_of(cluster, source.plan.world_size)
    facts = overview(source, cluster=machine, gpus_per_node=gpus_per_node, members=members, kinds=kinds)
    if svg is not None:
        from rankmesh.viz.svg import picture

        _save(svg, picture(source.plan, kinds, cluster=facts.cluster))
    if html is not None:
        from rankmesh.viz.html import page

        _save(html, page(source, facts))
    if json:
        write_json({**facts.to_dict(), **config_of(source)})
    else:
        print_overview(out(), source.plan.mesh, facts)


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise Failed(f"cannot write {path}: {problem.strerror}", ExitCode.USAGE) from problem
    note(f"wrote {path}")
