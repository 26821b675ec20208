"""Measure a plan: with the ranks of this job, or with ranks that are started on this machine."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

from rankmesh.core.plan import Plan
from rankmesh.debug.verification.check import is_single_process
from rankmesh.debug.verification.ranks import Ranks, begin, check_size
from rankmesh.errors import ConnectError, RankmeshError, first_line
from rankmesh.launch.started import Launch, started_by
from rankmesh.placement.measured import Measurement
from rankmesh.runtime.connect import connect
from rankmesh.runtime.init import enter
from rankmesh.runtime.measure import SIZES

__all__ = ["measure"]

Progress = Callable[[int, int], None]
# Measures as one rank of a world.
Run = Callable[[Launch, "Progress | None"], Measurement]


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

    if is_single_process(launch):
        return _here(check_size(plan), run, progress)
    return run(launch, progress if launch.rank == 0 else None)


def _here(size: int, run: Run, progress: Progress | None) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="rankmesh-measure-") as folder:
        place = Path(folder)
        ranks = Ranks(place, size, None if progress is None else _reading(place, progress))
        stopped = ranks.run(lambda rank: _rank(run, begin(place, rank, size), place))
        if stopped or not (place / "found").exists():
            failed = [path.read_text(encoding="utf-8") for path in sorted(place.glob("failed-*"))]
            why = failed[0] if failed else next(iter(stopped.values()), "ended without an error")
            raise ConnectError(f"nothing was measured: a rank {why}; look at its output", ranks=tuple(stopped))
        found: Measurement = pickle.loads((place / "found").read_bytes())  # noqa: S301  - written by our own rank
    return found


def _reading(place: Path, progress: Progress) -> Callable[[], None]:
    """Reports how far the first rank is, as it writes it down."""

    def update() -> None:
        lines = (place / "far").read_text(encoding="utf-8").split() if (place / "far").exists() else []
        if len(lines) >= 2:
            progress(int(lines[-2]), int(lines[-1]))

    return update


def _rank(run: Run, job: Launch, place: Path) -> None:
    """What each started rank does."""

    def far(done: int, total: int) -> None:
        with (place / "far").open("a", encoding="utf-8") as file:
            file.write(f"{done} {total}\n")

    try:
        found = run(job, far if job.rank == 0 else None)
    except (RankmeshError, RuntimeError) as error:
        (place / f"failed-{job.rank}").write_text(f"{job.rank} failed: {first_line(error)}", encoding="utf-8")
        raise SystemExit(1) from None
    if job.rank == 0:
        (place / "found").write_bytes(pickle.dumps(found))
