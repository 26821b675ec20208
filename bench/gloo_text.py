"""The section of docs/benchmarks.md on what gloo itself costs, from ``bench/gloo.json`` alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "gloo_section"]

RESULTS = Path(__file__).with_name("gloo.json")


def gloo_section(path: Path = RESULTS) -> Iterator[str]:
    """The lines of the section; none where nothing was measured."""
    if path.exists():
        yield from _lines(json.loads(path.read_text(encoding="utf-8")))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## What a gloo group costs by itself", "")
    yield (
        "Processor time of one member, in a process whose threads are the members: no rankmesh, no store on a network. "
        "At once: on one device for all groups, as rankmesh makes groups of up to 16 ranks. Late: a device of its own. "
        "Medians, with the lowest and the highest. A device that nobody uses takes "
        f"{found['idle']:.1f} ms a second. torch {found['torch']}, load {found['load']:.1f}. `python -m bench.gloo`"
    )
    head = "| members | made at once | first used | made late | first used |"
    yield from ("", head, "| --- | --- | --- | --- | --- |")
    for size, ways in found["sizes"].items():
        cells = [_cell([row[part] for row in ways[way]]) for way in ("at once", "late") for part in (0, 1)]
        yield f"| {size} | {' | '.join(cells)} |"


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ms ({min(values):.2f} – {max(values):.2f})"
