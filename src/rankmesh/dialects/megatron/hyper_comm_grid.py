"""Drop-in for ``megatron.core.hyper_comm_grid``: named dimensions over a span of ranks, process groups on request.

```
HyperCommGrid([2, 2, 4], ["tp", "cp", "dp"])        the first dimension adjacent
grid.create_pg(["cp", "dp"])                        key "dp-cp": dimensions in reverse order
grid.register_view("expert", [1, 8, 2], ["etp", "ep", "edp"])
grid.create_pg("ep", view="expert")                 key ("expert", ("ep",))
```

Where it differs from Megatron-Core: a rank makes its own group alone, after the ranks of the grid agreed on the grid
and the options; names of dimensions are unique; groups are made only in a world of the size that the grid was made
for (WORLD_SIZE counts before torch.distributed does, as there); ``get_pg`` on a rank outside the grid raises.

Whoever puts another function in place of ``torch.distributed.new_subgroups_by_enumeration``, as tests without a world
do, is asked for the groups instead, with the enumeration that Megatron-Core would give.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import torch.distributed as dist

from rankmesh.dialects.megatron.refusals import NotHere, UnknownName
from rankmesh.errors import ConnectError, LayoutError, PlanError
from rankmesh.groups import torch_private
from rankmesh.groups.connect import connect
from rankmesh.groups.live import LiveGroups
from rankmesh.layout.mesh import Mesh
from rankmesh.plan.options import Options
from rankmesh.plan.plan import Plan
from rankmesh.plan.spec import GroupSpec

__all__ = ["HyperCommGrid"]

BASE = "base"
Key = str | tuple[str, tuple[str, ...]]

_TORCHS_OWN = dist.new_subgroups_by_enumeration

# How often a plan was connected in this process: two grids of one shape have groups of their own.
_uses: Counter[str] = Counter()


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
        _check_named(shape, dim_names, "grid")
        if rank_offset < 0:
            raise LayoutError(f"received rank_offset {rank_offset}; it is 0 or more; raise it", received=rank_offset)
        self._world_size = _world_size()
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
        self._pgs: dict[Key, Any] = {}
        self._mesh = _mesh(shape, dim_names, rank_offset)
        self._shared: dict[str, tuple[str, ...]] = {}
        self._live: dict[Key, LiveGroups] = {}

    # -- views ------------------------------------------------------------------------------------------------------

    def register_view(
        self, name: str, shape: list[int], dim_names: list[str], shared_dims: list[str] | None = None
    ) -> None:
        """Another factorisation of the grid's ranks; each shared dimension is proved to give the same groups.

        Groups over shared dimensions alone are one group, whichever view makes it. ``LayoutError`` (a ``ValueError``)
        for sizes or names that do not fit.
        """
        if name == BASE or name in self._mesh.views:
            raise LayoutError(
                f"received a second view named {name!r}; each has a name of its own; rename it", view=name
            )
        _check_named(shape, dim_names, f"view {name!r}")
        shared = tuple(shared_dims or ())
        if len(set(shared)) < len(shared):
            raise LayoutError(f"received shared_dims {shared} with a name twice; name each once", received=shared)
        for dim in shared:
            if dim not in self.dim_names or dim not in dim_names:
                raise LayoutError(
                    f"received shared dimension {dim!r} of view {name!r}; the grid has {self.dim_names}, the view "
                    f"{dim_names}; share what both have",
                    dim=dim,
                )
        self._mesh = self._mesh.with_view(name, shared=shared, **dict(zip(dim_names, shape, strict=True)))
        self._shared[name] = shared

    # -- groups -----------------------------------------------------------------------------------------------------

    def create_pg(self, dims: str | list[str], *, view: str | None = None, **kwargs: Any) -> dist.ProcessGroup | None:
        """Make the groups along these dimensions; this rank's, None on a rank outside the grid.

        ``timeout``, ``pg_options`` and ``group_desc`` as for torch. A second call for the same dimensions is a
        ``KeyError``.
        """
        ordered, key, owner = self._resolve(dims, view)
        if key in self._pgs:
            raise UnknownName(
                f"Process group {dims} has already been created; its options cannot be compared; use get_pg()", key=key
            )
        if dist.new_subgroups_by_enumeration is not _TORCHS_OWN:
            ranks = self.get_rank_enum(ordered, view=owner)
            self._pgs[key], _ = dist.new_subgroups_by_enumeration(ranks, backend=self.backend, **kwargs)
        else:
            self._pgs[key] = self._create(ordered, key, owner, kwargs)
        return self._pgs[key]  # type: ignore[no-any-return]

    def _create(self, dims: list[str], key: Key, view: str | None, options: dict[str, Any]) -> Any:
        description = options.pop("group_desc", None)
        spec = GroupSpec("pg", dims, view=view, **_options(self.backend, options))
        once = Plan(self._mesh, [spec], world_size=self._world_size)
        _uses[once.digest] += 1
        plan = Plan(self._mesh, [spec], world_size=self._world_size, name=f"hyper_comm_grid/{_uses[once.digest]}")
        live = connect(plan)
        self._live[key] = live
        if "pg" not in live:
            return None
        pg = live["pg"].pg
        if description is not None:
            torch_private.describe(pg, str(description))
        return pg

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> dist.ProcessGroup:
        """The group along these dimensions that ``create_pg`` made; ``KeyError`` where it did not.

        ``NotHere`` on a rank outside the grid, where Megatron-Core gives None.
        """
        _, key, _ = self._resolve(dims, view)
        if key not in self._pgs:
            raise UnknownName(f"Process group for {key} hasn't been created; call create_pg() first", key=key)
        if self._pgs[key] is None:
            raise NotHere(
                f"received a request for {key} on a rank outside the grid of ranks {self.rank_offset} to "
                f"{self.rank_offset + self.size - 1}; ask is_current_rank_in_grid() first",
                key=key,
            )
        return self._pgs[key]  # type: ignore[no-any-return]

    def get_rank_enum(self, dims: str | list[str], *, view: str | None = None) -> list[list[int]]:
        """The ranks of every group along these dimensions, ascending."""
        ordered, _ = self._order_dims_for(self._names(view), dims)
        return self._mesh.groups(ordered[::-1], view=_view(view), ordered=True).tolist()

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank is one of the grid's."""
        return dist.get_rank() in self._mesh.span

    def destroy(self) -> None:
        """Destroy the groups that this grid made, last made first; it can make them again."""
        made, live = dict(self._pgs), dict(self._live)
        self._pgs.clear()
        self._live.clear()
        for key in reversed(made):
            if key in live:
                live[key].close()
            elif made[key] is not None and made[key] is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(made[key])

    # -- names, as Megatron-Core's tests ask for them -----------------------------------------------------------------

    def _gen_rank_enum(self, dims: list[str]) -> list[list[int]]:
        """Every group along these dimensions, the last one named varying fastest."""
        return self._gen_rank_enum_for(self.shape, self.dim_names, dims)

    def _gen_rank_enum_for(self, shape: list[int], dim_names: list[str], dims: list[str]) -> list[list[int]]:
        """The same for another factorisation of the grid's ranks."""
        return _mesh(shape, dim_names, self.rank_offset).groups(dims[::-1], ordered=True).tolist()

    def _order_dims(self, dims: str | list[str]) -> tuple[list[str], str]:
        """The dimensions in reverse order of the grid's, and their key."""
        return self._order_dims_for(self.dim_names, dims)

    def _order_dims_for(self, dim_names: list[str], dims: str | list[str]) -> tuple[list[str], str]:
        """The same for other names."""
        wanted = [dims] if isinstance(dims, str) else list(dims)
        unknown = [dim for dim in wanted if dim not in dim_names]
        if unknown:
            raise LayoutError(
                f"received dimension {unknown[0]!r}; the dimensions are {dim_names}; use these", name=unknown[0]
            )
        ordered = [name for name in reversed(dim_names) if name in wanted]
        return ordered, "-".join(ordered)

    def _names(self, view: str | None) -> list[str]:
        if _view(view) is None:
            return self.dim_names
        if view not in self._mesh.views:
            raise UnknownName(f"received view {view!r}; the views are {[BASE, *self._mesh.views]}; use these", key=view)
        return list(self._mesh.views[view].axes)

    def _resolve(self, dims: str | list[str], view: str | None) -> tuple[list[str], Key, str | None]:
        """Ordered dimensions, the key, and the view that the group belongs to: base for shared dimensions."""
        ordered, key = self._order_dims_for(self._names(view), dims)
        named = _view(view)
        if named is None:
            return ordered, key, None
        if set(ordered) <= set(self._shared[named]):
            ordered, key = self._order_dims(ordered)
            return ordered, key, None
        return ordered, (named, tuple(ordered)), named


