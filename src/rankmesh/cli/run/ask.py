"""``rankmesh ask``: the state of a running job that survives, and a change of its layout."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from rankmesh.cli.columns import print_table
from rankmesh.cli.console import note
from rankmesh.cli.shell import Answer
from rankmesh.errors import PlanError, extra

__all__ = ["command"]


def command(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The address of a rank: its job.address.", show_default=False)
    ],
    what: Annotated[
        Literal["status", "relayout"],
        typer.Argument(metavar="status|relayout", help="Show the state of the job, or request another layout."),
    ],
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="The layout; a size of * keeps the number of ranks.")
    ] = "",
) -> Answer:
    """Request the state of a running job, or another layout for it.

        The job runs under rm.survive. Every rank and every spare replies to processes that have the
        key of the job: set RANKMESH_JOB_KEY to the job's job.key, or RANKMESH_JOB_KEY_FILE to a
        file that contains it.

    A change happens after the next commit of the rank at ADDRESS. All ranks leave train()
        and call it again under the new plan. Spares take new ranks, and ranks that the plan lacks
        become spares. A layout that does not fit is refused, and the job goes on. Layouts that are
        requested meanwhile, of this rank or of another one, follow one after the other. A file is
        read here, and its plan is sent. The status shows the last change, its seconds, and why
        members were left out.

    $ export RANKMESH_JOB_KEY_FILE=job.key
    $ rankmesh ask 10.0.0.1:40123 status
    $ rankmesh ask 10.0.0.1:40123 status --json
    $ rankmesh ask 10.0.0.1:40123 relayout tp=4,dp=2
    $ rankmesh ask 10.0.0.1:40123 relayout 'tp=4,dp=*'
    """
    with extra("torch"):
        from rankmesh.survival.ask import request_layout, status
    if what == "relayout":
        if not spec:
            raise PlanError("relayout needs a layout; give a SPEC, such as tp=4,dp=2")
        note(request_layout(address, spec))
    elif spec:
        raise PlanError(f"status takes no layout, and {spec!r} was given; ask for relayout {spec}")
    found = status(address)
    return Answer(lambda: found, lambda: _print(found))


def _print(found: dict[str, Any]) -> None:
    change = found["last_change"]
    seconds = ", ".join(f"{phase} {took:.2f} s" for phase, took in change["seconds"].items())
    rows = {
        "epoch": found["epoch"],
        "plan": found["plan"],
        "step": found["step"],
        "members": len(found["members"]),
        "spares": len(found["spares"]),
        "last change": f"{change['what']}: {seconds}" if seconds else change["what"],
        **{f"member {member}": why for member, why in change["why"].items()},
    }
    print_table(("what", "the job"), [(name, str(value)) for name, value in rows.items()])
