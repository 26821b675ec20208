"""Results: what was measured in turn, as medians with their spread.

>>> both = compare([{"used": 2.0}, {"used": 1.0}, {"used": 4.0}], [{"used": 4.0}, {"used": 5.0}, {"used": 6.0}])
>>> both.ours["used"], both.ratios["used"]
(Stat(median=2.0, low=1.0, high=4.0), Stat(median=2.5, low=1.5, high=5.0))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.memory import highest, resident
from bench.processes import Outcome

__all__ = ["Comparison", "Sample", "alternate", "by_round", "compare", "in_turn", "ratios", "spread", "taken", "turns"]

Sample = Mapping[str, float]


def turns(pairs: int, sides: Sequence[str] = ("without", "with")) -> Iterator[str]:
    """Yield both sides this many times, in the other order each time.

    >>> list(turns(2))
    ['without', 'with', 'with', 'without']
    """
    for pair in range(pairs):
        yield from sides[:: -1 if pair % 2 else 1]


# -- in one process ----------------------------------------------------------------------------------------------------


def taken(call: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a call, and the processor seconds of all threads of this process meanwhile."""
    processor, wall = time.process_time(), time.perf_counter()
    call()
    return {"processor": time.process_time() - processor, "wall": time.perf_counter() - wall}


def in_turn(
    methods: Mapping[str, Callable[[int], Sample]],
    rounds: int,
    *,
    before: Callable[[str, int], object] = lambda _name, _number: None,
    after: Callable[[str, int], object] = lambda _name, _number: None,
    memory: bool = False,
) -> dict[str, list[Sample]]:
    """Run each method once a round on this rank, in turn with the other ranks; a first round does not count.

    A method takes the number of the round, and returns what it took; ``before`` and ``after`` take its name, too.
    With ``memory`` its sample also has how much the process grew at most, as in `bench.memory`.
    """
    import torch.distributed as dist

    found: dict[str, list[Sample]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for name, method in methods.items():
            before(name, number)
            start = resident() if memory else 0
            dist.barrier()
            sample = dict(method(number)) | ({"memory": highest() - start} if memory else {})
            dist.barrier()
            after(name, number)
            found[name] += [sample] * (number > 0)
    return found


def by_round(
    reports: Sequence[Mapping[str, Any]], name: str, what: str, reduce: Callable[[Iterable[float]], float] = max
) -> list[float]:
    """Return one figure of a method over the ranks, for each round: the highest, or the sum."""
    rounds = zip(*(report["found"][name] for report in reports), strict=True)
    return [reduce(sample[what] for sample in samples) for samples in rounds]


def spread(values: Sequence[float]) -> list[float]:
    """Return the median, the lowest and the highest."""
    return [median(values), min(values), max(values)]


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of two sides in one round: the median, the lowest and the highest."""
    return spread([one / other for one, other in zip(values, others, strict=True)])


# -- two sides, each run in new processes ------------------------------------------------------------------------------


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
    found = {}
    for name in sorted(left.keys() & right.keys()):
        if left[name].low > 0:
            rounds = [other[name] / local[name] for local, other in zip(ours, theirs, strict=False)]
            found[name] = Stat(right[name].median / left[name].median, min(rounds), max(rounds))
    return Both(left, right, found)


def _stats(samples: Sequence[Sample]) -> dict[str, Stat]:
    names = samples[0] if samples else ()
    return {name: Stat(*spread([sample[name] for sample in samples])) for name in names}


def alternate(
    section: str,
    what: str,
    ranks: int,
    peer: str,
    runs: Mapping[str, Callable[[], Outcome]],
    rounds: int,
    absent: str | None = None,
) -> Comparison:
    """Run both sides in turn, ``ours`` and, where there is a peer, ``theirs``; a side that fails is not run again.

    Each figure is the highest of the ranks.
    """
    samples: dict[str, list[Sample]] = {"ours": [], "theirs": []}
    failures = {} if absent is None else {"theirs": absent}
    for _ in range(rounds):
        for side, run in runs.items():
            if side in failures:
                continue
            outcome = run()
            if outcome.failure is None:
                names = outcome.reports[0]
                samples[side].append({name: max(report[name] for report in outcome.reports) for name in names})
            else:
                failures[side] = outcome.failure
    return Comparison(section, what, ranks, peer, compare(samples["ours"], samples["theirs"]), failures)
