"""What the shell's completion offers: presets, recipes, and the groups of the plan typed so far.

>>> [name for name, _ in spec_names("megatron")][:2]
['megatron:', 'megatron-turing-530b']
"""

from __future__ import annotations

import typer

from rankmesh.errors import RankmeshError
from rankmesh.plan import presets
from rankmesh.readers.source import RECIPES, read

__all__ = ["group_names", "preset_names", "spec_names"]

_Offers = list[tuple[str, str]]


def spec_names(incomplete: str) -> _Offers:
    """Recipes and presets; files are the shell's own business."""
    recipes = [(f"{name}:", "recipe") for name in RECIPES]
    return [offer for offer in recipes if offer[0].startswith(incomplete)] + preset_names(incomplete)


def preset_names(incomplete: str) -> _Offers:
    """Presets with their titles."""
    return [(name, presets.get(name).title) for name in presets.names() if name.startswith(incomplete)]


def group_names(ctx: typer.Context, incomplete: str) -> _Offers:
    """The kinds of group in the plan that the SPEC before names; nothing while it cannot be read."""
    try:
        plan = read(str(ctx.params.get("spec")), world_size=ctx.params.get("world_size")).plan
    except RankmeshError:
        return []
    return [
        (name, f"{len(groups)} of {groups.size}") for name, groups in plan.kinds.items() if name.startswith(incomplete)
    ]
