"""Plans of a recipe's arguments, and fixes: one changed size with which arguments fit, written as a file has it.

A recipe is a format's own, or a layout that files of several formats have. A fix is tried before it is proposed.

>>> fitting({"world_size": 8, "dp_shard": 4}, lambda sizes: sizes.get("dp_replicate", 1) * sizes["dp_shard"] == 8)
('dp_replicate', 2)
>>> spelled("tp", 4, (Reading(("--tp-size",), 8, 1, argument="tp"),), None, "serve.sh")
'--tp-size 4'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

from rankmesh.core import recipes
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.errors import PlanError, RankmeshError
from rankmesh.readers.table import Reading, Table

__all__ = ["fitting", "is_plan", "needs_world", "plan_of", "smaller", "spelled", "written"]


def _shards(world: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Add the copies that axolotl infers: the world size divided by the product of the sizes."""
    if "dp_shard" not in sizes or "dp_replicate" in sizes:
        return dict(sizes)
    rest, used = divmod(world, prod(sizes.values()))
    return dict(sizes) if used else {**sizes, "dp_replicate": rest}


def _axes(text: str, world: int | None) -> Plan:
    return recipes.axes(Mesh.parse(text, world_size=world))


def _verl(world: int | None, sp: int = 1, fsdp: int | None = None) -> Plan:
    """Return verl's mesh with a view of its weights: shards among adjacent ranks, copies among the others."""
    mesh = Mesh.parse(f"sp={sp},dp=*", world_size=world)
    shards = mesh.size if fsdp is None else min(fsdp, mesh.size)
    if mesh.size % shards:
        raise PlanError(f"fsdp_size {shards} does not divide the world size {mesh.size}; change one of them")
    copies = {"ddp": mesh.size // shards} if shards < mesh.size else {}
    return recipes.axes(mesh.with_view("weights", shared=None, fsdp=shards, **copies))


# The plan of a world size and arguments; the argument without which it needs the world size, empty for none.
_RECIPES: Mapping[str, tuple[Callable[..., Plan], str]] = {
    "megatron": (recipes.megatron, "dp"),
    "gpt_neox": (lambda world, tp=1, pp=1: _axes(f"tp={tp},dp=*,pp={pp}", world), "world_size"),
    "verl": (_verl, "world_size"),
    "axolotl": (lambda world, **sizes: recipes.accelerate(world, **_shards(world, sizes)), "world_size"),
    "nanotron": (recipes.nanotron, "dp"),
    "picotron": (lambda world, tp=1, cp=1, pp=1, dp="*": _axes(f"tp={tp},cp={cp},pp={pp},dp={dp}", world), "dp"),
    "torchtitan": (recipes.torchtitan, "dp_shard"),
    "deepspeed": (recipes.deepspeed, "dp"),
    "accelerate": (recipes.accelerate, "dp_shard"),
    "vllm": (recipes.vllm, ""),
    "sglang": (recipes.sglang, ""),
    "experts": (lambda world, ep: _axes(f"ep={ep}", world), "world_size"),
    "sequences": (lambda world, sp: recipes.deepspeed(world, sp=sp, dp=world // sp), "world_size"),
    "replicas": (lambda world: recipes.accelerate(world, dp_replicate=world, dp_shard=1), "world_size"),
}


def plan_of(recipe: str, arguments: Mapping[str, object]) -> Plan:
    """Return the plan of a recipe's arguments, ``world_size`` among them."""
    sizes = {name: value for name, value in arguments.items() if name != "world_size"}
    return _RECIPES[recipe][0](arguments["world_size"], **sizes)


def is_plan(recipe: str, arguments: Mapping[str, object]) -> bool:
    """Return whether a recipe has a plan for these arguments."""
    try:
        plan_of(recipe, arguments)
    except RankmeshError:
        return False
    return True


def needs_world(recipe: str, arguments: Mapping[str, object]) -> bool:
    """Return whether a recipe has no plan of these arguments, which lack the world size."""
    stated, needed = {name for name, value in arguments.items() if value is not None}, _RECIPES[recipe][1]
    return bool(needed) and stated.isdisjoint(("world_size", needed))


# -- fixes ----------------------------------------------------------------------------------------------------------

_DATA = ("dp_replicate", "dp_shard", "dp")
_DENSE = (*_DATA, "tp", "cp", "sp", "pp")
# The sizes that are changed first: of experts, and of SGLang's attention.
_CHANGED_FIRST = {"ep", "attn_dp", "attn_cp", "dcp"}
# Sizes that are proposed, and how many are tried.
_LARGEST_SIZE, _TRIED = 1 << 14, 16


def fitting(arguments: Mapping[str, Any], fits: Callable[[Mapping[str, Any]], bool]) -> tuple[str, int] | None:
    """Return one changed size with which the arguments of a recipe fit, None where no single one does.

    Data parallelism is changed first, then experts, then other sizes; a missing size is added before a stated one is
    changed.
    """
    for name, value in _candidates(arguments):
        if fits({**arguments, name: value}):
            return name, value
    return None


def _candidates(arguments: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    sizes = {name: value for name, value in arguments.items() if name != "world_size" and type(value) is int}
    world = arguments.get("world_size") or prod(sizes.values())
    stated = [name for name in _DATA if name in sizes]
    if "ep" in sizes and "etp" not in sizes and "tp" in sizes:
        yield "etp", 1  # its default is tp, by which experts often do not fit
    for name in [*(name for name in _DATA[:2] if stated and name not in sizes), *stated]:
        block = prod(sizes[other] for other in _DENSE if other in sizes and other != name)
        if world % block == 0 and world // block != sizes.get(name, 1):
            yield name, world // block
    for name in sorted(sizes, key=lambda name: name not in _CHANGED_FIRST):
        yield from ((name, value) for value in smaller(sizes[name], world, one=name == "etp"))


def smaller(value: int, number: int, *, one: bool = False) -> list[int]:
    """Return up to 16 divisors of a number that are smaller than a value, the largest first; 1 only beside 2."""
    tried = range(min(value - 1, number, _LARGEST_SIZE), 0 if value == 2 or one else 1, -1)
    return list(islice((each for each in tried if number % each == 0), _TRIED))


def spelled(argument: str, value: int, readings: Sequence[Reading], table: Table | None, path: str) -> str | None:
    """Return a setting of an argument as the file writes it, None if the format has no key for it."""
    reading = next((each for each in readings if each.argument == argument), None)
    if reading is not None:
        return written(reading.path, value, path)
    name = next((name for name, row in table.reads.items() if row.argument == argument), None) if table else None
    beside = next((each.path for each in readings if each.argument != "world_size"), None)
    if name is None or beside is None:
        return None
    if beside[-1].startswith("--"):
        name = f"--{name}" if "_" in beside[-1] else f"--{name.replace('_', '-')}"
    elif "-" in beside[-1]:
        name = name.replace("_", "-")
    return written((*beside[:-1], name), value, path)


def written(key: Sequence[str], value: object, path: str) -> str:
    """Return a key with a value as a file of this kind has it: an option, a line of YAML, TOML or JSON, or a word.

    >>> [written(("a", "tp"), 4, f"run.{ending}") for ending in ("yaml", "toml", "json", "sh")]
    ['tp: 4', 'tp=4', '"tp": 4', 'a.tp=4']
    """
    last = key[-1]
    if key[0].startswith("-"):
        return f"{'.'.join(key)} {value}"
    if last.isupper():
        return f"{last}={value}"
    if path.endswith((".yaml", ".yml")):
        return f"{last}: {value}"
    if path.endswith((".toml", ".json")):
        return f"{last}={value}" if path.endswith(".toml") else f'"{last}": {value}'
    return f"{'.'.join(key)}={value}" if len(key) > 1 else f"--{last} {value}"
