"""``rankmesh show --run``: a launch script is run with recorders for its launchers, after the user has agreed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from rankmesh.cli.console import note
from rankmesh.cli.options import variables_of
from rankmesh.cli.shell import ExitCode, Failed
from rankmesh.errors import quoted_path
from rankmesh.readers.launched import run_config
from rankmesh.readers.recording.record import STAND_INS, chosen_sandbox, sandbox_kind
from rankmesh.readers.source import Source

__all__ = ["recorded_source"]

_WHERE = {
    "namespaces": "without network, sockets and devices of this machine; what it writes is thrown away, system folders "
    "are read-only, and /run and /tmp are empty",
    "bubblewrap": "in bubblewrap without network, sockets and devices of this machine; files are read-only but for a "
    "temporary folder, and /run and /tmp are empty",
    "none": "WITHOUT a sandbox, FOR REAL: it can change and delete files, use the network and stop processes",
}


def recorded_source(
    script: str,
    arguments: Sequence[str] = (),
    *,
    world_size: int | None = None,
    variables: Sequence[str] = (),
    launch: int | None = None,
    sandbox: str | None = None,
    yes: bool = False,
) -> Source:
    """Run a script, and return its plan; ask on the terminal first, unless ``yes``.

    A script that would run without a sandbox is asked for even so, unless ``sandbox`` names that mode.
    """
    kind = chosen_sandbox(sandbox) if sandbox is not None else sandbox_kind()
    note(
        f"{script}: bash runs this script, {_WHERE[kind]}. These commands are recorded and do not run: "
        f"{', '.join(STAND_INS)}. All others run"
        + (
            ", and so do these where a login shell, another PATH or an absolute path finds them."
            if kind == "none"
            else "."
        )
    )
    if yes and kind == "none" and sandbox is None:
        raise Failed(
            f"this machine allows no sandbox, so --yes would run {quoted_path(script)} for real; to run it so, add "
            "--sandbox none",
            ExitCode.USAGE,
        )
    if not yes:
        _ask(script, kind)
    given = variables_of(variables)
    config = run_config(script, arguments, world_size=world_size, variables=given, launch=launch, sandbox=kind)
    return Source(config.plan, "config", script, config=config)


def _ask(script: str, kind: str) -> None:
    without = kind == "none"
    if not sys.stdin.isatty():
        raise Failed(
            f"--run runs {quoted_path(script)}{' WITHOUT a sandbox' if without else ''}, and there is no terminal to "
            f"ask whether it may; add --yes{' --sandbox none' if without else ''}",
            ExitCode.USAGE,
        )
    question = "Run it for real, WITHOUT a sandbox, with all that it does to this machine?" if without else "Run it?"
    if not typer.confirm(question, err=True):
        raise Failed("the script did not run; answer y, or add --yes", ExitCode.USAGE)
