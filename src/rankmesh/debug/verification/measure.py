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
    if is_single_process(launch):
        return _here(plan, chosen, named, backend, timeout, progress)
    return _in_world(plan, launch, chosen, named, backend, timeout, progress if launch.rank == 0 else None)


def _in_world(
    plan: Plan,
    launch: Launch,
    sizes: tuple[int, ...],
    kinds: tuple[str, ...] | None,
    backend: str | None,
    timeout: float,
    progress: Progress | None,
) -> Measurement:
    with enter(launch, backend, timedelta(seconds=timeout)), connect(plan, timeout=timeout) as groups:
        return groups.measure(sizes, kinds=kinds, progress=progress, timeout=timeout)


def _here(
    plan: Plan,
    sizes: tuple[int, ...],
    kinds: tuple[str, ...] | None,
    backend: str | None,
    timeout: float,
    progress: Progress | None,
) -> Measurement:
    size = check_size(plan)
    with tempfile.TemporaryDirectory(prefix="rankmesh-measure-") as folder:
        place = Path(folder)
        ranks = Ranks(place, size, None if progress is None else _reading(place, progress))
        stopped = ranks.run(lambda rank: _rank(plan, begin(place, rank, size), place, sizes, kinds, backend, timeout))
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


def _rank(
    plan: Plan,
    job: Launch,
    place: Path,
    sizes: tuple[int, ...],
    kinds: tuple[str, ...] | None,
    backend: str | None,
    timeout: float,
) -> None:
    """What each started rank does."""

    def far(done: int, total: int) -> None:
        with (place / "far").open("a", encoding="utf-8") as file:
            file.write(f"{done} {total}\n")

    try:
        found = _in_world(plan, job, sizes, kinds, backend, timeout, far if job.rank == 0 else None)
    except (RankmeshError, RuntimeError) as error:
        (place / f"failed-{job.rank}").write_text(f"{job.rank} failed: {first_line(error)}", encoding="utf-8")
        raise SystemExit(1) from None
    if job.rank == 0:
        (place / "found").write_bytes(pickle.dumps(found))
