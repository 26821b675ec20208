"""``rankmesh compare``: a program under many layouts against one process, and what makes them differ."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from rankmesh.cli.columns import print_table
from rankmesh.cli.console import write
from rankmesh.cli.shell import Answer, ExitCode, Failed
from rankmesh.errors import extra, first_line, quoted

if TYPE_CHECKING:
    from rankmesh.runtime.live import LiveGroups
    from rankmesh.sim import Comparison

__all__ = ["command", "program_of"]

_FORM = "name it as FILE:FUNCTION, such as train.py:program"


def command(
    program: Annotated[
        str, typer.Argument(metavar="FILE:FUNCTION", help="The program: a function of the groups of its rank.")
    ],
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    layouts: Annotated[
        list[str] | None, typer.Option("--layouts", "-l", metavar="SPEC...", help="The layouts to compare.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Relative to a value's largest element; noise may allow more.")
    ] = 1e-6,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="How long to try repairs.")] = 60.0,
    timeout: Annotated[
        float, typer.Option("--timeout", "-t", min=0.1, help="Seconds that one rank may run without a collective.")
    ] = 30.0,
) -> Answer:
    """Run a program on simulated ranks under every layout, and report what differs first from one process, and why.

    The function calls rankmesh.sim.see(name, tensor) for what must be the same.

    $ rankmesh compare train.py:program --layouts tp=2 dp=2 tp=2,dp=2
    $ rankmesh compare package.train:program --layouts megatron:world=8,tp=2,cp=2 --json
    """
    chosen = [*(layouts or ()), *(more or ())]
    if not chosen:
        raise typer.BadParameter("no layouts are given; add --layouts tp=2 dp=2")
    with extra("torch"):
        from rankmesh import sim
    function = program_of(program)
    try:
        result = sim.compare(function, chosen, tolerance, seconds=seconds, timeout=timeout)
    except sim.RanksFailed as failed:
        raise Failed(str(failed).replace("pass timeout=", "pass --timeout "), ExitCode.LOST_RANKS) from failed
    return Answer(result.to_dict, lambda: _print(result), ExitCode.OK if result.same else ExitCode.DIFFERENT)


def program_of(text: str) -> Callable[[LiveGroups], object]:
    """Return the function that FILE:FUNCTION, or MODULE:FUNCTION, names; a file is imported as a module of its name."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise typer.BadParameter(f"{quoted(text)} does not name a function; {_FORM}")
    try:
        module = _imported(place)
    except Exception as error:
        kind = type(error).__name__
        raise Failed(f"{place} cannot be imported: {kind}: {first_line(error)}; {_FORM}", ExitCode.USAGE) from error
    found: Callable[[LiveGroups], object] | None = getattr(module, name, None)
    if not callable(found):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise typer.BadParameter(f"{place} has no function {name!r}, but {', '.join(known[:8]) or 'none'}; {_FORM}")
    return found


def _imported(place: str) -> ModuleType:
    """Import a module as Python does that runs it: it can import the modules of its folder."""
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    path = Path(place)
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # a name that ends in .py has a loader
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _print(result: Comparison) -> None:
    (head, *heads), rows = result.table()
    print_table((head, *(f">{name}" for name in heads)), rows)
    write("")
    write(result.report())
