"""The section of docs/benchmarks.md on what gloo itself costs: what ``bench/gloo.json`` has."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["gloo_section"]


def gloo_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    rounds = len(found["contests"][0]["steps"])
    yield from ("", "## The share of gloo itself", "")
    yield (
        "Milliseconds of processor time of a rank, with all its threads, from the sizes until every group has been "
        f"used once; medians of {rounds} alternating rounds, with the lowest and the highest. Gloo alone: "
        "`ProcessGroupGloo` creates each group of the plan once, without agreement, names or registries, and each "
        "kind uses it once. At most: how many times faster than the peer a library can be that creates these groups "
        "one by one. Plan, connect, first use: processor time of the rank's main thread in rankmesh; gloo's part is in "
        f"connect and first use. {found['cores']} cores, torch {found['torch']}, load {found['load']:.1f} after. "
        "`python -m bench.gloo`"
    )
    head = ("ranks", "groups", "gloo alone", "rankmesh", "peer", "times faster", "at most", "plan, connect, first use")
    yield from ("", f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |")
    for row in found["contests"]:
        single, ours, theirs = (row["sides"][side] for side in ("gloo alone", "rankmesh", row["peer"]))
        steps = (f"{statistics.median(each[step] for each in row['steps']):.1f}" for step in row["steps"][0])
        yield (
            f"| {row['ranks']} | {row['what']} | {_cell(single)} | {_cell(ours)} | {row['peer']}: {_cell(theirs)} | "
            f"{_times(theirs, ours)} | {_times(theirs, single)} | {', '.join(steps)} |"
        )


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} – {max(values):.1f})"


def _times(theirs: Sequence[float], ours: Sequence[float]) -> str:
    return f"{statistics.median(theirs) / statistics.median(ours):.2f}"
