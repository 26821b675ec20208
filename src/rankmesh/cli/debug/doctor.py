"""``rankmesh doctor``: the rank, group and call that make a job hang, from what the ranks and NCCL left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankmesh.cli.console import note, progress_bar, write
from rankmesh.cli.options import SPEC_HELP, WorldSize, config_of, noted, source_of
from rankmesh.cli.shell import Answer, ExitCode
from rankmesh.debug.doctor import doctor
from rankmesh.debug.doctor.diagnosis import report
from rankmesh.debug.doctor.folder import is_evidence

__all__ = ["command"]

_NOTES = 8
# Names that no layout has.
_LOGS = (".log", ".out", ".err", ".txt")

_Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH",
        help="Folders and files, in any mixture: recordings of the ranks (from torch's flight recorder, JSON or "
        "pickle, gzip or not, with names that end with the rank; or from rankmesh), reports of ncclras "
        "(text or -f json), logs (lines of torch's NCCL watchdog, of NCCL_DEBUG, errors of torchrun), its error files, "
        "and dumps of stacks by py-spy, pystack or faulthandler, named by rank. A SPEC may follow, as for --layout.",
    ),
]
_Layout = Annotated[
    str | None, typer.Option("--layout", metavar="SPEC", help=f"The layout, to name groups. {SPEC_HELP}")
]


def command(
    paths: _Paths,
    layout: _Layout = None,
    world_size: WorldSize = None,
) -> Answer:
    """Find why a job hangs: the rank, the group and the call that everyone waits for, from what the job left.

    $ rankmesh doctor recordings
    $ rankmesh doctor /tmp/nccl_traces megatron:world=64,tp=2,pp=2
    $ rankmesh doctor ras.txt recordings --layout megatron:world=64,tp=2,pp=2
    $ rankmesh doctor train.log stacks --layout tp=8,dp=4
    $ rankmesh doctor recordings --json
    """
    if layout is None and len(paths) > 1 and not is_evidence(paths[-1]) and paths[-1].suffix not in _LOGS:
        *paths, spec = paths
        layout = str(spec)
    source = None if layout is None else noted(source_of(layout, world_size))
    with progress_bar("reading", "recordings") as (progress, _):
        found = doctor(paths, None if source is None else source.plan, progress)
    for text in found.notes[:_NOTES]:
        note(text)
    if len(found.notes) > _NOTES:
        note(f"and {len(found.notes) - _NOTES} more notes; --json lists them")
    hangs = found.causes or found.waiting or found.remarks
    return Answer(
        lambda: {**found.to_dict(), **config_of(source)},
        lambda: write(report(found)),
        ExitCode.HUNG if hangs else ExitCode.OK,
    )
