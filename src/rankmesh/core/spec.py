"""Group specs: what one kind of group is called, which axes it spans, and how it is made.

```
GroupSpec("tp")                                            along the axis tp
GroupSpec("dp_cp", axes="dp-cp", timeout=600)              along two axes, with an option
GroupSpec("ep", view="expert")                             along an axis of a view
GroupSpec("embd", axes="pp", pick=ends)                    some positions of each group
GroupSpec("intra", axes="dp-cp", levels=(4, 2), level=0)   one level of a hierarchy of each group
GroupSpec("stage", pipeline=True)                          its members talk to their neighbours
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from rankmesh.core.axes import AxesLike, array, axis_names, integer, items_of
from rankmesh.core.groups import Groups
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import GivenOptions, Options, flag
from rankmesh.core.picks import Pick, PickLike
from rankmesh.errors import PlanError, listed, quoted

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on

__all__ = ["GroupSpec", "SpecData", "check_specs"]


class SpecData(TypedDict, total=False):
    """A group spec as plain data; what is not there has its default."""

    name: str
    axes: list[str]
    view: str
    pick: list[int]
    levels: list[int]
    level: int | None
    pipeline: bool
    options: GivenOptions


@dataclass(frozen=True, init=False, repr=False)
class GroupSpec:
    """One kind of group of a plan.

    ``name``     how the job asks for it; ``axes`` default to the name
    ``view``     the view that the axes belong to, None for the mesh itself
    ``pick``     which positions of each group are members: ``ends``, ``first``, ``last``, positions, or a callable
    ``levels``   sizes of a hierarchy of each group's positions, with ``level``: which level this kind is
    ``pipeline`` its members send to the next and receive from the previous one: what a warm-up opens and a
                 verification tries. Default: whole groups along the axis ``pp``, and no others
    options      see ``Options``: ``backend``, ``timeout``, ``nccl``, ``high_priority``, ``sharp``, ``share``,
                 ``overlap``, ``lazy``

    >>> GroupSpec("dp_cp", axes="dp-cp", timeout=600)
    GroupSpec('dp_cp', axes='dp-cp', timeout=600.0)
    """

    name: str
    axes: tuple[str, ...]
    view: str | None
    pick: PickLike | None
    levels: tuple[int, ...] | None
    level: int | None
    pipeline: bool
    options: Options

    def __init__(
        self,
        name: str,
        axes: AxesLike | None = None,
        *,
        view: str | None = None,
        pick: PickLike | None = None,
        levels: Sequence[int] | None = None,
        level: int | None = None,
        pipeline: bool | None = None,
        **options: Unpack[GivenOptions],
    ) -> None:
        if (levels is None) != (level is None):
            raise PlanError(
                f"group {name!r} has levels {quoted(levels)} and level {quoted(level)}; give both or none", group=name
            )
        along = axis_names(_name(name) if axes is None else axes)
        vars(self).update(
            name=_name(name),
            axes=along,
            view=_view(view),
            pick=pick if pick is None or isinstance(pick, Pick) or callable(pick) else Pick(pick),  # type: ignore[arg-type]  # as in Pick.of
            levels=None if levels is None else _levels(levels, name),
            level=None if level is None else integer(level, "level", least=0),
            pipeline=_is_pipeline(along, pick) if pipeline is None else flag("pipeline", pipeline),
            options=Options(**options),
        )

    def groups(self, mesh: Mesh) -> Groups:
        """Return the groups of this kind on a mesh, each rank's in O(axes)."""
        groups = mesh.groups(self.axes, view=self.view)
        if self.levels is not None and self.level is not None:
            groups = groups.level_of(self.levels, self.level)
        return groups if self.pick is None else groups.pick(self.pick)

    def on(self, mesh: Mesh, inherited: Options) -> GroupSpec:
        """Resolve the options and call the pick, so that the spec is plain data."""
        return self._replace(self.options.over(inherited).effective(), self._asked(mesh))

    def with_options(self, options: Options) -> GroupSpec:
        """Replace the options."""
        return self._replace(options, self.pick)

    def _replace(self, options: Options, pick: PickLike | None) -> GroupSpec:
        if options is self.options and pick is self.pick:
            return self
        other = object.__new__(GroupSpec)  # what is checked already is not checked again
        vars(other).update(vars(self), options=options, pick=pick)
        return other

    def _asked(self, mesh: Mesh) -> Pick | None:
        """Return the pick as data. A callable must choose by position; it is called with real ranks to check that."""
        if self.pick is None or isinstance(self.pick, Pick):
            return self.pick
        whole = GroupSpec(self.name, self.axes, view=self.view, levels=self.levels, level=self.level).groups(mesh)
        pick = Pick.of(self.pick, whole.size)
        if callable(self.pick):
            chosen = pick.positions_in(whole.size)
            for group in (whole[0], whole[-1]):
                ranks = tuple(dict.fromkeys(self.pick(group.ranks)))
                if ranks != tuple(group[position] for position in chosen):
                    raise PlanError(
                        f"the pick of group {self.name!r} chooses {listed(ranks)} of {listed(group)} but positions "
                        f"{listed(chosen)} of {listed(range(whole.size))}; write it with indices into the ranks that "
                        "it takes, so that it chooses the same positions in every group",
                        group=self.name,
                        positions=chosen,
                        ranks=ranks,
                    )
        return pick

    def to_dict(self) -> SpecData:
        """Plain data; the pick must have been asked (``on``)."""
        data: SpecData = {"name": self.name, "axes": list(self.axes)}
        if self.view is not None:
            data["view"] = self.view
        if isinstance(self.pick, Pick):
            data["pick"] = list(self.pick.positions)
        if self.levels is not None:
            data["levels"], data["level"] = list(self.levels), self.level
        if self.pipeline != _is_pipeline(self.axes, self.pick):
            data["pipeline"] = self.pipeline
        if options := self.options.to_dict():
            data["options"] = options
        return data

    @classmethod
    def from_dict(cls, data: SpecData) -> GroupSpec:
        """Return the spec of ``to_dict``."""
        pick = data.get("pick")
        return cls(
            data["name"],
            tuple(array(data["axes"], "axes of a group")),
            view=data.get("view"),
            pick=None if pick is None else Pick(tuple(pick)),
            levels=data.get("levels"),
            level=data.get("level"),
            pipeline=data.get("pipeline"),
            **data.get("options", {}),
        )

    def __repr__(self) -> str:
        parts = [repr(self.name)]
        parts += [f"axes={'-'.join(self.axes)!r}"] if self.axes != (self.name,) else []
        parts += [f"view={self.view!r}"] if self.view is not None else []
        parts += [f"pick={self.pick}"] if self.pick is not None else []
        parts += [f"levels={self.levels}, level={self.level}"] if self.levels is not None else []
        parts += [f"pipeline={self.pipeline}"] if self.pipeline != _is_pipeline(self.axes, self.pick) else []
        parts += [f"{name}={value!r}" for name, value in self.options.to_dict().items()]
        return f"GroupSpec({', '.join(parts)})"


