"""Plans of a recipe's arguments, and one changed size with which arguments fit.

A recipe is a format's own, or a layout that files of several formats have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from rankmesh.core import recipes
from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.errors import PlanError, RankmeshError

__all__ = ["is_plan", "needs_world", "plan_of"]


def _sharded(mesh: Mesh, shards: int | None) -> Mesh:
    """Return a mesh with a view of its weights: shards among adjacent ranks, copies among the others."""
    if shards is None or shards >= mesh.size:
        return mesh.with_view("weights", shared=None, fsdp=mesh.size)
    if mesh.size % shards:
        raise PlanError(f"fsdp_size {shards} does not divide the world size {mesh.size}; change one of them")
    return mesh.with_view("weights", shared=None, fsdp=shards, ddp=mesh.size // shards)


def _shards(world: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Add what axolotl infers to its sizes: shards first, and copies of what shards leave of the world."""
    if "dp_shard" not in sizes or "dp_replicate" in sizes:
        return dict(sizes)
    rest, used = divmod(world, prod(sizes.values()))
    return dict(sizes) if used else {**sizes, "dp_replicate": rest}


def _axes(text: str, world: int | None) -> Plan:
    return recipes.axes(Mesh.parse(text, world_size=world))


def _verl(world: int | None, sp: int = 1, fsdp: int | None = None) -> Plan:
    return recipes.axes(_sharded(Mesh.parse(f"sp={sp},dp=*", world_size=world), fsdp))


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
    """Return whether a recipe has no plan of these arguments without the world size."""
    return _RECIPES[recipe][1] not in ("", *arguments)
