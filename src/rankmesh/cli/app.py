"""The ``rankmesh`` command line: its subcommands, and what its help says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from rankmesh import __version__
from rankmesh.cli import (
    bench,
    check,
    cluster,
    compare,
    diff,
    doctor,
    explain,
    explore,
    groups,
    layout,
    measure,
    place,
    presets,
    search,
    show,
    transfer,
    where,
)
from rankmesh.cli.console import write
from rankmesh.cli.exit_codes import EXIT_CODES
from rankmesh.cli.options import Debug
from rankmesh.cli.shell import Shell

__all__ = ["app"]

_SPECS = """\
[bold]A SPEC is one of[/]
  tp=2,cp=2,dp=4,pp=2                      axes, adjacent ranks first
  'tp=2,dp=*,pp=2'                         one size may be * (--world-size)
  tp=2,dp=4/expert:ep=8                    a second view of the same ranks
  megatron:world=64,tp=2,pp=2,ep=4         a recipe: megatron, nanotron, ezpz,
                                           three_d, torchtitan, accelerate,
                                           deepspeed
  llama3-405b                              a preset (rankmesh presets)
  plan.json                                a saved plan (rankmesh show --save)
  train.sh                                 a Megatron launch script (parsed; show --run
                                           runs it with recorders)
  train.toml, config.yaml, ds.json         a config of torchtitan, nanotron,
                                           Megatron, Accelerate, DeepSpeed"""

app = typer.Typer(
    cls=Shell,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"{_SPECS}\n\n[bold]Exit status[/]\n{EXIT_CODES}",
)


def _version(value: bool) -> None:
    if value:
        write(f"rankmesh {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Describe an N-D parallel layout once; see it, compare it, and prove it on real ranks."""


def _register(name: str, command: Callable[..., None], examples: str, **settings: Any) -> None:
    shown = examples.rstrip().replace("[", r"\[")
    app.command(name, epilog=f"[bold]Examples[/]\n{shown}", **settings)(command)


_register("show", show.command, show.EXAMPLES)
_register("groups", groups.command, groups.EXAMPLES)
_register("explain", explain.command, explain.EXAMPLES)
_register("diff", diff.command, diff.EXAMPLES)
_register("check", check.command, check.EXAMPLES)
_register("compare", compare.command, compare.EXAMPLES)
_register("transfer", transfer.command, transfer.EXAMPLES)
_register("layout", layout.command, layout.EXAMPLES)
_register("where", where.command, where.EXAMPLES)
_register(
    "bench",
    bench.command,
    bench.EXAMPLES,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
_register("cluster", cluster.command, cluster.EXAMPLES)
_register("place", place.command, place.EXAMPLES)
_register("search", search.command, search.EXAMPLES)
_register("measure", measure.command, measure.EXAMPLES)
_register("doctor", doctor.command, doctor.EXAMPLES)
_register("explore", explore.command, explore.EXAMPLES)
_register("presets", presets.command, presets.EXAMPLES)
