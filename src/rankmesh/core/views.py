"""Views: another factorisation of the ranks of a mesh, whose shared axes are checked to be equal.

```
mesh     tp=2 dp=4 pp=2          pp   [0, 8] [1, 9] ...
expert   etp=1 ep=4 edp=2 pp=2   pp   [0, 8] [1, 9] ...     the same groups, checked
```
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

from rankmesh.core.axes import axis_name, axis_names, axis_size, find
from rankmesh.errors import LayoutError, listed

if TYPE_CHECKING:
    from rankmesh.core.mesh import Mesh

__all__ = ["check_shared", "factors"]


def factors(name: str, sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """The checked sizes of a view, whose product must be the ``total`` of the mesh.

    >>> factors("expert", {"ep": 4, "edp": 2}, 8)
    {'ep': 4, 'edp': 2}
    """
    checked = {axis_name(axis): axis_size(axis, size) for axis, size in sizes.items()}
    product = prod(checked.values())
    if product != total:
        shown = " x ".join(f"{axis} {size}" for axis, size in checked.items())
        raise LayoutError(
            f"view {name!r} has {shown} = {product} ranks, but the mesh has {total}; change its sizes, as a view is "
            "another factorisation of the same ranks",
            view=name,
            product=product,
            size=total,
        )
    return checked


def check_shared(mesh: Mesh, view: Mesh, name: str, shared: Iterable[str] | None) -> None:
    """Raise ``LayoutError`` unless each shared axis (None: each that both name) gives the same groups in both."""
    for axis in _shared_axes(mesh, view, shared):
        _check_equal(mesh, view, name, axis)


def _shared_axes(mesh: Mesh, view: Mesh, shared: Iterable[str] | None) -> tuple[str, ...]:
    known = {*mesh.axes, *mesh.parts}
    if shared is None:
        return tuple(name for name in view.axes if name in known)
    names = axis_names(shared)
    for name in names:
        find(name, known)
        find(name, view.axes)
    return names


def _check_equal(mesh: Mesh, view: Mesh, name: str, axis: str) -> None:
    ours, theirs = mesh.groups(axis), view.groups(axis)
    # Equal patterns tile the ranks in one way only: the lowest one not yet covered must start a group.
    if ours.members != theirs.members:
        raise LayoutError(
            f"view {name!r} shares {axis!r} with the mesh, but its groups differ: the mesh has {listed(ours[0])}, the "
            f"view has {listed(theirs[0])}; give {axis!r} one size and one stride in both, or leave it out of shared",
            view=name,
            axis=axis,
            mesh_groups=ours,
            view_groups=theirs,
        )
