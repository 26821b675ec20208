"""The speed of a running job on one screen of text: its step, what is slow, the slowest ranks, hosts by devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankmesh.debug.slow import SlowReport, duration

__all__ = ["lines"]

_BARS, _SHADES, _SHARES = "▁▂▃▄▅▆▇", "·░▒▓█", (0.02, 0.05, 0.1, 0.3)
_STEPS, _FINDINGS, _RANKS, _DEVICES = 60, 3, 5, 16
_COLUMNS = "{:>6}  {:14}{:>12}{:>11}{:>21}{:>11}"


def lines(report: SlowReport, now: float, width: int = 100) -> Iterator[str]:
    """Yield the lines of a report as it looks at ``now``, in seconds since the epoch; the map fits into the width."""
    names, age = report.host_names, max(0.0, now - report.time)
    ended = "; the job has ended, or it hangs: run rankmesh doctor" if age > 3 * max(report.window, 20.0) else ""
    yield f"{len(report.places):,} ranks on {len(names):,} host{'s' * (len(names) > 1)}, {duration(age)} ago{ended}"
    yield f"step  {duration(report.step)}  {_trend(report.trend[-_STEPS:])}"
    yield f"lost  {100 * report.lost:.0f} % of the ranks' time; {report.steps} steps in {duration(report.window)}"
    yield from (f"slow  {finding.sentence}" for finding in report.findings[:_FINDINGS])
    if (more := len(report.findings) - _FINDINGS) > 0:
        yield f"slow  and {more} more: rankmesh doctor lists them"
    caused, computes, places = map(np.array, (report.caused, report.computes, report.places))
    yield "\n" + _COLUMNS.format("rank", "host", "others wait", "computes", "others of its place", "waits")
    for rank in np.argsort(-caused, kind="stable")[:_RANKS]:
        others = float(np.median(computes[places == places[rank]]))
        times = map(duration, (caused[rank], computes[rank], others, report.waits[rank]))
        yield _COLUMNS.format(rank, names[report.hosts[rank]], *times)
    yield ""
    yield from _map(report, width - 10)


def _trend(steps: tuple[float, ...]) -> str:
    """Return a bar for each step time; differences of less than a fifth look small."""
    low, high = min(steps, default=0.0), max(steps, default=0.0)
    return "".join(_BARS[int(6 * (step - low) / max(high - low, low / 5, 1e-9))] for step in steps)


def _map(report: SlowReport, width: int) -> Iterator[str]:
    """Yield a row for each device, with a column for each host; a cell for several ranks shows the slowest."""
    hosts, names = np.array(report.hosts), report.host_names
    order = np.argsort(hosts, kind="stable")
    devices = np.empty_like(order)
    devices[order] = np.arange(len(order)) - np.searchsorted(hosts[order], hosts[order])
    most = int(devices.max()) + 1
    rows, columns = min(most, _DEVICES), min(len(names), width)
    cells = np.zeros((rows, columns))
    share = np.array(report.caused) / max(report.step, 1e-9)
    np.maximum.at(cells, (devices * rows // most, hosts * columns // len(names)), share)
    for row, shades in enumerate(np.digitize(cells, _SHARES)):
        yield f"device {row * most // rows:<3}" + "".join(_SHADES[shade] * min(3, width // columns) for shade in shades)
    each = f", {-(-len(names) // columns)} hosts in a column" if columns < len(names) else ""
    yield f"{'':10}{' to '.join(dict.fromkeys((names[0], names[-1])))}{each}"
    yield f"{'':10}others wait: · under 2 % of a step  ░ 2 %  ▒ 5 %  ▓ 10 %  █ 30 %"
