"""Sizes that a recipe derives: the data-parallel size from the world, and what must divide what."""

from __future__ import annotations

from math import prod

from rankmesh.core.axes import axis_size, integer
from rankmesh.errors import PlanError

__all__ = ["divided", "world_and_dp"]


def divided(total: int, parts: int, what: str, rule: str) -> int:
    """``total / parts``, which must be whole.

    >>> divided(12, 5, "dp x cp", "optimizer_instances")
    Traceback (most recent call last):
    rankmesh.errors.PlanError: received optimizer_instances = 5 for dp x cp = 12; it must divide it; change one of them
    """
    if total % parts:
        raise PlanError(
            f"received {rule} = {parts} for {what} = {total}; it must divide it; change one of them",
            total=total,
            parts=parts,
        )
    return total // parts


def world_and_dp(world_size: int | None, dp: int | None, **model: int) -> tuple[int, int]:
    """The world size and the data-parallel size: either may be left open, and both must fit when both are given.

    >>> world_and_dp(64, None, tp=2, pp=4), world_and_dp(None, 8, tp=2, pp=4)
    ((64, 8), (64, 8))
    """
    block = prod(axis_size(name, size) for name, size in model.items())
    shown = " x ".join(f"{name} {size}" for name, size in model.items())
    if world_size is None:
        if dp is None:
            raise PlanError("received neither world_size nor dp; one follows from the other; give one of them")
        return block * axis_size("dp", dp), dp
    total = integer(world_size, "world_size", least=1)
    if total % block:
        raise PlanError(
            f"received world_size {total} and {shown} = {block}; the product must divide the world size; change a size",
            world_size=total,
            product=block,
        )
    if dp is not None and axis_size("dp", dp) * block != total:
        raise PlanError(
            f"received world_size {total}, dp {dp} and {shown} = {block}; dp x {block} must be the world size; "
            f"leave dp out, or use dp={total // block}",
            world_size=total,
            dp=dp,
        )
    return total, total // block
