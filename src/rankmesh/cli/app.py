"""The ``rankmesh`` command line: its subcommands, and what its help says."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

import typer

from rankmesh import __version__
from rankmesh.cli import (
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
from rankmesh.cli.options import Debug
from rankmesh.cli.shell import EXIT_CODES, Shell

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


def _register(subcommand: ModuleType) -> None:
    """A module's ``command`` under the module's name, with its ``EXAMPLES``."""
    shown = subcommand.EXAMPLES.rstrip().replace("[", r"\[")
    name = subcommand.__name__.rpartition(".")[2]
    app.command(name, epilog=f"[bold]Examples[/]\n{shown}")(subcommand.command)


_COMMANDS = (show, groups, explain, diff, check, compare, transfer, layout, where)
for _module in (*_COMMANDS, cluster, place, search, measure, doctor, explore, presets):
    _register(_module)
