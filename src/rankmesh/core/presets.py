"""Presets: published layouts of real runs, with their sources. The data is ``presets.json`` beside this file; "derived"
in a note means by arithmetic from the numbers that the source states.

>>> preset = get("llama3-405b")
>>> preset.spec, preset.gpus_per_node
('tp=8,cp=1,pp=16,dp=128', 8)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from rankmesh.errors import PlanError, quoted

__all__ = ["PRESETS", "Preset", "get"]


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


_DATA: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("presets.json").read_text(encoding="utf-8"))
PRESETS = {name: Preset(name=name, **fields) for name, fields in _DATA.items()}


def get(name: str) -> Preset:
    """One preset by name."""
    if name not in PRESETS:
        raise PlanError(f"unknown preset {quoted(name)}; the presets are {', '.join(PRESETS)}", received=name)
    return PRESETS[name]
