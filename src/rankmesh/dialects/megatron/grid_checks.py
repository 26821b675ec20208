"""What a grid refuses: names and sizes that do not fit, views that do not share what they say, options unknown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Any

import torch.distributed as dist

from rankmesh.backend import torch_private
from rankmesh.core.options import Options
from rankmesh.errors import ConnectError, LayoutError, PlanError

__all__ = ["GridTooLarge", "RankView", "check_named", "check_view", "options_for", "planned_world_size"]


@dataclass(frozen=True)
class RankView:
    """One factorisation of a grid's ranks: the base, or one that was registered."""

    name: str
    shape: list[int]
    dim_names: list[str]
    shared_dims: list[str]


class GridTooLarge(LayoutError, RuntimeError):
    """A grid of more ranks than the world has after its offset."""


def check_named(shape: list[Any], dim_names: list[str], what: str) -> None:
    """Refuse sizes and names that are no factorisation."""
    if len(shape) != len(dim_names):
        raise LayoutError(
            f"received a {what} with len(shape) {shape} != len(dim_names) {dim_names}; name each dimension once"
        )
    if len(set(dim_names)) < len(dim_names):
        raise LayoutError(f"received a {what} with duplicate dim_names {dim_names}; each has its own; rename one")
    if any(isinstance(size, bool) or not isinstance(size, Integral) or size < 1 for size in shape):
        raise LayoutError(f"received a {what} of {shape}; its shape must be positive ints; correct it", shape=shape)


def check_view(name: str, shape: list[int], dim_names: list[str], shared: list[str], base: RankView) -> None:
    """Refuse a view of other ranks than the base has, or one that shares what not both have."""
    if prod(shape) != prod(base.shape):
        raise LayoutError(
            f"received view {name!r} of {shape} = {prod(shape)} ranks, but the grid size is {prod(base.shape)}; "
            "both are over the same ranks; change its shape",
            size=prod(base.shape),
        )
    if len(set(shared)) < len(shared):
        raise LayoutError(f"received duplicate shared_dims {shared}; name each once", received=shared)
    for dim in shared:
        for owner, names in (("the base view", base.dim_names), ("the view's dim_names", dim_names)):
            if dim not in names:
                raise LayoutError(
                    f"Shared dim {dim!r} of view {name!r} is not in {owner} {names}; share what both have", dim=dim
                )


def planned_world_size() -> int:
    """The world that a grid is for: WORLD_SIZE, else the live one."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    raise ConnectError(
        "received no world for a grid: WORLD_SIZE is not set, and torch.distributed is not initialised; do one of both"
    )


def options_for(backend: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of torch's call as a spec's."""
    unknown = sorted(set(given) - {"timeout", "pg_options"})
    if unknown:
        raise PlanError(
            f"received option {unknown[0]!r}; create_pg takes timeout, pg_options and group_desc", option=unknown[0]
        )
    options = given.get("pg_options")
    asked = Options() if options is None else torch_private.options_of(options)
    return Options(backend=backend, timeout=given.get("timeout")).over(asked).to_dict()
