"""Results: what was measured, as medians with their spread, and as JSON.

>>> both = compare([{"used": 2.0}, {"used": 1.0}, {"used": 4.0}], [{"used": 4.0}, {"used": 5.0}, {"used": 6.0}])
>>> both.ours["used"], both.ratios["used"]
(Stat(median=2.0, low=1.0, high=4.0), Stat(median=2.5, low=1.5, high=5.0))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rankmesh.errors import PlanError

__all__ = ["Both", "Comparison", "Results", "Sample", "Stat", "compare", "results_from"]

Sample = Mapping[str, float]


@dataclass(frozen=True)
class Stat:
    """The median of the rounds, the lowest and the highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Both:
    """Two sides of one measurement by the name of what was measured; ``ratios`` are theirs divided by ours.

    The median of a ratio is the ratio of the medians; its spread is over the rounds, ours and theirs of one round.
    """

    ours: dict[str, Stat] = field(default_factory=dict)
    theirs: dict[str, Stat] = field(default_factory=dict)
    ratios: dict[str, Stat] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What was made or asked, on how many ranks, against whom; ``failure`` says why a side has no figures."""

    section: str
    what: str
    ranks: int
    peer: str
    both: Both
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """One run of the suite: the machine, the versions, the settings, and every comparison."""

    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    comparisons: tuple[Comparison, ...]

    def of(self, section: str) -> list[Comparison]:
        """The comparisons of one section."""
        return [comparison for comparison in self.comparisons if comparison.section == section]

    def to_dict(self) -> dict[str, Any]:
        """The results as plain data."""
        return asdict(self)


def compare(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Both:
    """The medians of the rounds of both sides, and the ratios; either side may be empty."""
    left, right = _stats(ours), _stats(theirs)
    ratios = {}
    for name in left.keys() & right.keys():
        if left[name].low > 0:
            rounds = [other[name] / local[name] for local, other in zip(ours, theirs, strict=False)]
            ratios[name] = Stat(right[name].median / left[name].median, min(rounds), max(rounds))
    return Both(left, right, dict(sorted(ratios.items())))


def _stats(samples: Sequence[Sample]) -> dict[str, Stat]:
    names = samples[0] if samples else ()
    values = {name: [sample[name] for sample in samples] for name in names}
    return {name: Stat(median(found), min(found), max(found)) for name, found in values.items()}


def results_from(data: Mapping[str, Any]) -> Results:
    """The results that ``to_dict`` gave; ``PlanError`` for anything else."""
    try:
        comparisons = tuple(
            Comparison(**{**item, "both": _both(item["both"])})  # one keyword for each field
            for item in data["comparisons"]
        )
        return Results(**{**data, "comparisons": comparisons})
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"received results that lack a field or have one too many ({error}); "
            "they are what python -m bench --json wrote; run it again"
        ) from error


def _both(data: Mapping[str, Any]) -> Both:
    sides = {side: {name: Stat(**stat) for name, stat in stats.items()} for side, stats in data.items()}
    return Both(**sides)
