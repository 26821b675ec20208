"""The section of docs/benchmarks.md on random layouts: what ``bench/layouts.json`` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["another_draw", "layouts_section"]


def layouts_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    rows = found["rows"]
    loads = [load for row in _measured(rows) for load in row["load"]]
    shape = ", ".join(f"{name} {size}" for name, size in found["shape"].items())
    yield from ("", "## Communication of random layouts", "")
    yield (
        f"The communication of a step of `examples/train_gpt` under {len(rows)} random layouts, on an emulated cluster "
        f"of {sum(map(len, found['racks']))} hosts with {found['ranks']} ranks each in {len(found['racks'])} racks, "
        f"links of {found['link']} and trunks of {found['trunk']} Mbit/s, TCP with cubic. Latencies and bandwidths are "
        "those that `measure` finds there. All predictions were written to the file before the first measured step. "
        f"{_near(rows)} Measured: each rank's calls of a step made again without its computation, the "
        f"quickest of two or three. Load {min(loads):.1f} to {max(loads):.1f} at the beginning and end of each. Model: "
        f"{shape}. Least certain are pipelines of four stages with little else to send: how far their replicas drift "
        "apart on a shared link is not predicted. How often ranks of gloo take turns (docs/decisions.md) was chosen "
        "with an earlier measurement of these layouts in view, so this table is no blind test; the draw below it is. "
        "`python -m bench.layouts`"
    )
    yield from ("", "| sizes | order, innermost first | microbatches | predicted | measured | ratio |")
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in rows:
        sizes = ",".join(f"{name}={row[name]}" for name in ("tp", "cp", "dp", "pp", "ep") if row[name] > 1)
        seconds = f"{row['measured']:.2f} s | {_ratio(row):.2f}" if "measured" in row else "not measured | "
        yield f"| {sizes} | {' '.join(row['order'])} | {row['microbatches']} | {row['predicted']:.2f} s | {seconds} |"


def another_draw(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines on other layouts, drawn after the model was made, which tell whether it fits these alone."""
    rows = found["rows"]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in sorted(map(_ratio, _measured(rows))))
    yield ""
    yield (
        f"Another draw of {len(rows)} layouts (`--seed {found['seed']} --count {len(rows)}`), predicted and measured "
        f"in the same way after the model was settled. {_near(rows)} Ratios: {ratios}."
    )


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if "measured" in row]


def _near(rows: Sequence[Mapping[str, Any]]) -> str:
    off = [abs(_ratio(row) - 1) for row in _measured(rows)]
    ten, fifteen = (sum(each <= share for each in off) for share in (0.1, 0.15))
    return f"Of {len(off)} measured, {ten} are within 10 % and {fifteen} within 15 %."


def _ratio(row: Mapping[str, float]) -> float:
    return row["predicted"] / row["measured"]
