"""``rankmesh watch``: run a command whose ranks are watched, without a change of their code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from rankmesh.cli.shell import ExitCode, Failed
from rankmesh.debug.watch.setting import SWITCH, setting

__all__ = ["command"]


def command(
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The command of the job, after --.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of recordings, on all hosts; default: rankmesh-watch/JOB.")
    ] = None,
    after: Annotated[
        float | None, typer.Option(help="Seconds that a call may take; default: half of its group's timeout.", min=0.1)
    ] = None,
    then: Annotated[
        str, typer.Option(metavar="WORD", help="After a diagnosis: log, abort (NCCL's calls), exit (status 7).")
    ] = "log",
) -> None:
    """Run a command with RANKMESH=watch: if its ranks hang, one of them logs which rank is the cause, and where.

    $ rankmesh watch -- torchrun --nproc-per-node 8 train.py
    $ rankmesh watch --after 120 --dir /shared/hangs -- srun python train.py
    $ export RANKMESH=watch:after=120,then=exit     # the same, in a launch script
    """
    options = {"dir": "" if folder is None else str(folder.absolute()), "after": after or "", "then": then}
    value = "watch:" + ",".join(f"{name}={option}" for name, option in options.items() if option)
    setting({SWITCH: value})
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise Failed(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading the watch; "
            "unset it, or call rankmesh_watch.load() after the program's import of torch",
            ExitCode.USAGE,
        )
    program = shutil.which(words[0])
    if program is None:
        raise Failed(f"no program {words[0]!r} is found; give the command that starts the job after --", ExitCode.USAGE)
    os.execve(program, words, {**os.environ, SWITCH: value})  # noqa: S606  - the user's own command
