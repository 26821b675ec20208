"""Presets: published layouts of real runs, with their sources. The data is ``presets.json`` beside this file; "derived"
in a note means by arithmetic from the numbers that the source states.

>>> preset = get("llama3-405b")
>>> preset.spec, preset.gpus_per_node
('tp=8,cp=1,pp=16,dp=128', 8)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from rankmesh.errors import PlanError, quoted

__all__ = ["Preset", "get", "names"]


@dataclass(frozen=True)
class Preset:
    """One published layout: ``spec`` is its axis string or recipe, ``source`` is where it was published.

    ``note`` has what the source leaves open, and what was derived by arithmetic.
    """

    name: str
    title: str
    spec: str
    gpus_per_node: int
    source: str
    note: str = ""


@cache
def _all() -> dict[str, Preset]:
    text = files("rankmesh.core").joinpath("presets.json").read_text(encoding="utf-8")
    return {name: Preset(name=name, **fields) for name, fields in json.loads(text).items()}


def names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(_all())


def get(name: str) -> Preset:
    """One preset by name."""
    if name not in _all():
        raise PlanError(f"unknown preset {quoted(name)}; the presets are {', '.join(_all())}", received=name)
    return _all()[name]
