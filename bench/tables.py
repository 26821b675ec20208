"""Tables of results: heads and rows of text, the same for a terminal and for a document.

>>> seconds(0.00123), seconds(0.51), seconds(12.3), seconds(2.5e-7)
('1.23 ms', '510 ms', '12.3 s', '250 ns')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.results import Comparison, Results, Stat

__all__ = ["Table", "seconds", "tables"]

_Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True)
class Table:
    """A heading, what it means, the names of the columns, and the rows."""

    title: str
    about: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_ABOUT = {
    "live": (
        "Live groups",
        (
            "Gloo ranks with tp 2, cp 2, pp 2, ep 2 and the rest data parallel. Time on the slowest rank from an "
            "initialised world until every group exists (built), and until each has done one all-reduce (used). "
            "File descriptors, threads and store operations are those of the rank with the most."
        ),
    ),
    "dry": (
        "Groups of one rank of a large world",
        'One rank on the backend "fake", tp 8, cp 2, pp 8, ep 8, etp 1: from the sizes to its process groups.',
    ),
    "planning": (
        "Planning",
        "The same layouts without process groups and without torch. `RankGenerator` is Megatron-Core's.",
    ),
    "getters": (
        "Getters",
        (
            "Time to read one attribute or call one function of an existing group, in a world of 64 ranks. Group kept: "
            'the program holds `groups["tp"]` in a variable.'
        ),
    ),
}


def tables(results: Results) -> list[Table]:
    """One table for each section that has something to say."""
    makers: dict[str, Callable[[list[Comparison]], _Cells]] = {
        "live": _live,
        "dry": lambda found: _timed(found, "built"),
        "planning": lambda found: _timed(found, "planned"),
        "getters": lambda found: _timed(found, "call"),
    }
    made = []
    for section, maker in makers.items():
        found = results.of(section)
        if found:
            head, rows = maker(found)
            made.append(Table(*_ABOUT[section], head, tuple(rows)))
    return made


def _live(found: list[Comparison]) -> _Cells:
    head = ("ranks", "groups", "by", "built", "used", "times faster", "descriptors", "threads", "store operations")
    rows = []
    for item in found:
        for side, stats in (("ours", item.both.ours), ("theirs", item.both.theirs)):
            by = "rankmesh" if side == "ours" else item.peer
            if side in item.failures:
                rows.append((str(item.ranks), item.what, by, item.failures[side], *["-"] * 5))
                continue
            counts = [_count(stats.get(name)) for name in ("descriptors", "threads", "store_operations")]
            faster = _ratio(item.both.ratios.get("used")) if side == "ours" else ""
            rows.append((str(item.ranks), item.what, by, _time(stats["built"]), _time(stats["used"]), faster, *counts))
    return head, rows


def _timed(found: list[Comparison], name: str) -> _Cells:
    head = ("ranks", "what", "rankmesh", "peer", "by", "times faster")
    return head, [
        (
            f"{item.ranks:,}",
            item.what,
            _side(item, "ours", name),
            _side(item, "theirs", name),
            item.peer,
            _ratio(item.both.ratios.get(name)),
        )
        for item in found
    ]


def _side(item: Comparison, side: str, name: str) -> str:
    stats = item.both.ours if side == "ours" else item.both.theirs
    return item.failures.get(side) or _time(stats.get(name))


def _time(stat: Stat | None) -> str:
    if stat is None:
        return "-"
    if stat.low == stat.high:
        return seconds(stat.median)
    return f"{seconds(stat.median)} ({seconds(stat.low)} – {seconds(stat.high)})"


def _ratio(stat: Stat | None) -> str:
    return "-" if stat is None else f"{_short(stat.median)} ({_short(stat.low)} – {_short(stat.high)})"


def _short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _count(stat: Stat | None) -> str:
    return "-" if stat is None else f"{stat.median:g}"


def seconds(value: float) -> str:
    """Seconds in the unit that suits them, three digits."""
    for unit, name in _UNITS:
        if value >= unit or unit == _UNITS[-1][0]:
            scaled = value / unit
            return f"{scaled:.0f} {name}" if scaled >= 100 else f"{scaled:.3g} {name}"
    return "0 s"
