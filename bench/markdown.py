"""The results as a document: built from the JSON alone, so that a document and its figures cannot differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.cluster_text import cluster_section
from bench.gloo_text import gloo_section
from bench.gpu_text import gpu_section
from bench.results import Results
from bench.scale_text import scale_section
from bench.tables import Table, tables

__all__ = ["METHODS", "markdown", "recorded_transfers"]


# What has a program of its own, and a file of this name.
_SECTIONS = {"cluster": cluster_section, "gpu": gpu_section, "gloo": gloo_section, "scale": scale_section}


def markdown(results: Results, transfers: Mapping[str, Any] | None = None) -> str:
    """A Markdown document with one table for each section; ``transfers`` are the figures of `bench.transfers`."""
    return "\n".join(_lines(results, transfers)) + "\n"


def recorded_transfers() -> Mapping[str, Any] | None:
    """The figures of `bench.transfers`, where there are any."""
    return _recorded("transfers")


def _recorded(name: str) -> Mapping[str, Any] | None:
    """The figures of this name beside this file, where there are any."""
    path = Path(__file__).with_name(f"{name}.json")
    if not path.is_file():
        return None
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _lines(results: Results, transfers: Mapping[str, Any] | None) -> Iterator[str]:
    machine, versions = results.machine, results.versions
    named = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "rankmesh")
    yield "# Benchmarks"
    yield ""
    yield f"rankmesh {versions.get('rankmesh', '')} and its peers in the same run, in turn: ours, theirs, ours, theirs;"
    yield f"medians of {results.settings['rounds']} rounds, with the lowest and the highest. Every run is made of"
    yield "fresh processes, and both sides make the same kinds of group from the same sizes. With more live ranks than"
    yield "cores, the times of live groups are mostly processor time: they say little of a job with a core a rank."
    yield ""
    yield f"Machine: {machine['cores']} cores, {machine['system']}, Python {machine['python']}; {named}; gloo."
    yield f"Load before and after: {machine['load']['before']}, {machine['load']['after']}."
    for table in tables(results):
        yield from _table(table)
    yield ""
    yield "Store operations are keys set, asked for, waited for or added to; a TCP store may carry several in one"
    yield "message. A store operation of rankmesh is either its agreement (a fixed number a rank) or a communicator's."
    yield ""
    if transfers is not None:
        yield from _transfers(transfers)
    yield ""
    yield "Made by `make bench` from `bench/results.json` and `bench/transfers.json`; do not edit."
    for name, section in _SECTIONS.items():
        found = _recorded(name)
        yield from section(found) if found else ()


def _transfers(document: Mapping[str, Any]) -> Iterator[str]:
    settings, machine, versions = document["settings"], document["machine"], document["versions"]
    yield ""
    yield "## Transfers"
    yield ""
    ranks, layers, width = (settings[name] for name in ("ranks", "layers", "hidden"))
    yield f"One model moved from one layout to another by {ranks} gloo ranks of one machine, each method in turn in one"
    yield f"world; what is planned or connected once is not counted. {layers} layers of width {width},"
    yield "float32. On the wire: what the loopback of a network namespace of their own carried, acknowledgements and"
    yield "the store's messages included. Memory: the most that any rank's resident size grew by while it moved, its"
    yield "tensors being there and the allocator's leftovers given back before (`bench/memory.py`); rankmesh's budget"
    yield f"is {settings['budget'] >> 20} MiB. torch's checkpoint goes through files in memory. Megatron-Core's planner"
    yield "is that of its head; its copies stage each piece as for a GPU, but in memory that is not pinned."
    yield f"{machine['cores']} cores; torch {versions['torch']}, megatron-core {versions['megatron-core']}."
    yield "`make bench-transfers`"
    for case in document["cases"].values():
        yield ""
        whole, planned, least = (_mib(case[name]) for name in ("whole", "bytes", "lower_bound"))
        yield f"{case['title']}: {whole} MiB of weights, {planned} MiB planned to travel; {least} MiB must"
        yield "({} rounds; load {:.1f} before, {:.1f} after).".format(case["rounds"], *case["load"])
        yield ""
        yield _row(("by", "seconds", "times slower", "MiB on the wire", "MiB of memory"))
        yield _row(["---"] * 5)
        fastest = case["methods"]["rankmesh"]["seconds"][0]
        for name, figures in case["methods"].items():
            seconds = figures["seconds"]
            yield _row(
                (
                    METHODS[name],
                    f"{seconds[0]:.2f} ({seconds[1]:.2f} – {seconds[2]:.2f})",
                    f"{seconds[0] / fastest:.1f}",
                    _mib(figures["wire"][0]),
                    _mib(figures["memory"][0]),
                )
            )


METHODS = {
    "rankmesh": "rankmesh",
    "megatron": "Megatron-Core's resharding",
    "gather": "gather and broadcast",
    "full_tensor": "DTensor full_tensor, broadcast",
    "redistribute": "DTensor redistribute",
    "checkpoint": "torch's distributed checkpoint",
}


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.1f}"


def _table(table: Table) -> Iterator[str]:
    yield ""
    yield f"## {table.title}"
    yield ""
    yield table.says
    yield ""
    yield _row(table.head)
    yield _row(["---"] * len(table.head))
    yield from map(_row, table.rows)


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
