"""Measure a plan: with the ranks of this job, or with ranks that are started on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta

from rankmesh.core.measured import Measurement
from rankmesh.core.plan import Plan
from rankmesh.debug.verification.check import is_single_process
from rankmesh.debug.verification.ranks import Progress, check_size, run_here
from rankmesh.errors import ConnectError
from rankmesh.launch.started import Launch, started_by
from rankmesh.runtime.connect import connect
from rankmesh.runtime.init import enter
from rankmesh.runtime.measure import SIZES

__all__ = ["measure"]


def measure(
    plan: Plan,
    *,
    sizes: Iterable[int] = SIZES,
    kinds: Iterable[str] | None = None,
    backend: str | None = None,
    timeout: float = 60.0,
    progress: Progress | None = None,
) -> Measurement:
    """Build the groups of a plan on real processes and time their collectives; see ``LiveGroups.measure``.

    Inside a job every rank calls it, and gets the measurement; without a launcher it starts the ranks itself, on this
    machine. Raises ``PlanError`` for a plan of another size than the job, or too large for one machine;
    ``ConnectError`` when ranks cannot meet or die.
    """
    launch = started_by()
    chosen, named = tuple(sizes), None if kinds is None else tuple(kinds)
    for name in named or ():
        plan.groups(name)

    def run(launch: Launch, progress: Progress | None) -> Measurement:
        with enter(launch, backend, timedelta(seconds=timeout)), connect(plan, timeout=timeout) as groups:
            return groups.measure(chosen, kinds=named, progress=progress, timeout=timeout)

    def work(launch: Launch, far: Progress, give: Callable[[Measurement], None]) -> None:
        found = run(launch, far if launch.rank == 0 else None)
        if launch.rank == 0:
            give(found)

    if not is_single_process(launch):
        return run(launch, progress if launch.rank == 0 else None)
    ended = run_here(check_size(plan), work, progress, "measured")
    if ended.how:
        rank, how = next(iter(ended.how.items()))
        raise ConnectError(f"rank {rank} {how} as it measured; look at its output", ranks=tuple(ended.how))
    return ended.found
