"""What the shell's completion offers: presets, recipes, and the groups of the plan typed so far.

>>> [name for name, _ in spec_names("megatron")][:2]
['megatron:', 'megatron-turing-530b']
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from rankmesh.core import presets
from rankmesh.errors import RankmeshError
from rankmesh.readers.source import RECIPES, read, recipe_arguments

__all__ = ["group_names", "preset_names", "spec_names"]

_Offers = list[tuple[str, str]]

_AXES = ("tp", "cp", "ep", "dp", "pp")
_SIZES = (2, 4, 8)


def spec_names(incomplete: str) -> _Offers:
    """Recipes and presets, and their arguments or axes; files are the shell's own business.

    >>> [offer for offer, _ in spec_names("megatron:world=64,et")], spec_names("tp=2,")[0]
    (['megatron:world=64,etp=2', 'megatron:world=64,etp=4', 'megatron:world=64,etp=8'], ('tp=2,cp=2', 'axis'))
    """
    name, colon, arguments = incomplete.rpartition("/")[2].partition(":")
    if colon and name in RECIPES:
        return _pairs(incomplete, arguments, recipe_arguments(name), "argument")
    if colon or "=" in incomplete:
        return _pairs(incomplete, arguments if colon else name, _AXES, "axis")
    recipes = [(f"{name}:", "recipe") for name in RECIPES]
    return [offer for offer in recipes if offer[0].startswith(incomplete)] + preset_names(incomplete)


def preset_names(incomplete: str) -> _Offers:
    """Presets with their titles."""
    return [(name, presets.get(name).title) for name in presets.names() if name.startswith(incomplete)]


def _pairs(incomplete: str, arguments: str, names: Sequence[str], what: str) -> _Offers:
    """The names that may follow in ``name=size,...``, each with sizes: the shell stops after the equals sign."""
    *done, last = arguments.split(",")
    if "=" in last:
        return []
    taken = {item.partition("=")[0] for item in done}
    start = incomplete[: len(incomplete) - len(last)]
    fitting = [name for name in names if name.startswith(last) and name not in taken]
    return [(f"{start}{name}={size}", what) for name in fitting for size in _SIZES]


def group_names(ctx: typer.Context, incomplete: str) -> _Offers:
    """The kinds of group in the plan that the SPEC before names, after a comma too; nothing while it cannot be read."""
    done, comma, incomplete = incomplete.rpartition(",")
    try:
        # Before the value of an option is there, the words that are no options have no names yet.
        spec = ctx.params.get("spec") or next(iter(ctx.args), None)
        plan = read(str(spec), world_size=ctx.params.get("world_size")).plan
    except RankmeshError:
        return []
    return [
        (f"{done}{comma}{name}", f"{len(groups)} of {groups.size}")
        for name, groups in plan.kinds.items()
        if name.startswith(incomplete) and name not in done.split(",")
    ]
