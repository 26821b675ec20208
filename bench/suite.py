"""The suite: every section in order, and what it ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from bench.contests import CONTESTS
from bench.dry import dry
from bench.getters import getters
from bench.live import live
from bench.planning import planning
from bench.results import Comparison, Results

__all__ = ["QUICK", "SECTIONS", "Settings", "measure"]

SECTIONS = ("live", "dry", "planning", "getters")

_PACKAGES = ("rankmesh", "torch", "megatron-core", "numpy")


@dataclass(frozen=True)
class Settings:
    """What to measure: live worlds, large worlds, rounds, and the seconds that one run may take."""

    ranks: tuple[int, ...] = (8, 16, 32, 64)
    worlds: tuple[int, ...] = (1024, 4096, 32768, 131072)
    rounds: int = 5
    sections: tuple[str, ...] = SECTIONS
    limit: float = 120.0


QUICK = Settings(ranks=(8,), worlds=(64,), rounds=1, limit=30.0)


def measure(settings: Settings, report: Callable[[Comparison], None]) -> Results:
    """Run the suite; ``tell`` hears of each comparison as it is done."""
    # Before the first fork: children find both imported, and no import is in a time.
    import torch.distributed  # noqa: F401

    import rankmesh.runtime  # noqa: F401

    load = _load()
    done = []
    for comparison in _comparisons(settings):
        report(comparison)
        done.append(comparison)
    machine = {
        "system": platform.system(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": {"before": load, "after": _load()},
    }
    shown = {
        "ranks": list(settings.ranks),
        "worlds": list(settings.worlds),
        "rounds": settings.rounds,
        "limit": settings.limit,
    }
    return Results(machine, _versions(), shown, tuple(done))


def _comparisons(settings: Settings) -> Iterator[Comparison]:
    wanted, rounds, limit = settings.sections, settings.rounds, settings.limit
    if "live" in wanted:
        for ranks in settings.ranks:
            yield from (live(contest, ranks, rounds, limit) for contest in CONTESTS)
    if "dry" in wanted:
        for world in settings.worlds:
            yield from (
                dry(contest, world, rounds, limit) for contest in CONTESTS if "counterparts" not in contest.what
            )
    if "planning" in wanted:
        for world in settings.worlds:
            yield from planning(world, rounds, limit)
    if "getters" in wanted:
        yield from getters(rounds, limit)


def _load() -> float | None:
    """The mean number of waiting processes in the last minute, where the system says."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _versions() -> dict[str, str]:
    return {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
