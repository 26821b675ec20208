"""The pages of figures: Jinja templates in ``bench/pages``, filled from the JSON files of this folder alone.

```
bench/pages/benchmarks.md ──┐
bench/*.json ── page() ─────┴─> docs/benchmarks.md
```

A template has the content of each JSON file under the file's name, and the filters below. torch requires Jinja.

>>> seconds(0.00123), seconds(0.51), seconds(12.3), seconds(2.5e-7)
('1.23 ms', '510 ms', '12.3 s', '250 ns')
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["PAGES", "load", "machine", "options", "page", "record", "seconds"]

HERE = Path(__file__).parent
PAGES = {"benchmarks": HERE.parent / "docs" / "benchmarks.md", "hangs": HERE.parent / "docs" / "benchmarks_hangs.md"}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))

Found = Mapping[str, Any]


def page(name: str, **given: Found) -> str:
    """Return the text of a page; ``given`` replaces what a JSON file has."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(  # noqa: S701  - Markdown, from figures of this repository
        loader=FileSystemLoader(HERE / "pages"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    pages.filters |= {each.__name__: each for each in _FILTERS}
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in HERE.glob("*.json")}
    return pages.get_template(f"{name}.md").render(found | given)


def record(path: Path, found: Found) -> None:
    """Write the figures of a program; if they are the recorded ones, write the pages that show them again."""
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if path.parent == HERE:
        for name, document in PAGES.items():
            document.write_text(page(name), encoding="utf-8")


# -- programs ----------------------------------------------------------------------------------------------------------


def options(name: str, about: str | None, rounds: int = 0) -> argparse.ArgumentParser:
    """Return the parser of ``python -m bench.NAME``: the file of the figures and, with a default, the rounds."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=(about or "").partition("\n")[0])
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="runs of each side; default %(default)s")
    parser.add_argument("--json", type=Path, default=HERE / f"{name}.json", help="the figures")
    return parser


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": version("torch")}


def load() -> float:
    """Return the load of the last minute."""
    return round(os.getloadavg()[0], 2)


# -- filters -----------------------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """Format seconds in the unit that suits them, three digits."""
    unit, name = next((unit for unit in _SECONDS if value >= unit[0]), _SECONDS[-1])
    return f"{ratio(value / unit)} {name}"


def size(count: float) -> str:
    """Format bytes in the unit that suits them."""
    unit, name = next(unit for unit in _BYTES if count >= unit[0])
    return f"{count / unit:.4g} {name}"


def fixed(value: float, digits: int = 0) -> str:
    """Format a number with this many digits after the point."""
    return f"{value:.{digits}f}"


def percent(value: float, digits: int = 0) -> str:
    """Format a share."""
    return f"{value:.{digits}%}"


def mib(count: float) -> str:
    """Format bytes as a number of MiB."""
    return fixed(count / 2**20, 1)


def ratio(value: float) -> str:
    """Format how many times faster one side is."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Iterable[float], digits: int = 0, scale: float = 1.0) -> str:
    """Format the median of some values, the lowest and the highest."""
    scaled = [scale * value for value in values]
    middle, low, high = (fixed(value, digits) for value in (median(scaled), min(scaled), max(scaled)))
    return f"{middle} ({low} – {high})"


def stat(found: Found, show: str = "seconds") -> str:
    """Format a median with the lowest and the highest, where they differ; ``show`` is the filter for each."""
    middle, low, high = ({"seconds": seconds, "ratio": ratio}[show](found[name]) for name in ("median", "low", "high"))
    return middle if found["low"] == found["high"] and show == "seconds" else f"{middle} ({low} – {high})"


def pairs(found: Found, between: str = " ", comma: str = ", ") -> str:
    """Format names with their values."""
    return comma.join(f"{name.replace('_', ' ')}{between}{value}" for name, value in found.items())


def sizes(found: Found) -> str:
    """Format the sizes above one of a row of layouts."""
    return pairs({name: found[name] for name in ("tp", "cp", "dp", "pp", "ep") if found[name] > 1}, "=", ",")


def ratios(rows: Iterable[Found], to: str) -> list[float]:
    """Return the ratios of what was predicted to what was published or measured, in ascending order."""
    return sorted(row["predicted"] / row[to] for row in rows)


def within(values: Iterable[float], low: float, high: float) -> int:
    """Count the values between two limits."""
    return sum(low <= value <= high for value in values)


def shares(rounds: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the median share of each phase in the rounds."""
    return {name: f"{median([one[name] / sum(one.values()) for one in rounds]):.0%}" for name in rounds[0]}


def totals(rounds: Iterable[Mapping[str, float]]) -> list[float]:
    """Return the sum of the phases of each round."""
    return [sum(phases.values()) for phases in rounds]


def over(values: Iterable[float], others: Iterable[float]) -> list[float]:
    """Divide each value by the other of the same round."""
    return [one / other for one, other in zip(values, others, strict=True)]


_FILTERS: tuple[Callable[..., Any], ...] = (
    seconds, size, fixed, percent, mib, ratio, spread, stat, pairs, sizes, ratios, within, shares, totals, over, median
)  # fmt: skip
