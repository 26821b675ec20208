"""The layouts of a comparison: plans with the same kinds of group, and the one process that they are compared with.

```
"tp=2"               tp=2,dp=1,cp=1        axes that a bare layout leaves out have size 1
"dp=2,cp=2"          dp=2,cp=2,tp=1
reference            tp=1,dp=1,cp=1        every axis of size 1
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankmesh.core import recipes
from rankmesh.core.groups import Groups
from rankmesh.core.mesh import AxesData, Mesh, MeshData
from rankmesh.core.picks import Pick
from rankmesh.core.plan import Plan
from rankmesh.core.source import read
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import LayoutError, PlanError, quoted

__all__ = ["Layout", "LayoutLike", "layouts_of", "reference_of"]

LayoutLike = str | Mesh | Plan
# Groups that the program made itself: of all ranks, and of some.
WORLD, UNNAMED = "world", "new_group"


@dataclass(frozen=True, eq=False)
class Layout:
    """One layout: the name that the user gave it, and its plan."""

    name: str
    plan: Plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.plan.mesh

    @property
    def kinds(self) -> Mapping[str, Groups]:
        """The groups that a collective can be made on, by name."""
        return self.plan.kinds

    def kind_of(self, label: str, ranks: Sequence[int]) -> str:
        """Return the name of a group that some rank uses: its kind in the plan, or what torch calls the group.

        A group of another plan, such as a drop-in's, is of the kind of this name if it has the same members.
        Groups of ``torch.distributed.new_group`` without a description have names that differ from rank to rank.
        """
        plan, _, name = label.partition("@")[0].rpartition(":")
        groups = self.plan.kinds.get(name)
        same = groups is not None and groups.has(ranks[0]) and set(groups.of(ranks[0]).ranks) == set(ranks)
        if groups is not None and (same or not plan):
            return name
        if plan:
            return f"{plan}:{name}"
        if label == "the world":
            return WORLD
        return UNNAMED if label.startswith("group '") else label


def layouts_of(given: Iterable[LayoutLike]) -> list[Layout]:
    """Return the layouts that the user means, with the same kinds of group in each.

    >>> [layout.name for layout in layouts_of(["tp=2", Mesh(dp=2)])]
    ['tp=2', 'dp=2']
    >>> str(layouts_of(["tp=2", Mesh(dp=2)])[0].mesh)
    'tp=2,dp=1'
    """
    if isinstance(given, LayoutLike):
        given = [given]
    listed = list(given)
    if not listed:
        raise LayoutError("no layouts are given; give one or more, such as ['tp=2', 'dp=2']")
    names = [one if isinstance(one, str) else str(one.mesh if isinstance(one, Plan) else one) for one in listed]
    parts = [_mesh_or_plan(one) for one in listed]
    filled = _filled([(name, one) for name, one in zip(names, parts, strict=True) if isinstance(one, Mesh)])
    layouts = [
        Layout(name, recipes.axes(next(filled)) if isinstance(one, Mesh) else one)
        for name, one in zip(names, parts, strict=True)
    ]
    for layout in layouts:
        _check(layout, layouts[0])
    return layouts


def reference_of(layout: Layout) -> Layout:
    """Return the layout's kinds of group on one rank.

    >>> reference_of(layouts_of(["tp=2,dp=2"])[0]).plan.groups("tp").tolist()
    [[0]]
    """
    plan = layout.plan
    data = plan.mesh.to_dict()
    views = {name: _of_one_rank(view) for name, view in data.get("views", {}).items()}
    single: MeshData = {"axes": _of_one_rank(data)["axes"], "offset": 0, "views": views}
    mesh = Mesh.from_dict({**single, "parts": data.get("parts", {})})
    return Layout("one process", Plan(mesh, [_single(spec) for spec in plan.specs], name=plan.name))


def _of_one_rank(data: AxesData) -> AxesData:
    return {"axes": [[name, 1] for name, _ in data["axes"]], "parts": data.get("parts", {})}


def _single(spec: GroupSpec) -> GroupSpec:
    pick = None if spec.pick is None else Pick((0,))
    levels = None if spec.levels is None else (1,) * len(spec.levels)
    return GroupSpec(spec.name, spec.axes, view=spec.view, pick=pick, levels=levels, level=spec.level)


def _mesh_or_plan(one: object) -> Mesh | Plan:
    """Return the layout that the user gives: the mesh of axes alone, which may lack some, else a plan."""
    if isinstance(one, str):
        source = read(one)
        return source.plan.mesh if source.kind == "axes" else source.plan
    if isinstance(one, Mesh | Plan):
        return one
    raise PlanError(f"{quoted(one)} is not a layout; give a SPEC such as 'tp=2,dp=2', a Mesh or a Plan", received=one)


def _filled(meshes: Sequence[tuple[str, Mesh]]) -> Iterator[Mesh]:
    """Yield each mesh with the axes of all; axes that it lacks have size 1 and are last."""
    axes = dict.fromkeys(axis for _, mesh in meshes for axis in mesh.axes)
    views: dict[str, Mapping[str, int]] = {}
    for _, mesh in meshes:
        for name, view in mesh.views.items():
            views.setdefault(name, dict.fromkeys(view.axes, 1))
    for shown, mesh in meshes:
        missing = {axis: 1 for axis in axes if axis not in mesh.axes}
        whole = Mesh.from_dict({**mesh.to_dict(), "axes": [[*pair] for pair in {**mesh.axes, **missing}.items()]})
        for name, single in views.items():
            if name not in mesh.views:
                if mesh.size > 1:
                    raise LayoutError(
                        f"layout {quoted(shown)} has no view {name!r}, which others have; write how it factors these "
                        f"{mesh.size} ranks, such as {shown}/{name}:{next(iter(single))}={mesh.size}",
                        layout=shown,
                        view=name,
                    )
                whole = whole.with_view(name, shared=None, **single)
        yield whole


def _check(layout: Layout, first: Layout) -> None:
    plan = layout.plan
    if set(plan.kinds) != set(first.plan.kinds):
        only = sorted(set(plan.kinds) ^ set(first.plan.kinds))
        raise LayoutError(
            f"layouts {quoted(first.name)} and {quoted(layout.name)} do not have the same kinds of group: "
            f"{quoted(', '.join(only))} are in one of them only; make both with one recipe",
            layouts=(first.name, layout.name),
            kinds=tuple(only),
        )
    if plan.mesh.size != plan.world_size:
        raise LayoutError(
            f"layout {quoted(layout.name)} covers {plan.mesh.size} of {plan.world_size} ranks; a comparison needs "
            "every rank of the world in the mesh: give a mesh without offset",
            layout=layout.name,
        )
