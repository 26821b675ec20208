"""``rankmesh show --run``: a launch script is run with recorders for its launchers, after the user has agreed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from rankmesh.cli.console import note
from rankmesh.cli.options import variables_of
from rankmesh.cli.shell import ExitCode, Failed
from rankmesh.errors import quoted_path
from rankmesh.readers.launched import STAND_INS, run_config, sandbox_kind
from rankmesh.readers.source import Source

__all__ = ["recorded_source"]

_WHERE = {
    "namespaces": "without network; what it writes is thrown away, and system folders are read-only",
    "bubblewrap": "in bubblewrap without network; files are read-only but for a temporary folder",
    "none": "WITHOUT a sandbox: this machine allows none, so the script can change files and use the network",
}


def recorded_source(
    script: str,
    arguments: Sequence[str] = (),
    *,
    world_size: int | None = None,
    variables: Sequence[str] = (),
    launch: int | None = None,
    yes: bool = False,
) -> Source:
    """The plan of a script that runs; asks on the terminal first, unless ``yes``."""
    kind = sandbox_kind()
    note(
        f"{script}: bash runs this script, {_WHERE[kind]}. These commands are recorded and do not run: "
        f"{', '.join(STAND_INS)}. All others run, and so does a launcher that is called by an absolute path."
    )
    if not yes:
        _ask(script)
    given = variables_of(variables)
    config = run_config(script, arguments, world_size=world_size, variables=given, launch=launch, sandbox=kind)
    return Source(config.plan, "config", script, config=config)


def _ask(script: str) -> None:
    if not sys.stdin.isatty():
        raise Failed(
            f"--run runs {quoted_path(script)}, and there is no terminal to ask whether it may; add --yes",
            ExitCode.USAGE,
        )
    if not typer.confirm("Run it?", err=True):
        raise Failed("the script did not run; answer y, or add --yes", ExitCode.USAGE)
