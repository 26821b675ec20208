"""Rounds: ours, theirs, ours, theirs, until each side has its number; a side that fails once is not run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.processes import Outcome
from bench.results import Both, Comparison, Sample, compare

__all__ = ["Run", "alternate"]

Run = Callable[[], Outcome]


def alternate(
    section: str,
    what: str,
    ranks: int,
    peer: str,
    runs: Mapping[str, Run],
    rounds: int,
    *,
    reduce: Callable[[Outcome], Sample],
    absent: str | None = None,
) -> Comparison:
    """Run both sides of a comparison in turn; ``runs`` has ``ours`` and, where there is a peer, ``theirs``."""
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
    both: Both = compare(samples["ours"], samples["theirs"])
    return Comparison(section, what, ranks, peer, both, failures)
