"""A plan from what a user types; ``lazy.read_file`` reads a file.

```
tp=2,cp=2,dp=4,pp=2                                 an axis string, adjacent first; one size may be * with a world size
tp=2,dp=4,pp=2/expert:etp=1,ep=8,edp=1,pp=2         an axis string with a view
megatron:world=64,tp=2,pp=2,ep=4                    a recipe, see RECIPES
llama3-405b                                         a preset (rankmesh presets lists them)
```

>>> read_spec("three_d:tp=2,pp=2,dp=2").plan.world_size, read_spec("plan.json")
(8, None)
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from rankmesh.core import lazy, recipes
from rankmesh.core.axes import fill, parse_axes
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.errors import PlanError, at_caller, quoted

if TYPE_CHECKING:
    from rankmesh.core.presets import Preset

__all__ = ["FORMS", "RECIPES", "Source", "check_fits", "read", "read_plan", "read_spec", "recipe_arguments"]

SpecLike = str | os.PathLike[str] | Mesh | Plan

RECIPES = ("megatron", "nanotron", "ezpz", "three_d", "torchtitan", "accelerate", "deepspeed", "vllm", "sglang")

# Recipes of inference engines, whose sizes make the world.
_ENGINES = ("vllm", "sglang")
# Arguments that take Python objects; they cannot be typed.
_UNTYPED = frozenset({"embedding", "position_embedding", "options", "rank_offset"})

FORMS = (
    "write an axis string (tp=2,dp=4), a recipe (megatron:world=64,tp=2,pp=2), a preset (llama3-405b), "
    "or the path of a saved plan (plan.json) or of a training config (train.sh, train.toml, config.yaml, ds.json)"
)
# An axis and its size in whatever way, and the names that are axes anywhere.
_AXIS = re.compile(r"([A-Za-z_]+)[:=]?([0-9]{1,9}|\*)")
_AXES = frozenset({"tp", "dp", "pp", "cp", "ep", "sp", "etp", "edp", "dp_shard", "dp_replicate", "fsdp", "hsdp", "vpp"})
_ENDINGS = (".json", ".yaml", ".yml", ".toml", ".sh")


@dataclass(frozen=True)
class Source:
    """A plan and the text that it was read from: ``kind`` is axes, recipe, preset, file or config."""

    plan: Plan
    kind: str
    text: str
    preset: Preset | None = None


@at_caller
def read_plan(spec: SpecLike, *, world_size: int | None = None) -> Plan:
    """Return the plan that is meant: a SPEC is read, a mesh gets a kind for each axis, a plan stays as it is.

    >>> read_plan(Mesh(tp=2, dp=2)) == read_plan("tp=2,dp=*", world_size=4)
    True
    """
    if isinstance(spec, str | os.PathLike):
        return read(spec, world_size).plan
    plan = recipes.axes(spec) if isinstance(spec, Mesh) else spec
    if not isinstance(plan, Plan):
        raise PlanError(f"{quoted(spec)} is not a plan, a mesh or a SPEC; {FORMS}", received=spec)
    check_fits(plan, spec, world_size)
    return plan


def read(text: str | os.PathLike[str], world_size: int | None = None) -> Source:
    """Return the plan of a SPEC or of a file, with its kind; ``world_size`` fills a ``*`` and must fit the rest."""
    spec = read_spec(text, world_size=world_size) if isinstance(text, str) else None
    return spec or lazy.read_file(text, world_size)


def read_spec(text: str, *, world_size: int | None = None) -> Source | None:
    """Return the plan that a SPEC describes, None if it is the path of a file.

    ``world_size`` fills a ``*`` and must fit the rest. Raises ``PlanError`` or ``LayoutError`` for any other text.
    """
    source = _read(text.strip(), world_size)
    if source is not None:
        check_fits(source.plan, text, world_size)
    return source


def check_fits(plan: Plan, shown: object, world_size: int | None) -> None:
    """Raise ``PlanError`` if a plan is for another world than one of ``world_size`` ranks."""
    if world_size is not None and plan.world_size != world_size:
        raise PlanError(
            f"{quoted(shown)} is a layout of {plan.world_size} ranks, but the world size is {world_size}; "
            f"change the layout, or use world size {plan.world_size}",
            world_size=world_size,
            plan_world_size=plan.world_size,
        )


def _read(text: str, world_size: int | None) -> Source | None:
    if (preset := _preset(text)) is not None:
        source = _read(preset.spec, None)
        return source and Source(source.plan, "preset", text, preset)
    name, colon, arguments = text.partition(":")
    if colon and name in RECIPES:
        return Source(_recipe(name, arguments, world_size), "recipe", text)
    if text in RECIPES and not _is_file(text):
        such_as = f"{text}:{'tp=2' if text in _ENGINES else 'world=64,tp=2'}"
        raise PlanError(f"recipe {text!r} is given without its sizes; write them, such as {such_as}", received=text)
    if text.endswith(_ENDINGS) or _is_file(text):
        return None
    if "=" in text.partition("/")[0] and ":" not in text.partition("/")[0]:
        if re.search(r"[0-9*]\s*[;|\s]\s*[A-Za-z]", text) and (meant := _axes_meant(text)):
            raise PlanError(
                f"the axes of {quoted(text)} are not joined by commas; did you mean {quoted(meant)}?", received=text
            )
        return Source(_axes(text, world_size), "axes", text)
    raise PlanError(f"unknown layout {quoted(text)}; {_near(name, text) or FORMS}", received=text)


def _preset(text: str) -> Preset | None:
    if "=" in text or ":" in text:
        return None
    from rankmesh.core import presets

    return presets.PRESETS.get(text)


def _is_file(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # a long spec is too long for a file name
        return False


def _near(name: str, text: str) -> str:
    """Guess the intended SPEC, else "": axes written in another way, a recipe or preset of a near name."""
    from rankmesh.core import presets

    axes = _axes_meant(text)
    near = [axes] if axes else get_close_matches(name if ":" in text else text, [*RECIPES, *presets.PRESETS], n=1)
    return f"did you mean {quoted(near[0])}?" if near else ""


def _axes_meant(text: str) -> str:
    """Axes that are written in another way, as an axis string; empty for anything else.

    >>> _axes_meant("TP2-DP4"), _axes_meant("tp:2 dp:*"), _axes_meant("llama3")
    ('tp=2,dp=4', 'tp=2,dp=*', '')
    """
    found = _AXIS.findall(text)
    if not found or _AXIS.sub("", text).strip(" ,;|+x-") or any(name.lower() not in _AXES for name, _ in found):
        return ""
    return ",".join(f"{name.lower()}={size}" for name, size in found)


def _axes(text: str, world_size: int | None) -> Plan:
    sizes, *views = text.split("/")
    mesh = Mesh.parse(sizes, world_size=world_size)
    for view in views:
        name, colon, factors = view.partition(":")
        if not colon:
            raise PlanError(f"view {quoted(view)} has no colon; write name:axes, such as expert:ep=4,edp=2")
        mesh = mesh.with_view(name.strip(), shared=None, **fill(parse_axes(factors), mesh.size, "size of the mesh"))
    return recipes.axes(mesh)


def recipe_arguments(name: str) -> tuple[str, ...]:
    """Return the arguments of a recipe as they are typed in a SPEC.

    >>> recipe_arguments("three_d")
    ('world', 'tp', 'pp', 'dp')
    """
    return tuple("world" if key == "world_size" else key for key in _parameters(name))


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    known = inspect.signature(getattr(recipes, name)).parameters
    return {key: parameter for key, parameter in known.items() if key not in _UNTYPED}


def _recipe(name: str, text: str, world_size: int | None) -> Plan:
    parameters = _parameters(name)
    arguments: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        argument = "world_size" if key == "world" else key
        if not equals or argument not in parameters:
            known = ", ".join(recipe_arguments(name))
            raise PlanError(
                f"{quoted(item)} is not an argument of recipe {name!r}; write name=value, where name is one of {known}",
                recipe=name,
                received=item,
            )
        if argument in arguments:
            raise PlanError(f"recipe {name!r} has {quoted(key)} twice; give it once", recipe=name, received=item)
        arguments[argument] = _value(name, key, value, str(parameters[argument].annotation))
    if world_size is not None:
        arguments.setdefault("world_size", world_size)
    plan: Plan = getattr(recipes, name)(**arguments)
    return plan


def _value(recipe: str, key: str, text: str, annotation: str) -> object:
    convert, form = next(given for word, given in _CONVERTERS.items() if word in annotation)
    try:
        return convert(text)
    except (ValueError, KeyError):
        raise PlanError(
            f"{key} is {quoted(text)} in recipe {recipe!r}; write {form}", recipe=recipe, received=text
        ) from None


_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# By what an argument's type holds: how its text is read, and what to write.
_CONVERTERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "Sequence[int]": (lambda text: tuple(map(int, text.split("x"))), "sizes joined by x, such as 2x4"),
    "bool": (lambda text: _FLAGS[text.lower()], "true or false"),
    "float": (float, "a number of seconds"),
    "int": (int, "a whole number"),
    "str": (str, "a word"),
}
