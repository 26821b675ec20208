"""The section of docs/benchmarks.md on comparisons of layouts: what ``bench/compare.json`` has."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["compare_section"]


def compare_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    runs = found["runs"]
    yield from ("", "## Comparison of layouts", "")
    yield (
        f"`sim.compare` of two steps of the example with two layers, under {len(found['layouts'])} layouts of up to 16 "
        f"ranks and on one process, {runs[0]['values']} values: {', '.join(found['layouts'])}. Medians of {len(runs)} "
        "rounds, with the lowest and the highest; each round is a process of its own, without its imports. Memory is "
        f"the largest resident size of the process; it was {_mib(runs, 'before')} before. {found['cores']} cores, "
        f"torch {found['torch']}; load {found['load'][0]} before, {found['load'][1]} after: where others use the "
        "cores, only the processor time is that of the comparison. `python -m bench.compare`"
    )
    yield from ("", "| result | seconds | processor seconds | memory |", "| --- | ---: | ---: | ---: |")
    result = "same" if all(run["same"] for run in runs) else "differs"
    yield f"| {result} | {_seconds(runs, 'seconds')} | {_seconds(runs, 'processor')} | {_mib(runs, 'resident')} |"


def _seconds(runs: Sequence[Mapping[str, float]], name: str) -> str:
    every = [run[name] for run in runs]
    return f"{statistics.median(every):.1f} ({min(every):.1f} – {max(every):.1f})"


def _mib(runs: Sequence[Mapping[str, float]], name: str) -> str:
    return f"{statistics.median(run[name] for run in runs) / 2**20:,.0f} MiB"
