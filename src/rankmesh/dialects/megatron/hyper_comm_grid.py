"""Drop-in for ``megatron.core.hyper_comm_grid``: named dimensions over a range of ranks, process groups on request.

```
HyperCommGrid([2, 2, 4], ["tp", "cp", "dp"])        the first dimension adjacent
grid.create_pg(["cp", "dp"])                        key "dp-cp": dimensions in reverse order
grid.register_view("expert", [1, 8, 2], ["etp", "ep", "edp"])
grid.create_pg("ep", view="expert")                 key ("expert", ("ep",))
```

Where it differs from Megatron-Core: a rank makes only its own group, after the ranks of the grid agreed on the grid
and the options; names of dimensions are unique; groups are made only in a world of the size that the grid was made
for (WORLD_SIZE counts before torch.distributed does, as there); ``get_pg`` on a rank outside the grid raises, but
under ``install()``.

Whoever puts another function in place of ``torch.distributed.new_subgroups_by_enumeration``, as tests without a world
do, is asked for the groups instead, with the enumeration that Megatron-Core would give.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Any

import torch.distributed as dist

from rankmesh.backend import registries
from rankmesh.backend.default import is_torch_function
from rankmesh.backend.options import options_of
from rankmesh.core.mesh import Mesh
from rankmesh.core.options import GivenOptions, Options
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.dialects.megatron.refusals import NotHere, UnknownName
from rankmesh.dialects.megatron.releases import followed_state
from rankmesh.errors import ConnectError, LayoutError, PlanError
from rankmesh.runtime.connect import connect
from rankmesh.runtime.live import LiveGroups

__all__ = ["HyperCommGrid"]

Key = str | tuple[str, tuple[str, ...]]

# Names of Megatron's module that its own code and its examples use.
_BASE_VIEW_NAME = "base"


@dataclass(frozen=True)
class _RankViewSpec:
    """One factorisation of a grid's ranks: the base, or one that was registered."""

    name: str
    shape: list[int]
    dim_names: list[str]
    shared_dims: list[str]


def _is_process_group_member(pg: object) -> bool:
    """Return whether this rank is in a process group that torch, or a grid, gave it."""
    return pg is not None and pg is not dist.GroupMember.NON_GROUP_MEMBER


class GridTooLarge(LayoutError, RuntimeError):
    """A grid of more ranks than the world has after its offset."""


