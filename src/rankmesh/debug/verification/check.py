"""Check a plan: with the ranks of this job, or with ranks that are started on this machine."""

from __future__ import annotations

from collections.abc import Callable

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.here import check_here
from rankmesh.debug.verification.in_job import check_in_job
from rankmesh.debug.verification.results import CheckResult
from rankmesh.errors import PlanError, quoted
from rankmesh.launch.started import Launch, started_by
from rankmesh.launch.table import NOBODY

__all__ = ["check", "runs_alone"]


def check(
    plan: Plan,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    since: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    show: Callable[[CheckResult], None] | None = None,
) -> CheckResult:
    """Build every group of a plan on real processes and prove each with collectives; how that went, rank by rank.

    Inside a job every rank calls it, and gets the result; started by nobody it starts the ranks itself, on this
    machine. ``timeout`` is how long ranks wait for each other, in seconds; ``progress`` is told how many of how many
    proofs are done; ``show`` gets the result on the one process that speaks to people. ``since`` is when the clock of
    the whole check began (``time.perf_counter()``), without it that is now.

    Raises ``PlanError`` for a plan of another size than the job, or too large for one machine; ``ConnectError`` when
    the ranks of a job cannot meet. Ranks that fail or die are in the result.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"cannot check {quoted(plan)}, which is not a plan; use rankmesh.read('tp=2,dp=4') or "
            "Plan(mesh, [GroupSpec('tp'), ...])",
            received=plan,
        )
    launch = started_by()
    if not runs_alone(launch):
        shown = progress if launch.rank == 0 else None
        return check_in_job(plan, launch, backend=backend, timeout=timeout, since=since, progress=shown, show=show)
    result = check_here(plan, backend=backend, timeout=timeout, since=since, progress=progress)
    if show is not None:
        show(result)
    return result


def runs_alone(launch: Launch) -> bool:
    """Whether there are no ranks but those that this process starts; a shell in a Slurm allocation is one task.

    >>> runs_alone(started_by({})), runs_alone(started_by({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0"}))
    (True, False)
    """
    return launch.launcher == NOBODY or (launch.launcher == "slurm" and launch.alone)
