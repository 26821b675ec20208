"""Pieces of every recipe: sizes that follow from each other, kinds by name, the error for an unknown argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from math import prod
from typing import ParamSpec

from rankmesh.core.axes import axis_size, integer
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError, UnknownArgument

__all__ = ["divided", "kinds", "recipe", "world_and_dp"]

_Given = ParamSpec("_Given")


def recipe(make: Callable[_Given, Plan]) -> Callable[_Given, Plan]:
    """Refuse an argument that the recipe does not have, and name the nearest one that it has."""

    @wraps(make)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> Plan:
        try:
            return make(*args, **kwargs)
        except TypeError as error:
            known = list(signature(make).parameters)
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is None:
                raise
            raise UnknownArgument(unknown, known, make.__name__) from error

    return made


def kinds(*names: str, view: str | None = None) -> list[GroupSpec]:
    """Return the kinds along one axis each, named after it: ``kinds("tp pp")``."""
    return [GroupSpec(name, view=view) for words in names for name in words.split()]


def divided(total: int, parts: int, what: str, rule: str) -> int:
    """Return ``total / parts``, which must be whole.

    >>> divided(12, 5, "dp x cp", "optimizer_instances")
    Traceback (most recent call last):
    rankmesh.errors.PlanError: optimizer_instances = 5 does not divide dp x cp = 12; change one of them
    """
    if total % parts:
        raise PlanError(
            f"{rule} = {parts} does not divide {what} = {total}; change one of them", total=total, parts=parts
        )
    return total // parts


def world_and_dp(world_size: int | None, dp: int | None, **model: int) -> tuple[int, int]:
    """Return the world size and the data-parallel size; either may be None, and both must fit when both are given.

    >>> world_and_dp(64, None, tp=2, pp=4), world_and_dp(None, 8, tp=2, pp=4)
    ((64, 8), (64, 8))
    """
    block = prod(axis_size(name, size) for name, size in model.items())
    shown = " x ".join(f"{name} {size}" for name, size in model.items())
    if world_size is None:
        if dp is None:
            raise PlanError("neither world_size nor dp is given; give one of them, as the other follows from it")
        return block * axis_size("dp", dp), dp
    total = integer(world_size, "world_size", least=1)
    if total % block:
        raise PlanError(
            f"world_size is {total}, but {shown} = {block} does not divide it; use a multiple of {block} ranks, or "
            "change a size",
            world_size=total,
            product=block,
        )
    if dp is not None and axis_size("dp", dp) * block != total:
        raise PlanError(
            f"world_size is {total}, but dp {dp} x {shown} = {dp * block}; leave dp out, or use dp={total // block}",
            world_size=total,
            dp=dp,
        )
    return total, total // block