class HyperCommGrid:
    """Process groups over named dimensions of ranks ``rank_offset`` to ``rank_offset + size - 1``.

    ``create_pg`` makes the groups of a set of dimensions, once; every rank of the grid calls it, in the same order.

    >>> import os
    >>> os.environ["WORLD_SIZE"] = "8"
    >>> grid = HyperCommGrid([2, 4], ["tp", "dp"])
    >>> grid.get_rank_enum("tp"), grid.get_rank_enum(["tp", "dp"])
    ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1, 2, 3, 4, 5, 6, 7]])
    >>> del os.environ["WORLD_SIZE"]
    """

    def __init__(
        self, shape: list[int], dim_names: list[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        _check_named(shape, dim_names, "the grid")
        if rank_offset < 0:
            raise LayoutError(f"rank_offset is {rank_offset}; set it to 0 or more", received=rank_offset)
        self._world_size = _planned_world_size()
        self.rank_offset = rank_offset
        self.size = prod(shape)
        if self.size > self._world_size - rank_offset:
            raise GridTooLarge(
                f"Grid shape {shape} is over sized: it has {self.size} ranks, the world {self._world_size}, of which "
                f"{self._world_size - rank_offset} follow rank_offset {rank_offset}; use fewer, or start more",
                size=self.size,
                world_size=self._world_size,
            )
        self.shape = shape[:]
        self.dim_names = dim_names[:]
        self.backend = backend
        self._pgs: dict[Key, dist.ProcessGroup | None] = {}
        self._mesh = Mesh.of(_sizes(shape, dim_names), offset=rank_offset)
        self._views = {_BASE_VIEW_NAME: _RankViewSpec(_BASE_VIEW_NAME, shape[:], dim_names[:], [])}
        self._live: dict[Key, LiveGroups] = {}

    # -- views ------------------------------------------------------------------------------------------------------

    def register_view(
        self, name: str, shape: list[int], dim_names: list[str], shared_dims: list[str] | None = None
    ) -> None:
        """Register another factorisation of the grid's ranks, with equal groups along each shared dimension.

        Groups over shared dimensions only are one group, whichever view makes it. ``LayoutError`` (a ``ValueError``)
        for sizes or names that do not fit.
        """
        if name in self._views:
            raise LayoutError(f"view {name!r} of this grid is already registered; choose another name", view=name)
        _check_named(shape, dim_names, f"view {name!r}")
        shared = list(shared_dims or ())
        _check_view(name, shape, dim_names, shared, self._views[_BASE_VIEW_NAME])
        try:
            self._mesh = self._mesh.with_view(name, shared=shared, **_sizes(shape, dim_names))
        except LayoutError as error:
            dim = error.values.get("axis")
            raise LayoutError(f"Shared dim {dim!r} has different membership: {error}", **error.values) from error
        self._views[name] = _RankViewSpec(name, shape[:], dim_names[:], shared)

    # -- groups -----------------------------------------------------------------------------------------------------

    def create_pg(self, dims: str | list[str], *, view: str | None = None, **kwargs: Any) -> dist.ProcessGroup | None:
        """Make the groups along these dimensions; this rank's, None on a rank outside the grid.

        ``timeout``, ``pg_options`` and ``group_desc`` as for torch. A second call for the same dimensions is a
        ``KeyError``.
        """
        ordered, key, owner = self._resolve(dims, view)
        if key in self._pgs:
            where = dims if owner is None else f"{dims} for view {owner!r}"
            raise UnknownName(
                f"Process group {where} has already been created; its options cannot be compared; use get_pg()", key=key
            )
        if not is_torch_function("new_subgroups_by_enumeration"):
            ranks = self.get_rank_enum(ordered, view=owner)
            self._pgs[key], _ = dist.new_subgroups_by_enumeration(ranks, backend=self.backend, **kwargs)
        else:
            self._pgs[key] = self._create(ordered, key, owner, kwargs)
        return self._pgs[key]

    def _create(self, dims: list[str], key: Key, view: str | None, options: dict[str, Any]) -> dist.ProcessGroup | None:
        description = options.pop("group_desc", None)
        spec = GroupSpec("pg", dims, view=view, **_options_for(self.backend, options))
        plan = Plan(self._mesh, [spec], world_size=self._world_size, name="hyper_comm_grid")
        live = connect(plan)
        self._live[key] = live
        if "pg" not in live:
            return None
        pg = live["pg"].pg
        if description is not None:
            registries.describe(pg, str(description))
        return pg

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> dist.ProcessGroup | None:
        """Return the group along these dimensions that ``create_pg`` made; ``KeyError`` where it did not.

        ``NotHere`` on a rank outside the grid; None, as Megatron-Core gives there, under ``install()``.
        """
        _, key, _ = self._resolve(dims, view)
        if key not in self._pgs:
            where = key if isinstance(key, str) else f"{dims} for view {key[0]!r}"
            raise UnknownName(f"Process group for {where} hasn't been created; call create_pg() first", key=key)
        if self._pgs[key] is None and followed_state().rankmesh_state.release is None:
            raise NotHere(
                f"this rank has no group {key}: it is outside the grid of ranks {self.rank_offset} to "
                f"{self.rank_offset + self.size - 1}; ask is_current_rank_in_grid() first",
                key=key,
            )
        return self._pgs[key]

    def get_rank_enum(self, dims: str | list[str], *, view: str | None = None) -> list[list[int]]:
        """Return the ranks of every group along these dimensions, ascending."""
        ordered, _ = self._in_view(dims, view)
        return self._mesh.groups(ordered[::-1], view=_view(view), ordered=True).tolist()

    def is_current_rank_in_grid(self) -> bool:
        """Return whether this rank is one of the grid's."""
        return dist.get_rank() in self._mesh.rank_range

    def destroy(self) -> None:
        """Destroy the groups that this grid made, last made first; it can make them again."""
        made, live = self._pgs, self._live
        self._pgs, self._live = {}, {}
        for key in reversed(made):
            if key in live:
                live[key].close()
            elif _is_process_group_member(made[key]):
                dist.destroy_process_group(made[key])

    # -- names, as Megatron-Core's tests ask for them -----------------------------------------------------------------

    def _gen_rank_enum(self, dims: list[str]) -> list[list[int]]:
        """Return every group along these dimensions, the last one named varying fastest."""
        return self._gen_rank_enum_for(self.shape, self.dim_names, dims)

    def _gen_rank_enum_for(self, shape: list[int], dim_names: list[str], dims: list[str]) -> list[list[int]]:
        """Return every group along these dimensions of another factorisation of the grid's ranks."""
        mesh = Mesh.of(_sizes(shape, dim_names), offset=self.rank_offset)
        return mesh.groups(dims[::-1], ordered=True).tolist()

    def _order_dims(self, dims: str | list[str]) -> tuple[list[str], str]:
        """Return the dimensions in reverse order of the grid's, and their key."""
        return self._order_dims_for(self.dim_names, dims)

    def _order_dims_for(self, dim_names: list[str], dims: str | list[str]) -> tuple[list[str], str]:
        """Return the dimensions in reverse order of these names, and their key."""
        wanted = [dims] if isinstance(dims, str) else list(dims)
        unknown = [dim for dim in wanted if dim not in dim_names]
        if unknown:
            raise LayoutError(f"{unknown[0]!r} is not one of the dimensions {dim_names}; use these", name=unknown[0])
        ordered = [name for name in reversed(dim_names) if name in wanted]
        return ordered, "-".join(ordered)

    def _in_view(self, dims: str | list[str], view: str | None) -> tuple[list[str], str]:
        name = _BASE_VIEW_NAME if view is None else view
        if name not in self._views:
            raise UnknownName(
                f"View {name!r} is not registered; the views are {list(self._views)}; use these", key=name
            )
        try:
            return self._order_dims_for(self._views[name].dim_names, dims)
        except LayoutError as error:
            raise LayoutError(f"{error.values['name']!r} is not in view {name!r}: {error}", **error.values) from error

    def _resolve(self, dims: str | list[str], view: str | None) -> tuple[list[str], Key, str | None]:
        """Return the ordered dimensions, the key, and the group's view: None, the base, for shared dimensions."""
        ordered, key = self._in_view(dims, view)
        named = _view(view)
        if named is None:
            return ordered, key, None
        if set(ordered) <= set(self._views[named].shared_dims):
            ordered, key = self._order_dims(ordered)
            return ordered, key, None
        return ordered, (named, tuple(ordered)), named


def _view(view: str | None) -> str | None:
    return None if view == _BASE_VIEW_NAME else view


def _sizes(shape: list[int], dim_names: list[str]) -> dict[str, int]:
    return dict(zip(dim_names, shape, strict=True))


# -- what a grid refuses ----------------------------------------------------------------------------------------------


def _check_named(shape: Sequence[object], dim_names: list[str], what: str) -> None:
    """Refuse sizes and names that are not a factorisation."""
    if len(shape) != len(dim_names):
        raise LayoutError(f"len(shape) {shape} != len(dim_names) {dim_names} of {what}; name each dimension once")
    if len(set(dim_names)) < len(dim_names):
        raise LayoutError(f"{what} has duplicate dim_names {dim_names}; rename one")
    if any(isinstance(size, bool) or not isinstance(size, Integral) or size < 1 for size in shape):
        raise LayoutError(f"the shape of {what} is {shape}; a shape must be positive ints", shape=shape)


def _check_view(name: str, shape: list[int], dim_names: list[str], shared: list[str], base: _RankViewSpec) -> None:
    """Refuse a view of another size than the base, and a shared dimension that not both have."""
    if prod(shape) != prod(base.shape):
        raise LayoutError(
            f"view {name!r} of {shape} has {prod(shape)} ranks, but the grid size is {prod(base.shape)}, and both "
            "are over the same ranks; change its shape",
            size=prod(base.shape),
        )
    if len(set(shared)) < len(shared):
        raise LayoutError(f"view {name!r} has duplicate shared_dims {shared}; name each once", received=shared)
    for dim in shared:
        for owner, names in (("the base view", base.dim_names), ("the view's dim_names", dim_names)):
            if dim not in names:
                raise LayoutError(
                    f"Shared dim {dim!r} of view {name!r} is not in {owner} {names}; share what both have", dim=dim
                )


def _planned_world_size() -> int:
    """Return the world that a grid is for: WORLD_SIZE, else the live one."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if dist.is_initialized():
        return dist.get_world_size()
    raise ConnectError(
        "there is no world for a grid: WORLD_SIZE is not set, and torch.distributed is not initialised; do one of both"
    )


def _options_for(backend: str | None, given: Mapping[str, Any]) -> GivenOptions:
    """Return the options of torch's call as a spec's."""
    unknown = sorted(set(given) - {"timeout", "pg_options"})
    if unknown:
        raise PlanError(
            f"create_pg() has no option {unknown[0]!r}; it takes timeout, pg_options and group_desc", option=unknown[0]
        )
    options = given.get("pg_options")
    asked = Options() if options is None else options_of(options)
    return Options(backend=backend, timeout=given.get("timeout")).over(asked).to_dict()
