"""One rank in words: its place, its groups, its neighbours, and why.

The reason for each group is the formula with this rank's numbers: which coordinates are fixed, which one varies, and
by which stride.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, TypedDict

from rankmesh.core.local import LocalGroup
from rankmesh.core.options import GivenOptions

if TYPE_CHECKING:
    from rankmesh.core.mesh import Mesh
    from rankmesh.core.plan import Plan

__all__ = ["GroupFacts", "RankFacts", "arithmetic", "describe", "explain"]

_SHOWN = 8


def arithmetic(mesh: Mesh) -> list[str]:
    r"""Return why a layout is valid, a line for the mesh and one for each view that divides the same ranks otherwise.

    >>> from rankmesh.core.recipes import megatron
    >>> print(*arithmetic(megatron(world_size=16, tp=2, pp=2, ep=4, etp=1).mesh), sep="\n")
    ranks = tp 2 x cp 1 x dp 4 x pp 2 = 16
    expert: etp 1 x ep 4 x edp 2 x pp 2 = 16; ep 4 spans tp·dp: allowed, since etp x ep x edp = tp x cp x dp = 8
    """
    lines = [f"ranks = {_product(mesh.axes)} = {mesh.size:,}"]
    for name, view in mesh.views.items():
        other = view.axes
        common = {axis for axis in other if mesh.axes.get(axis) == other[axis] and axis in mesh.axes}
        ours, theirs = ([axis for axis in axes if axis not in common] for axes in (mesh.axes, other))
        line = f"{name}: {_product(other)} = {mesh.size:,}"
        largest = max(theirs, key=lambda axis: other[axis], default="")
        if "ep" in theirs:
            largest = "ep"
        if largest and other[largest] > 1 and prod(mesh.axes[axis] for axis in ours) > 1:
            spanned = _spanned(mesh, largest, name)
            equal = f"{' x '.join(theirs)} = {' x '.join(ours)} = {prod(other[axis] for axis in theirs):,}"
            line += f"; {largest} {other[largest]} spans {'·'.join(spanned)}: allowed, since {equal}"
        lines.append(line)
    return lines


def _product(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size:,}" for name, size in axes.items())


def _spanned(mesh: Mesh, axis: str, view: str) -> list[str]:
    """Return the axes of the mesh along which the members of a view's group differ."""
    group = mesh.groups(axis, view=view).of(mesh.offset if mesh.rank_map is None else mesh.rank_map[0])
    first, *others = [mesh.coordinate(int(rank)) for rank in group]
    return [name for name in mesh.axes if any(other[name] != first[name] for other in others)]


class GroupFacts(TypedDict):
    """One group of a rank; ``communicator`` names the group whose process group it uses."""

    name: str
    description: str
    ranks: list[int]
    rank: int
    size: int
    next: int | None
    prev: int | None
    communicator: str | None
    why: str
    options: GivenOptions


class RankFacts(TypedDict):
    """One rank: its coordinate in the mesh and in each view, its groups, and the kinds that it is in none of."""

    rank: int
    coordinate: dict[str, int] | None
    views: dict[str, dict[str, int]]
    groups: list[GroupFacts]
    not_in: list[str]


def describe(plan: Plan, rank: int) -> RankFacts:
    """Coordinate in the mesh and in each view, and every group with its members, place and reason."""
    local, mesh = plan.of(rank), plan.mesh
    inside = rank in mesh
    return {
        "rank": rank,
        "coordinate": mesh.coordinate(rank) if inside else None,
        "views": {name: mesh.coordinate(rank, view=name) for name in mesh.views} if inside else {},
        "groups": [_group(mesh, group) for group in local.values()],
        "not_in": [name for name in plan.kinds if name not in local],
    }


def _group(mesh: Mesh, local: LocalGroup) -> GroupFacts:
    following = local.group[(local.rank + 1) % local.size]
    preceding = local.group[local.rank - 1]
    return {
        "name": local.name,
        "description": str(local),
        "ranks": list(local.ranks),
        "rank": local.rank,
        "size": local.size,
        "next": following if local.size > 1 else None,
        "prev": preceding if local.size > 1 else None,
        "communicator": local.canonical if local.size > 1 else None,
        "why": _reason(mesh, local),
        "options": local.options.to_dict(),
    }


def _reason(mesh: Mesh, local: LocalGroup) -> str:
    view = mesh.view(local.spec.view)
    varying = mesh.groups(local.spec.axes, view=local.spec.view).axes
    strides = ", ".join(f"{axis} by {view.strides[axis]}" for axis in varying)
    fixed = ", ".join(f"{axis}={position}" for axis, position in local.coordinate)
    words = f"varies {strides}" + (f"; fixed {fixed}" if fixed else "; nothing fixed")
    if local.spec.view is not None:
        words += f"; view {local.spec.view}"
    if local.spec.levels is not None:
        words += f"; level {local.spec.level} of {'x'.join(map(str, local.spec.levels))}"
    return words + (f"; pick {local.spec.pick}" if local.spec.pick is not None else "")


def explain(plan: Plan, rank: int) -> str:
    """Return ``describe`` as text, one line a group.

    >>> from rankmesh.core import Mesh
    >>> from rankmesh.core import GroupSpec, Plan
    >>> print(Plan(Mesh(tp=2, dp=2), [GroupSpec("tp"), GroupSpec("dp")]).explain(3))
    rank 3 of 4: tp=1, dp=1
      3 = 0 + tp 1·1 + dp 1·2
      tp  [2, 3]  position 1 of 2, prev 2, next 2   varies tp by 1; fixed dp=1
      dp  [1, 3]  position 1 of 2, prev 1, next 1   varies dp by 2; fixed tp=1
    """
    from rankmesh.core.lines import Lines

    data = describe(plan, rank)
    if data["coordinate"] is None:
        return Lines(f"rank {rank} of {plan.world_size}: outside the mesh, which covers {plan.mesh.rank_range}")
    lines = [f"rank {rank} of {plan.world_size}: {_place(data['coordinate'])}", f"  {_formula(plan.mesh, rank)}"]
    lines += [f"  view {name}: {_place(coordinate)}" for name, coordinate in data["views"].items()]
    rows = [(group["name"], _members(group["ranks"]), _position(group)) for group in data["groups"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for group, row in zip(data["groups"], rows, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {cells}   {_why(group)}")
    if data["not_in"]:
        lines.append(f"  not in: {', '.join(data['not_in'])}")
    return Lines("\n".join(lines))


def _position(group: GroupFacts) -> str:
    if group["size"] == 1:
        return "the only rank, needs no communicator"
    return f"position {group['rank']} of {group['size']}, prev {group['prev']}, next {group['next']}"


def _why(group: GroupFacts) -> str:
    shared = group["communicator"] not in (None, group["name"])
    return f"{group['why']}; uses the communicator of {group['communicator']}" if shared else group["why"]


def _place(coordinate: dict[str, int]) -> str:
    return ", ".join(f"{axis}={position}" for axis, position in coordinate.items())


def _formula(mesh: Mesh, rank: int) -> str:
    terms = " + ".join(f"{axis} {position}·{mesh.strides[axis]}" for axis, position in mesh.coordinate(rank).items())
    if mesh.rank_map is None:
        return f"{rank} = {mesh.offset} + {terms}"
    return f"{rank} = rank_map[{terms}]"


def _members(ranks: list[int]) -> str:
    if len(ranks) <= _SHOWN:
        return str(ranks)
    return f"[{', '.join(map(str, ranks[:_SHOWN]))}, ... {len(ranks)} ranks]"
