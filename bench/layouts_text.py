"""The section of docs/benchmarks.md on random layouts: what ``bench/layouts.json`` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["layouts_section"]


def layouts_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    rows = found["rows"]
    measured = [row for row in rows if "measured" in row]
    near = {share: sum(abs(_ratio(row) - 1) <= share / 100 for row in measured) for share in (10, 15)}
    loads = [load for row in measured for load in row["load"]]
    shape = ", ".join(f"{name} {size}" for name, size in found["shape"].items())
    yield from ("", "## Communication of random layouts", "")
    yield (
        f"The communication of a step of `examples/train_gpt` under {len(rows)} random layouts, on an emulated cluster "
        f"of {sum(map(len, found['racks']))} hosts with {found['ranks']} ranks each in {len(found['racks'])} racks, "
        f"links of {found['link']} and trunks of {found['trunk']} Mbit/s. All predictions were written to the file "
        f"before the first measurement. Of {len(measured)} measured, {near[10]} are within 10 % and {near[15]} within "
        f"15 %. Measured: each rank's calls of a step made again without its computation, the quickest of two or "
        f"three. Load {min(loads):.1f} to {max(loads):.1f} at the beginning and end of each. Model: {shape}. "
        "`python -m bench.layouts`"
    )
    yield from ("", "| sizes | order, innermost first | microbatches | predicted | measured | ratio |")
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in rows:
        sizes = ",".join(f"{name}={row[name]}" for name in ("tp", "cp", "dp", "pp", "ep") if row[name] > 1)
        seconds = f"{row['measured']:.2f} s | {_ratio(row):.2f}" if "measured" in row else "not measured | "
        yield f"| {sizes} | {' '.join(row['order'])} | {row['microbatches']} | {row['predicted']:.2f} s | {seconds} |"


def _ratio(row: Mapping[str, float]) -> float:
    return row["predicted"] / row["measured"]
