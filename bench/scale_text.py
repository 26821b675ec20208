"""The section of docs/benchmarks.md on the store of a large job: what ``bench/scale.json`` has."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["scale_section"]

_NAMES = {"ours": "rankmesh", "theirs": "megatron-core, default"}


def scale_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    machine = found["machine"]
    yield from ("", "## The store of a large job", "")
    yield (
        "Real TCPStore clients, as many as ranks, each a thread that does the store operations of its rank, against "
        "one server; tp 8, cp 2, pp 8, ep 8, etp 1, NCCL groups and gloo twins of the data-parallel ones. Rankmesh: "
        "the meeting of `connect` itself, the identifiers of its NCCL communicators, and what gloo asks at their first "
        "all-reduce. Megatron-Core: the same of each of its groups in order, where gloo reads the address of every "
        "member. The time is from the moment when all clients are connected until the last one is through; who is not "
        "through at the limit is stopped, and the time is what all its operations would take at the rate until then. "
        f"{machine['cores']} cores for server and clients, load {machine['load'][0]:.1f} after; torch "
        f"{found['torch']}, medians of up to {found['rounds']} rounds. `python -m bench.scale`"
    )
    yield from ("", "| clients | by | seconds | operations | of the busiest rank |", "| --- | --- | --- | --- | --- |")
    for clients, sides in found["clients"].items():
        for side, runs in sides.items():
            last = runs[-1]
            yield (
                f"| {int(clients):,} | {_NAMES[side]} | {_seconds(runs)} | {last['operations']:,} of "
                f"{last['expected']:,} | {last['busiest']:,} |"
            )
    yield ""
    yield from _growth(found["clients"])
    yield ""
    yield "Made by `python -m bench.scale` from `bench/scale.json`; do not edit."


def _seconds(runs: Sequence[Mapping[str, Any]]) -> str:
    through = [run["seconds"] for run in runs if run["seconds"] is not None]
    if len(through) < len(runs):
        last = runs[-1]
        return f"not through after {last['limit']:.0f}; about {_projected(last):,.0f} at that rate"
    return f"{statistics.median(through):.2f} ({min(through):.2f} – {max(through):.2f})"


def _projected(run: Mapping[str, Any]) -> float:
    return float(run["limit"] * run["expected"] / max(run["operations"], 1))


def _growth(found: Mapping[str, Any]) -> Iterator[str]:
    sizes = sorted(found, key=int)
    if len(sizes) < 2:
        return
    few, many = sizes[0], sizes[-1]
    for side, name in _NAMES.items():
        times = [
            run["seconds"] if run["seconds"] is not None else _projected(run)
            for run in (found[few][side][-1], found[many][side][-1])
        ]
        yield (
            f"From {int(few):,} to {int(many):,} clients, {int(many) / int(few):g} times as many, {name} takes "
            f"{times[1] / times[0]:.1f} times as long."
        )