def _view(view: str | None) -> str | None:
    return None if view == BASE else view


def _mesh(shape: list[int], dim_names: list[str], offset: int) -> Mesh:
    sizes = dict(zip(dim_names, shape, strict=True))
    return Mesh(offset=offset, rank_map=None, **sizes)


def _check_named(shape: list[int], dim_names: list[str], what: str) -> None:
    if len(shape) != len(dim_names):
        raise LayoutError(
            f"received a {what} with len(shape) {shape} != len(dim_names) {dim_names}; name each dimension once"
        )
    if len(set(dim_names)) < len(dim_names):
        raise LayoutError(f"received a {what} with dimensions {dim_names}; each has a name of its own; rename one")


def _world_size() -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    raise ConnectError(
        "received no world for a grid: WORLD_SIZE is not set, and torch.distributed is not initialised; do one of both"
    )


def _options(backend: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of torch's call as a spec's."""
    unknown = sorted(set(given) - {"timeout", "pg_options"})
    if unknown:
        raise PlanError(
            f"received option {unknown[0]!r}; create_pg takes timeout, pg_options and group_desc", option=unknown[0]
        )
    options = given.get("pg_options")
    asked = Options() if options is None else torch_private.options_of(options)
    return Options(backend=backend, timeout=given.get("timeout")).over(asked).to_dict()
