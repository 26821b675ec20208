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
from rankmesh.cli.options import Debug, Json, Spec, WorldSize, plan_of
from rankmesh.cli.shell import Failed
from rankmesh.cli.show_text import print_overview
from rankmesh.viz.overview import Overview, overview

__all__ = ["EXAMPLES", "command", "shown"]

EXAMPLES = """\
$ rankmesh show tp=2,dp=4 --gpus-per-node 4
"""


def shown(
    spec: str,
    *,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    members: int = 8,
    kinds: Sequence[str] | None = None,
) -> Overview:
    """The overview of a spec; ``kinds`` keeps the rows of these kinds of group."""
    return overview(plan_of(spec, world_size), gpus_per_node=gpus_per_node, members=members, kinds=kinds)


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
    members: Annotated[int, typer.Option(min=1, metavar="K", help="List up to K members of a group.")] = 8,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only these kinds (tp,pp); may be repeated.", autocompletion=group_names
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a picture, up to 512 ranks.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page of tables and pictures.")
    ] = None,
    world_size: WorldSize = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a layout: axes, strides, every kind of group, who shares a communicator, what crosses nodes."""
    source = plan_of(spec, world_size)
    kinds = [name for names in groups or () for name in names.split(",")]
    facts = overview(source, gpus_per_node=gpus_per_node, members=members, kinds=kinds)
    if svg is not None:
        from rankmesh.viz.svg import picture

        _save(svg, picture(source.plan, kinds, gpus_per_node=facts.gpus_per_node))
    if html is not None:
        from rankmesh.viz.html import page

        _save(html, page(source, facts))
    if json:
        write_json(facts.to_dict())
    else:
        print_overview(out(), source.plan.mesh, facts)


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise Failed(f"cannot write {path}: {problem.strerror}", ExitCode.USAGE) from problem
    note(f"wrote {path}")
