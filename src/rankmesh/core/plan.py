"""Plans: the ordered, named groups that one job wants. Identical on every rank, saved as JSON, known by a digest.

```
Mesh ─┐
      ├─ Plan ── of(rank)      the groups of one rank
specs ┘      ├── groups(name)  one kind on the whole world
             ├── digest        the same on every rank, or the ranks do not start
             └── to_json()     and back: Plan.from_json
```

>>> from rankmesh.core import Mesh, ends
>>> plan = Plan(Mesh(tp=2, pp=2), [GroupSpec("tp"), GroupSpec("pp"), GroupSpec("embd", axes="pp", pick=ends)])
>>> plan.of(1)["tp"].ranks, plan.sharing
((0, 1), [('tp',), ('pp', 'embd')])
>>> Plan.from_json(plan.to_json()) == plan
True
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING

from rankmesh.core.axes import array, integer
from rankmesh.core.groups import Groups
from rankmesh.core.local import LocalGroups
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import Options
from rankmesh.core.saved import PlanData, digest_of, dump, load
from rankmesh.core.spec import GroupSpec, check_specs
from rankmesh.errors import PlanError, UnknownGroup, quoted

if TYPE_CHECKING:
    from rankmesh.core.explain import RankFacts
    from rankmesh.core.job import Job

__all__ = ["Plan"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Plan:
    """The groups that a job wants over one mesh; frozen, equal when equivalent.

    ``mesh``          the mesh that the groups are cut from
    ``specs``         the kinds of group in order, their options resolved
    ``world_size``    the size of the world that the plan is for. None: the world that the mesh spans, or, for the
                      ranks inside it, a larger one; a recipe always gives it
    ``fixed_world``   whether the world size was given, so that a live world of another size is refused
    ``options``       for every group, unless its view or the group itself has others
    ``view_options``  for every group of one view; groups that are added later inherit both
    ``name``          tells two plans of one job apart
    """

    mesh: Mesh
    specs: tuple[GroupSpec, ...]
    world_size: int
    fixed_world: bool
    options: Options
    view_options: Mapping[str, Options]
    name: str

    def __init__(
        self,
        mesh: Mesh,
        specs: Iterable[GroupSpec],
        *,
        world_size: int | None = None,
        options: Options | None = None,
        view_options: Mapping[str, Options] | None = None,
        name: str = "",
    ) -> None:
        of_views = {
            view: _options(of_view, f"options of view {view!r}") for view, of_view in (view_options or {}).items()
        }
        _check_mesh(mesh)
        inherited = _options(options, "options")
        self._hold(mesh, _resolved(specs, mesh, inherited, of_views), world_size, inherited, of_views, name)

    def _hold(
        self,
        mesh: Mesh,
        specs: tuple[GroupSpec, ...],
        world_size: int | None,
        options: Options,
        view_options: Mapping[str, Options],
        name: str,
    ) -> None:
        """Check and keep these values, whose specs inherit nothing more."""
        for view in view_options:
            mesh.view(view)
        if not isinstance(name, str):
            raise PlanError(f"the name of a plan is {quoted(name)}; give a word, such as 'encoder'", received=name)
        vars(self).update(
            mesh=mesh,
            specs=specs,
            world_size=mesh.rank_range.stop if world_size is None else _world(world_size, mesh),
            fixed_world=world_size is not None,
            options=options,
            view_options=MappingProxyType(dict(view_options)),
            name=name,
        )
        self._kinds  # noqa: B018  - a spec that does not fit the mesh is refused here, not at its first use

    def _with(
        self,
        *,
        mesh: Mesh | None = None,
        specs: tuple[GroupSpec, ...] | None = None,
        world_size: int | EllipsisType | None = ...,
        options: Options | None = None,
        view_options: Mapping[str, Options] | None = None,
        name: str | None = None,
    ) -> Plan:
        """Return the plan with these values, whose specs inherit nothing more."""
        other = object.__new__(Plan)
        other._hold(
            self.mesh if mesh is None else mesh,
            self.specs if specs is None else specs,
            (self.world_size if self.fixed_world else None) if world_size is ... else world_size,
            self.options if options is None else options,
            self.view_options if view_options is None else view_options,
            self.name if name is None else name,
        )
        return other

    @classmethod
    def of_job(cls, job: Job, specs: Mapping[str, Iterable[GroupSpec]]) -> dict[str, Plan]:
        """One plan for each mesh of a job, named after it, for the world of the job.

        >>> from rankmesh.core import Job, Mesh
        >>> job = Job(world_size=6, encoder=Mesh(dp=2), llm=Mesh(tp=2, dp=2, offset=2))
        >>> Plan.of_job(job, {"encoder": [GroupSpec("dp")], "llm": [GroupSpec("tp")]})["llm"].of(4)["tp"].ranks
        (4, 5)
        """
        return {name: cls(job[name], chosen, world_size=job.world_size, name=name) for name, chosen in specs.items()}

    @cached_property
    def _kinds(self) -> dict[str, Groups]:
        return {spec.name: spec.groups(self.mesh) for spec in self.specs}

    @property
    def kinds(self) -> dict[str, Groups]:
        """All groups of each kind, by name in order."""
        return dict(self._kinds)

    def groups(self, name: str) -> Groups:
        """Return all groups of one kind: a sequence of groups; ``array`` is the whole world."""
        try:
            return self._kinds[name]
        except (KeyError, TypeError):
            raise UnknownGroup(name, self._kinds) from None

    def spec(self, name: str) -> GroupSpec:
        """Return the spec of one kind."""
        self.groups(name)
        return self._specs[name]

    @cached_property
    def _specs(self) -> dict[str, GroupSpec]:
        return {spec.name: spec for spec in self.specs}

    def of(self, rank: int) -> LocalGroups:
        """Return the groups that one rank is in, by name; O(groups · axes), whatever the size of the world."""
        number = integer(rank, "rank", least=0)
        if number >= self.world_size:
            self.mesh.rank_range.position(number)
        return LocalGroups(self, number)

    @cached_property
    def sharing(self) -> list[tuple[str, ...]]:
        """The kinds in classes that use one communicator: the same groups on every rank, with the same options.

        The first kind of a class is canonical: the others use its process groups. So each rank finds who makes which
        group from the plan alone.

        ```
        dp_cp     gloo        canonical
        intra     gloo        the same groups: uses dp_cp's
        dp_ag     gloo        the same groups, and overlap class 'gather': its own
        ```
        """
        classes: dict[Hashable, list[str]] = {}
        for spec in self.specs:
            shares = spec.options.share is not False
            key = (self._kinds[spec.name].partition, spec.options) if shares else spec.name
            classes.setdefault(key, []).append(spec.name)
        return [tuple(names) for names in classes.values()]

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Map each kind to the first kind that shares its process groups, or to itself."""
        return {name: names[0] for names in self.sharing for name in names}

    def explain(self, rank: int) -> str:
        """One rank in words: coordinate, groups, neighbours, and why."""
        from rankmesh.core.explain import explain

        return explain(self, rank)

    def describe(self, rank: int) -> RankFacts:
        """Return the facts of ``explain`` as plain data."""
        from rankmesh.core.explain import describe

        return describe(self, rank)

    # -- other plans from this one ------------------------------------------------------------------------------

    def replace(
        self,
        *,
        mesh: Mesh | None = None,
        rank_map: Iterable[int] | EllipsisType | None = ...,
        specs: Iterable[GroupSpec] | None = None,
        world_size: int | EllipsisType | None = ...,
        name: str | None = None,
    ) -> Plan:
        """Return a plan with these values replaced.

        ``rank_map`` is the global rank at each position of the mesh, None for ascending ranks. Kinds that the plan
        already has keep their options; new kinds inherit the plan's options. ``world_size=None`` takes the size of the
        mesh.

        >>> from rankmesh.core import Mesh
        >>> plan = Plan(Mesh(tp=2, dp=2), [GroupSpec("tp"), GroupSpec("dp")])
        >>> plan.replace(rank_map=(0, 2, 1, 3)).groups("tp").tolist()
        [[0, 2], [1, 3]]
        """
        of = self.mesh if mesh is None else mesh
        _check_mesh(of)
        placed = of if rank_map is ... else of.replace(rank_map=rank_map)
        chosen = None if specs is None else _resolved(specs, placed, self.options, self.view_options, self.specs)
        return self._with(mesh=placed, specs=chosen, world_size=world_size, name=name)

    def with_groups(self, *specs: GroupSpec) -> Plan:
        """Return the plan with more kinds of group, last in its order; they inherit its options, and so may share.

        >>> from rankmesh.core import Mesh
        >>> plan = Plan(Mesh(dp=2, cp=2), [GroupSpec("dp_cp", "dp-cp")], options=Options(timeout=60))
        >>> plan.with_groups(GroupSpec("zero", "dp-cp")).sharing
        [('dp_cp', 'zero')]
        """
        return self.replace(specs=(*self.specs, *specs))

    def without(self, *names: str) -> Plan:
        """Return the plan without these kinds of group."""
        for name in names:
            self.groups(name)
        return self.replace(specs=[spec for spec in self.specs if spec.name not in names])

    def with_options(self, options: Options, *names: str) -> Plan:
        """Return a plan whose kinds ``names`` have these options; without names, every kind and every later kind.

        >>> from rankmesh.core import Mesh
        >>> Plan(Mesh(tp=2), [GroupSpec("tp")]).with_options(Options(timeout=600)).specs
        (GroupSpec('tp', timeout=600.0),)
        """
        asked = _options(options, "options")
        for name in names:
            self.groups(name)
        specs = tuple(
            spec.with_options(asked.over(spec.options).effective()) if not names or spec.name in names else spec
            for spec in self.specs
        )
        if names:
            return self._with(specs=specs)
        of_views = {view: asked.over(of_view) for view, of_view in self.view_options.items()}
        return self._with(specs=specs, options=asked.over(self.options), view_options=of_views)

    # -- value semantics ----------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that are equal on two ranks if and only if their plans are."""
        return digest_of(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the plan as JSON text with a schema version."""
        return dump(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that ``to_json`` wrote. Raises ``PlanError`` for another text, and for a newer schema."""
        return load(text, cls._from_dict)

    @classmethod
    def _from_dict(cls, data: PlanData) -> Plan:
        specs = [GroupSpec.from_dict(spec) for spec in array(data["groups"], "groups")]
        plan = cls(Mesh.from_dict(data["mesh"]), specs, world_size=data.get("world_size"), name=data.get("name", ""))
        of_views = {view: Options(**options) for view, options in data.get("view_options", {}).items()}
        # The groups have what they inherited; only groups to come inherit these.
        return plan._with(options=Options(**data.get("options", {})), view_options=of_views)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[object, ...]:
        return Plan.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        return f"Plan({self.mesh!r}, {len(self.specs)} kinds: {' '.join(self._kinds)})"


def _resolved(
    specs: Iterable[GroupSpec],
    mesh: Mesh,
    options: Options,
    view_options: Mapping[str, Options],
    known: tuple[GroupSpec, ...] = (),
) -> tuple[GroupSpec, ...]:
    """Return the specs with what they inherit; those that are ``known`` have it."""

    def inherited(view: str | None) -> Options:
        of_view = view_options.get(view or "")
        return options if of_view is None else of_view.over(options)

    return tuple(spec if spec in known else spec.on(mesh, inherited(spec.view)) for spec in check_specs(specs))


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, Mesh):
        raise PlanError(f"the mesh of a plan is {quoted(mesh)}; give a Mesh, such as Mesh(tp=2, dp=4)")


def _options(options: Options | None, what: str) -> Options:
    if options is None or isinstance(options, Options):
        return options or Options()
    raise PlanError(f"{what} is {quoted(options)}; give Options, such as Options(timeout=600)", received=options)


def _world(world_size: int, mesh: Mesh) -> int:
    size = integer(world_size, "world_size", least=1)
    if mesh.rank_range.stop > size:
        raise PlanError(
            f"the mesh covers {mesh.rank_range}, more than a world of {size} has; lower its offset or a size, or raise "
            f"world_size to {mesh.rank_range.stop}",
            world_size=size,
            stop=mesh.rank_range.stop,
        )
    return size
