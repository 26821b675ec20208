"""Colours for groups: light enough for dark text, neighbours far apart.

>>> colours(3)
['#9ac2f4', '#dcf49a', '#f19af4']
"""

from __future__ import annotations

from colorsys import hls_to_rgb

__all__ = ["colours"]

# The golden ratio spreads any number of hues evenly, and puts consecutive ones far apart.
_STEP = 0.6180339887498949
_FIRST = 0.593
_LIGHTNESS = (0.78, 0.70, 0.88)
_SATURATION = 0.80


def colours(count: int) -> list[str]:
    """``count`` colours as hexadecimal RGB; lightness changes after every twelve."""
    return [_hex((_FIRST + number * _STEP) % 1.0, _LIGHTNESS[number // 12 % 3]) for number in range(count)]


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in hls_to_rgb(hue, lightness, _SATURATION))
