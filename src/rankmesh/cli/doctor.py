"""``rankmesh doctor``: the rank, group and call that make a job hang, from the recordings that the ranks left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankmesh.cli.console import note, write, write_json
from rankmesh.cli.options import Json, OptionalSpec, WorldSize, config_of, noted, source_of
from rankmesh.cli.shell import ExitCode, Failed
from rankmesh.debug.doctor import doctor
from rankmesh.debug.doctor.diagnosis import report

__all__ = ["EXAMPLES", "command"]

EXAMPLES = """\
$ rankmesh doctor recordings
$ rankmesh doctor /tmp/nccl_traces megatron:world=64,tp=2,pp=2
$ rankmesh doctor recordings --json
"""

_NOTES = 8

_Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The folder with a recording of each rank: those of torch's flight recorder (JSON or pickle, gzip or "
        "not; their names end with the rank), or those that rankmesh wrote.",
    ),
]


def command(
    folder: _Folder,
    spec: OptionalSpec = None,
    world_size: WorldSize = None,
    json: Json = False,
) -> None:
    """Say what hangs: the rank, the group and the call that everyone waits for, by the recordings of the ranks."""
    source = None if spec is None else noted(source_of(spec, world_size))
    found = doctor(folder, None if source is None else source.plan)
    for text in found.notes[:_NOTES]:
        note(text)
    if len(found.notes) > _NOTES:
        note(f"and {len(found.notes) - _NOTES} more notes; --json lists them")
    if json:
        write_json({**found.to_dict(), **config_of(source)})
    else:
        write(report(found))
    if found.causes or found.waiting:
        raise Failed("", ExitCode.HUNG)
