"""The ``rankmesh`` command line: its subcommands, each loaded when it is used, and its help.

The modules in the folder of a panel are its subcommands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from rankmesh import __version__
from rankmesh.cli.console import write
from rankmesh.cli.options import Debug, Json
from rankmesh.cli.shell import EXIT_CODES, Answer, Shell

__all__ = ["PANELS", "app"]

# The panel of the help that each subcommand is in, by the folders that have the modules.
PANELS = {
    path.stem: panel
    for panel in ("Look", "Run", "Plan", "Weights", "Debug")
    for path in sorted(Path(__file__).parent.glob(f"{panel.lower()}/[!_]*.py"))
}

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


class _Commands(Shell):
    """The root command, which imports a subcommand's module when the subcommand is named or the help lists it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all subcommands, in the order of the panels."""
        return list(PANELS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a subcommand, None for a name that is none."""
        # What is misspelt is compared with the names of all.
        for name in [cmd_name] if cmd_name in PANELS else PANELS:
            if name not in self.commands:
                self.commands[name] = _loaded(name)
                # Each subcommand takes the root's --debug, too.
                self.commands[name].params += [param for param in self.params if param.name == "debug"]
        return self.commands.get(cmd_name)


def _loaded(name: str) -> Any:
    """Return the subcommand of this name; its docstring ends with examples."""
    command = import_module(f"rankmesh.cli.{PANELS[name].lower()}.{name}").command
    text, _, examples = inspect.cleandoc(command.__doc__).partition("\n\n$ ")
    epilog = "[bold]Examples[/]\n$ " + examples.replace("[", r"\[")
    one = typer.Typer(add_completion=False, rich_markup_mode="rich")
    one.command(name, help=text, epilog=epilog, rich_help_panel=PANELS[name])(_with_options(command))
    return get_command(one)


def _with_options(command: Callable[..., Answer | None]) -> Callable[..., None]:
    """Return a function for typer: a dataclass among the parameters gives its fields, and an answer the option --json.

    Typer reads the options off a signature, and a dataclass has one.
    """
    plain = inspect.signature(command, eval_str=True)
    annotations: dict[str, type[Any]] = {name: given.annotation for name, given in plain.parameters.items()}
    groups = {name: kind for name, kind in annotations.items() if is_dataclass(kind)}
    made: list[inspect.Parameter] = []
    for name, parameter in plain.parameters.items():
        group = groups.get(name)
        made += [parameter] if group is None else inspect.signature(group, eval_str=True).parameters.values()
    adds_json = not ("json" in plain.parameters or plain.return_annotation is None)
    if adds_json:
        made.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json))

    @wraps(command)
    def run(**given: Any) -> None:
        json = given.pop("json") if adds_json else given.get("json", False)
        for name, group in groups.items():
            given[name] = group(**{field: given.pop(field) for field in inspect.signature(group).parameters})
        if (answer := command(**given)) is not None:
            answer.print(json=json)

    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in made]
    run.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    return run


app = typer.Typer(
    cls=_Commands,
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Describe an N-D parallel layout once; see it, compare it, and prove it on real ranks."""
