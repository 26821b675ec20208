"""Curves of a measurement as an SVG picture: bus bandwidth over size, one line for each kind and collective.

>>> from rankmesh.placement.measured import GroupTime, Measured, Measurement
>>> rows = tuple(Measured("tp", "all-reduce", size, (GroupTime((0, 1), 1e-3, 1e-3),)) for size in (1024, 4096))
>>> text = curves(Measurement(("a", "a"), "gloo", rows))
>>> text.startswith("<svg"), text.count("<polyline"), "tp all-reduce" in text
(True, 1, True)
"""

from __future__ import annotations

from math import ceil, floor, log10
from xml.etree.ElementTree import Element, tostring

from rankmesh.placement.measured import Measured, Measurement
from rankmesh.placement.report import speed
from rankmesh.viz.panel import document, put
from rankmesh.viz.sheet import colours

__all__ = ["curves"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _LEGEND, _LINE = 90, 50, 560, 340, 230, 20


def curves(measured: Measurement) -> str:
    """SVG text: bytes that a rank holds from left to right, bytes/s upward, both in powers of ten."""
    lines: dict[tuple[str, str], list[Measured]] = {}
    for row in measured.rows:
        lines.setdefault((row.name, row.collective), []).append(row)
    wide = _decades([row.bytes for row in measured.rows])
    high = _decades([row.busbw for row in measured.rows])
    height = max(_TOP + _HEIGHT + 60, _TOP + _LINE * (len(lines) + 1))
    label = "bus bandwidth of each kind of group over the size of its messages"
    root = document(_LEFT + _WIDTH + _LEGEND, height, label)
    put(
        root,
        "text",
        f"bus bandwidth, all groups of a kind at once ({measured.backend})",
        x=20,
        y=28,
        **{"class": "title"},
    )
    _grid(root, wide, high)
    for number, ((name, collective), rows) in enumerate(lines.items()):
        colour = colours(len(lines))[number]
        shown = sorted(rows, key=lambda row: row.bytes)
        points = [(_x(log10(row.bytes), wide), _y(log10(row.busbw), high)) for row in shown]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        put(root, "polyline", points=text, fill="none", stroke=colour, stroke_width=2)
        for x, y in points:
            put(root, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, fill=colour)
        y = _TOP + _LINE * (number + 1)
        put(root, "rect", x=_LEFT + _WIDTH + 24, y=y - 10, width=12, height=12, rx=3, fill=colour)
        put(root, "text", f"{name} {collective}", x=_LEFT + _WIDTH + 42, y=y, **{"class": "label"})
    return tostring(root, encoding="unicode")


def _decades(values: list[float] | list[int]) -> tuple[int, int]:
    low, top = floor(log10(min(values))), ceil(log10(max(values)))
    return low, max(top, low + 1)


def _x(power: float, wide: tuple[int, int]) -> float:
    return _LEFT + _WIDTH * (power - wide[0]) / (wide[1] - wide[0])


def _y(power: float, high: tuple[int, int]) -> float:
    return _TOP + _HEIGHT * (1 - (power - high[0]) / (high[1] - high[0]))


def _grid(root: Element, wide: tuple[int, int], high: tuple[int, int]) -> None:
    for power in range(wide[0], wide[1] + 1):
        x = _x(power, wide)
        put(root, "path", d=f"M{x:.1f} {_TOP}v{_HEIGHT}", stroke="#d0d7de")
        put(root, "text", f"{10**power:,} B", x=f"{x - 14:.1f}", y=_TOP + _HEIGHT + 18, **{"class": "label"})
    for power in range(high[0], high[1] + 1):
        y = _y(power, high)
        put(root, "path", d=f"M{_LEFT} {y:.1f}h{_WIDTH}", stroke="#d0d7de")
        put(root, "text", speed(10.0**power), x=_LEFT - 8, y=f"{y + 4:.1f}", **{"class": "label end"})
