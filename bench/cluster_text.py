"""The section of docs/benchmarks.md on placement: what ``bench/cluster.json`` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["cluster_section"]


def cluster_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    yield from ("", "## Placement on emulated clusters", "")
    yield (
        f"Four hosts of two gloo ranks ({sizes}) as network namespaces on two shared cores, links of {found['link']} "
        f"Mbit/s; flat, and in racks of two with a trunk of {found['trunk']} Mbit/s between them. Hosts are node1, "
        "node2, node10, node11: torchrun orders them as strings. The cluster is measured (`rankmesh measure`) and "
        "calibrated, each order of the axes is predicted from that, then run, in "
        f"{found['flat']['rounds']} and {found['racks']['rounds']} rounds that take turns: the least of them, as other "
        "work on the machine only makes a step longer."
    )
    yield from ("", "| cluster | placement | predicted | measured |", "| --- | --- | --- | --- |")
    for name in ("flat", "racks"):
        measured = found[name]["measured"]
        for placement in sorted(measured, key=measured.__getitem__):
            predicted = found[name]["predicted"][placement]
            yield f"| {name} | {placement} | {predicted * 1e3:.0f} ms | {measured[placement] * 1e3:.0f} ms |"
    yield ""
    yield (
        f"Kendall's rank correlation of prediction and measurement, values within {found['tie']:.0%} of each other "
        f"being tied, two names of one rank map counting once: {found['flat']['kendall']:.2f} flat, "
        f"{found['racks']['kendall']:.2f} in racks, "
        f"{found['kendall']:.2f} over all. What `rm.place` chose is "
        + " and ".join(f"{max(0.0, found[name]['placed']['over_best']):.1%} ({name})" for name in ("flat", "racks"))
        + " above the best that was measured; in racks torchrun's order takes "
        f"{found['racks']['torchrun_over_placed']:.2f} times as long."
    )
    yield ""
    halved = ", ".join(f"{each['slowed']}: {' '.join(each['named']) or 'none'}" for each in found["slow"])
    yield f"One host's link at half its rate, and the slow hosts that `measure` names: {halved}."
    yield ""
    yield from _training(found.get("train", {}))
    yield from _transfers(found.get("transfers", {}))
    yield "Made by `make bench-cluster` from `bench/cluster.json`; do not edit."


def _training(rows: Mapping[str, Any]) -> Iterator[str]:
    if not rows:
        return
    same = len({tuple(round(loss, 4) for loss in row["losses"]) for row in rows.values()}) == 1
    each = ", ".join(
        f"{row['seconds'] * 1e3:.0f} ms under {name} (its communication predicted: {row['predicted'] * 1e3:.0f} ms)"
        for name, row in rows.items()
    )
    losses = "the same losses to 1e-4" if same else "losses that differ"
    steps = len(next(iter(rows.values()))["losses"]) - 1
    told = f"A step of `examples/train_gpt` in racks, placed by its own traffic, the fastest of {steps}"
    yield f"{told}: {each}; {losses}."
    yield ""


def _transfers(rows: Mapping[str, Any]) -> Iterator[str]:
    if not rows:
        return
    mib = 2.0**20
    yield (
        "Transfers between layouts on the same racks, a replica in each (replicas), a stage in each (stages), or into "
        "a second rack (grown): MiB that the plan sends over each level, the least that any plan without relays can "
        "(what no nearer rank holds), and what the counters of the links say. Links of hosts carry what leaves a "
        "host, the trunk what leaves a rack."
    )
    yield from (
        "",
        "| transfer | over | planned | at least | counted |",
        "| --- " * 5 + "|",
    )
    for case, row in rows.items():
        planned, least = row["levels"], row["least"]
        for link, levels in (("trunk", ("spine",)), ("hosts", ("leaf", "spine"))):
            both = (sum(of[level] for level in levels) / mib for of in (planned, least))
            counted = row["carried"][link] / mib
            yield f"| {case} | {link} | " + " | ".join(f"{value:.1f}" for value in (*both, counted)) + " |"
    yield ""