def _name(name: object) -> str:
    if not isinstance(name, str) or not name or not name.replace("-", "_").replace(".", "_").isidentifier():
        raise PlanError(
            f"{quoted(name)} cannot name a group; use letters, digits, underscores and hyphens, such as 'dp_cp'",
            received=name,
        )
    return name


def _view(view: object) -> str | None:
    if view is None or isinstance(view, str):
        return view
    raise PlanError(f"view is {quoted(view)}; give the name of a view, or None for the mesh itself", received=view)


def _is_pipeline(axes: tuple[str, ...], pick: object) -> bool:
    return axes == ("pp",) and pick is None


def _levels(levels: object, group: str) -> tuple[int, ...]:
    if not isinstance(levels, Iterable) or isinstance(levels, str):
        raise PlanError(
            f"levels of group {group!r} are {quoted(levels)}; list the sizes of a hierarchy, adjacent first, such as "
            "(4, 2)",
            group=group,
            received=levels,
        )
    return tuple(integer(size, "size of a level", least=1) for size in levels)


def check_specs(specs: Iterable[GroupSpec]) -> tuple[GroupSpec, ...]:
    """Return the specs as a tuple: each a GroupSpec, no two with one name."""
    listed = items_of(specs)
    if listed is None:
        raise PlanError(f"the groups of a plan are {quoted(specs)}; list them: [GroupSpec('tp')]", received=specs)
    for spec in listed:
        if not isinstance(spec, GroupSpec):
            raise PlanError(
                f"group {quoted(spec)} is not a GroupSpec; give one, such as GroupSpec('tp')", received=spec
            )
    names = [spec.name for spec in listed]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"two groups of the plan are named {name!r}; rename one", group=name)
    return listed
