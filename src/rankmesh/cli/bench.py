"""``rankmesh bench``: the benchmarks of the repository, run from here.

They compare with other systems on this machine and are no part of the installed package: in a checkout this is
``python -m bench``, elsewhere it says where they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

import rankmesh
from rankmesh.cli.shell import ExitCode, Failed

__all__ = ["EXAMPLES", "command", "run"]

EXAMPLES = """\
$ rankmesh bench --help
$ rankmesh bench --quick
"""


def run(words: list[str], checkout: Path | None = None) -> int:
    """The exit status of ``python -m bench`` in the checkout that this package is run from."""
    root = Path(rankmesh.__file__).parents[2] if checkout is None else checkout
    if not (root / "bench" / "__main__.py").is_file():
        raise Failed(
            "the installed package has no benchmarks; run make bench, or python -m bench, in a clone of the repository",
            ExitCode.USAGE,
        )
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "bench", *words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode  # noqa: S603


def command(context: typer.Context) -> None:
    """Measure rankmesh against other systems, in a checkout; the options are those of python -m bench."""
    raise typer.Exit(run(context.args))
