"""Results: what was measured on two sides, as medians with their spread.

>>> both = compare([{"used": 2.0}, {"used": 1.0}, {"used": 4.0}], [{"used": 4.0}, {"used": 5.0}, {"used": 6.0}])
>>> both.ours["used"], both.ratios["used"]
(Stat(median=2.0, low=1.0, high=4.0), Stat(median=2.5, low=1.5, high=5.0))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.processes import Outcome

__all__ = ["Both", "Comparison", "Sample", "Stat", "alternate", "compare", "spread"]

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
    """What was made or asked, on how many ranks, against whom; ``failures`` tell why a side has no figures."""

    section: str
    what: str
    ranks: int
    peer: str
    both: Both
    failures: dict[str, str] = field(default_factory=dict)


def compare(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Both:
    """Return the medians of the rounds of both sides, and the ratios; either side may be empty."""
    left, right = _stats(ours), _stats(theirs)
    ratios = {}
    for name in left.keys() & right.keys():
        if left[name].low > 0:
            rounds = [other[name] / local[name] for local, other in zip(ours, theirs, strict=False)]
            ratios[name] = Stat(right[name].median / left[name].median, min(rounds), max(rounds))
    return Both(left, right, dict(sorted(ratios.items())))


def _stats(samples: Sequence[Sample]) -> dict[str, Stat]:
    names = samples[0] if samples else ()
    return {name: Stat(*spread([sample[name] for sample in samples])) for name in names}


def spread(values: Sequence[float]) -> list[float]:
    """Return the median, the lowest and the highest."""
    return [median(values), min(values), max(values)]


def alternate(
    section: str,
    what: str,
    ranks: int,
    peer: str,
    runs: Mapping[str, Callable[[], Outcome]],
    rounds: int,
    *,
    reduce: Callable[[Outcome], Sample],
    absent: str | None = None,
) -> Comparison:
    """Run both sides in turn, ``ours`` and, where there is a peer, ``theirs``; a side that fails is not run again."""
    samples: dict[str, list[Sample]] = {"ours": [], "theirs": []}
    failures = {} if absent is None else {"theirs": absent}
    for _ in range(rounds):
        for side, run in runs.items():
            if side in failures:
                continue
            outcome = run()
            if outcome.failure is None:
                samples[side].append(reduce(outcome))
            else:
                failures[side] = outcome.failure
    return Comparison(section, what, ranks, peer, compare(samples["ours"], samples["theirs"]), failures)
