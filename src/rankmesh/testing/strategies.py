"""Random layouts for hypothesis: meshes, meshes with views, and plans, all valid.

```
meshes()    axes with sizes, an offset, and ranks in an order of their own where asked for
views()     meshes with a view: their ranks factorised once more
plans()     kinds of group over either, with picks, levels and options
```

>>> from hypothesis import find
>>> find(meshes(), lambda mesh: mesh.size >= 4 and len(mesh.axes) == 2).size
4
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import extra

with extra("testing"):
    from hypothesis import strategies as st

__all__ = ["AXES", "meshes", "plans", "views"]

AXES = ("tp", "cp", "dp", "pp", "ep")
_VIEW_AXES = ("etp", "eep", "edp", "epp")


@st.composite
def meshes(
    draw: st.DrawFn,
    *,
    max_size: int = 32,
    max_axes: int = 4,
    max_offset: int = 0,
    shuffled: bool = False,
    axes: Sequence[str] = AXES,
) -> Mesh:
    """Draw a mesh of at most ``max_size`` ranks; shrinks to one axis of size 1.

    ``max_offset``  the largest rank at which it may begin; ``shuffled``: its ranks may come in any order
    """
    names = draw(st.lists(st.sampled_from(list(axes)), min_size=1, max_size=max_axes, unique=True))
    sizes: dict[str, int] = {}
    for name in names:
        sizes[name] = draw(st.integers(1, max_size // prod(sizes.values())))
    offset = draw(st.integers(0, max_offset))
    ranks = list(range(offset, offset + prod(sizes.values())))
    order: list[int] | None = draw(st.permutations(ranks)) if shuffled else None
    return Mesh(offset=offset, rank_map=order, **sizes)


@st.composite
def views(draw: st.DrawFn, /, *, name: str = "expert", **limits: Any) -> Mesh:
    """Draw a mesh of ``meshes(**limits)`` with a view, whose axes are named ``etp``, ``eep``, ``edp``, ``epp``."""
    mesh = draw(meshes(**limits))
    sizes: dict[str, int] = dict(zip(_VIEW_AXES, draw(_factors(mesh.size, len(_VIEW_AXES))), strict=True))
    return mesh.with_view(name, shared=None, **sizes)


@st.composite
def plans(draw: st.DrawFn, /, *, max_kinds: int = 5, options: bool = True, **limits: Any) -> Plan:
    """Draw a plan of one to ``max_kinds`` kinds over a mesh of ``meshes(**limits)``, with a view or without.

    ``options``  False: no kind has options of its own
    """
    mesh = draw(st.one_of(meshes(**limits), views(**limits)))
    count = draw(st.integers(1, max_kinds))
    return Plan(mesh, [draw(_specs(mesh, f"kind{number}", options)) for number in range(count)])


@st.composite
def _specs(draw: st.DrawFn, mesh: Mesh, name: str, options: bool) -> GroupSpec:
    view = draw(st.sampled_from([None, *mesh.views]))
    axes = draw(st.lists(st.sampled_from(list(mesh.view(view).axes)), min_size=1, unique=True))
    size = mesh.groups(tuple(axes), view=view).size
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        levels = draw(_factors(size, 3))
        level = draw(st.integers(0, len(levels) - 1))
        more, size = {"levels": levels, "level": level}, levels[level]
    if draw(st.booleans()):
        more["pick"] = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True))
    if options:
        more |= draw(st.fixed_dictionaries({}, optional={"timeout": st.integers(30, 90), "share": st.booleans()}))
    return GroupSpec(name, tuple(axes), view=view, **more)


@st.composite
def _factors(draw: st.DrawFn, total: int, count: int) -> tuple[int, ...]:
    """Draw ``count`` integers whose product is ``total``, ones among them."""
    parts = []
    for _ in range(count - 1):
        parts.append(draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0])))
        total //= parts[-1]
    return (*parts, total)
