"""The arguments that subcommands have in common, each with its help and its completion."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rankmesh.cli.complete import group_names, preset_names, spec_names
from rankmesh.cli.shell import DEBUG
from rankmesh.errors import LayoutError
from rankmesh.plan.source import Source, read

__all__ = ["LIMIT", "SPEC_HELP", "Debug", "GroupName", "Json", "PresetName", "Spec", "WorldSize", "plan_of"]

# Whole-world arrays of every kind stay below a gigabyte up to here.
LIMIT = 2**22


def _debug(value: bool) -> bool:
    if value:
        os.environ[DEBUG] = "1"
    return value


SPEC_HELP = (
    "An axis string (tp=2,dp=4), a recipe (megatron:world=64,tp=2,pp=2), a preset (llama3-405b), "
    "or a saved plan (plan.json)."
)

Spec = Annotated[str, typer.Argument(metavar="SPEC", help=SPEC_HELP, autocompletion=spec_names)]
GroupName = Annotated[
    str, typer.Argument(metavar="NAME", help="A kind of group, such as dp_cp.", autocompletion=group_names)
]
PresetName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="One preset in detail.", autocompletion=preset_names)
]
WorldSize = Annotated[
    int | None,
    typer.Option("--world-size", "-w", min=1, metavar="N", help="Ranks in the world: what a * in SPEC is filled from."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys, and nothing else, to stdout.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_debug, is_eager=True, help=f"Show the traceback of an error ({DEBUG}=1)."),
]


def plan_of(spec: str, world_size: int | None = None) -> Source:
    """The plan that the user means, of a size that the command can list.

    >>> plan_of("tp=2,dp=*", 8).plan.mesh
    Mesh(tp=2, dp=4)
    """
    source = read(spec, world_size=world_size)
    if source.plan.world_size > LIMIT:
        raise LayoutError(
            f"received a world of {source.plan.world_size} ranks; the command lists worlds of up to {LIMIT}; "
            "use the library for one rank of a larger one: plan.of(rank)",
            world_size=source.plan.world_size,
            limit=LIMIT,
        )
    return source
