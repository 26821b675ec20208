"""What the shell's completion offers: recipes, presets, and the groups of the plan typed so far.

>>> [name for name, _ in spec_names("megatron")][:2]
['megatron:', 'megatron-turing-530b']
"""

from __future__ import annotations

import typer

from rankmesh.core import presets
from rankmesh.errors import RankmeshError
from rankmesh.readers.source import RECIPES, read

__all__ = ["group_names", "preset_names", "spec_names"]

_Completions = list[tuple[str, str]]


def spec_names(incomplete: str) -> _Completions:
    """Recipes and presets; files are the shell's own business."""
    recipes = [(f"{name}:", "recipe") for name in RECIPES if f"{name}:".startswith(incomplete)]
    return recipes + preset_names(incomplete)


def preset_names(incomplete: str) -> _Completions:
    """Presets with their titles."""
    return [(name, presets.get(name).title) for name in presets.names() if name.startswith(incomplete)]


def group_names(ctx: typer.Context, incomplete: str) -> _Completions:
    """The kinds of group in the plan that the SPEC before names; nothing while it cannot be read."""
    try:
        # Before the value of an option is there, the words that are no options have no names yet.
        spec = ctx.params.get("spec") or next(iter(ctx.args), None)
        plan = read(str(spec), world_size=ctx.params.get("world_size")).plan
    except RankmeshError:
        return []
    return [
        (name, f"{len(groups)} of {groups.size}") for name, groups in plan.kinds.items() if name.startswith(incomplete)
    ]
