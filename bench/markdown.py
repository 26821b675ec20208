"""The results as a document: built from the JSON alone, so that a document and its figures cannot differ."""

from __future__ import annotations

from collections.abc import Iterator

from bench.cluster_text import cluster_section
from bench.results import Results
from bench.tables import Table, tables

__all__ = ["markdown"]


def markdown(results: Results) -> str:
    """A Markdown document with one table for each section."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
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
    for section, reason in results.skipped.items():
        yield ""
        yield f"Not measured: {section} ({reason})."
    yield ""
    yield "Store operations are keys set, asked for, waited for or added to; a TCP store may carry several in one"
    yield "message. A store operation of rankmesh is either its agreement (a fixed number a rank) or a communicator's."
    yield ""
    yield "Made by `make bench` from `bench/results.json`; do not edit."
    yield from cluster_section()


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
