"""Meshes: named axes laid over global ranks, consecutive ones but for slices of other meshes.

    rank = offset + Σ coordinate[a] · stride[a]        stride[a] = Π sizes of the axes before a

```
Mesh(tp=2, dp=2, pp=2)         pp=0            pp=1
                              tp=0 tp=1       tp=0 tp=1
                        dp=0    0    1          4    5
                        dp=1    2    3          6    7
```

The first axis varies fastest: ranks next to each other differ in ``tp`` here, which is where the fastest links are.
Experts see these ranks through another factorisation, a *view*, whose shared axes are checked to be equal:

>>> mesh = Mesh(tp=2, cp=2, dp=4, pp=2).with_view("expert", etp=1, ep=8, edp=2, pp=2, shared=("pp",))
>>> mesh.size, mesh.strides
(32, {'tp': 1, 'cp': 2, 'dp': 4, 'pp': 16})
>>> mesh.groups("dp-cp").of(13), mesh.groups("ep", view="expert").of(13)
(Group(1, 3, 5, 7, 9, 11, 13, 15), Group(8, 9, 10, 11, 12, 13, 14, 15))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from math import prod
from types import EllipsisType
from typing import TypedDict

from rankmesh.core.axes import AxesLike, array, axis_name, axis_names, axis_size, fill, find, integer, parse_axes
from rankmesh.core.groups import Groups
from rankmesh.core.rank_range import RankRange
from rankmesh.core.strided import Strided
from rankmesh.errors import LayoutError, first_line, listed, quoted

__all__ = ["AxesData", "Mesh", "MeshData"]


class AxesData(TypedDict, total=False):
    """The axes of a mesh or a view as plain data: pairs of name and size; ``parts`` replace axes that were split."""

    axes: list[list[str | int]]
    parts: dict[str, list[str]]


class MeshData(AxesData, total=False):
    """A mesh as plain data; ``consecutive`` is False where ranks between the first and the last are left out."""

    offset: int
    rank_map: list[int]
    consecutive: bool
    views: dict[str, AxesData]


class Mesh:
    """Named axes over ranks, from ``offset`` on; frozen, hashable, equal when equivalent.

    Keyword order is rank order, the first axis adjacent. ``rank_map`` lists the global rank at each position, for
    clusters whose rank numbers do not follow the wiring; the identity map is the same mesh as no map. The ranks are
    consecutive, but for a ``slice`` of another mesh.

    Raises ``LayoutError`` for sizes that are not integers of at least 1, and for a map that is not a permutation.
    """

    _sizes: dict[str, int]
    _rank_range: RankRange
    _parts: dict[str, tuple[str, ...]]
    _views: dict[str, Mesh]
    _pairs: dict[str, tuple[int, int]]

    def __init__(self, /, *args: object, offset: int = 0, rank_map: Iterable[int] | None = None, **sizes: int) -> None:
        if args:
            raise LayoutError(
                f"Mesh({', '.join(map(quoted, args))}) does not name its axes; write name=size, such as "
                "Mesh(tp=2, dp=4), or give a text to Mesh.parse and a mapping to Mesh.of",
                received=args,
            )
        checked = {axis_name(name): axis_size(name, size) for name, size in sizes.items()}
        if not checked:
            raise LayoutError("the mesh has no axes; give at least one, such as Mesh(dp=8)")
        self._set(checked, RankRange.of(offset, prod(checked.values()), rank_map), {}, {})

    def _set(
        self, sizes: dict[str, int], rank_range: RankRange, parts: dict[str, tuple[str, ...]], views: dict[str, Mesh]
    ) -> Mesh:
        self._sizes, self._rank_range, self._parts, self._views = sizes, rank_range, parts, views
        self._pairs, stride = {}, 1
        for name, size in sizes.items():
            self._pairs[name] = (size, stride)
            stride *= size
        return self

    def _with(
        self,
        *,
        sizes: dict[str, int] | None = None,
        rank_range: RankRange | None = None,
        parts: dict[str, tuple[str, ...]] | None = None,
        views: dict[str, Mesh] | None = None,
    ) -> Mesh:
        """Return the mesh with these checked values in place of its own."""
        return object.__new__(Mesh)._set(
            self._sizes if sizes is None else sizes,
            self._rank_range if rank_range is None else rank_range,
            self._parts if parts is None else parts,
            self._views if views is None else views,
        )

    @classmethod
    def of(cls, sizes: Mapping[str, int], *, offset: int = 0, rank_map: Iterable[int] | None = None) -> Mesh:
        """Return the mesh of sizes that a program holds in a mapping, in its order.

        >>> Mesh.of({"tp": 2, "dp": 4})
        Mesh(tp=2, dp=4)
        """
        if not isinstance(sizes, Mapping):
            raise LayoutError(
                f"the sizes of a mesh are {quoted(sizes)}; give a mapping, such as {{'tp': 2, 'dp': 4}}", received=sizes
            )
        return cls(offset=offset, rank_map=rank_map, **{axis_name(name): size for name, size in sizes.items()})

    @classmethod
    def parse(
        cls, text: str, *, world_size: int | None = None, offset: int = 0, rank_map: Iterable[int] | None = None
    ) -> Mesh:
        """Return the mesh of an axis string; with ``world_size``, one size may be ``*``: it is inferred.

        >>> Mesh.parse("tp=2,cp=2,dp=*,pp=2", world_size=32)
        Mesh(tp=2, cp=2, dp=4, pp=2)
        """
        start = integer(offset, "offset", least=0)
        total = None if world_size is None else integer(world_size, "world_size", least=1)
        available = None if total is None else integer(total - start, "world_size minus offset", least=1)
        return cls.of(fill(parse_axes(text), available, "world_size"), offset=start, rank_map=rank_map)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def axes(self) -> dict[str, int]:
        """The size of each axis, fastest first."""
        return dict(self._sizes)

    @property
    def strides(self) -> dict[str, int]:
        """The distance in positions between neighbours along each axis."""
        return {name: stride for name, (_, stride) in self._pairs.items()}

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return self._rank_range.size

    @property
    def offset(self) -> int:
        """The lowest global rank."""
        return self._rank_range.offset

    @property
    def rank_range(self) -> RankRange:
        """The global ranks that the mesh covers, and their order."""
        return self._rank_range

    @property
    def rank_map(self) -> tuple[int, ...] | None:
        """The global rank at each position, None when they ascend."""
        return self._rank_range.rank_map

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The axes that were split, with the sub-axes that replace each."""
        return dict(self._parts)

    @property
    def views(self) -> dict[str, Mesh]:
        """The other factorisations of the same ranks, by name."""
        return dict(self._views)

    def view(self, name: str | None) -> Mesh:
        """Return the factorisation of one view as a mesh of its own; None is the mesh itself."""
        return self if name is None else self._views[find(name, self._views, "view")]

    # -- ranks and coordinates ----------------------------------------------------------------------------------

    def coordinate(self, rank: int, *, view: str | None = None) -> dict[str, int]:
        """Return the position of a global rank along each axis (of a view).

        >>> Mesh(tp=2, dp=2, offset=4).coordinate(6)
        {'tp': 0, 'dp': 1}
        """
        mesh = self.view(view)
        position = self._rank_range.position(rank)
        return {name: position // stride % size for name, (size, stride) in mesh._pairs.items()}

    def rank(self, /, *, view: str | None = None, **coordinate: int) -> int:
        """Return the global rank at a coordinate; axes of size 1 may be left out.

        >>> Mesh(tp=2, dp=2, offset=4).rank(tp=0, dp=1)
        6
        """
        mesh = self.view(view)
        for name in coordinate:
            find(name, mesh._sizes)
        position = 0
        for name, (size, stride) in mesh._pairs.items():
            position += stride * _digit(name, size, coordinate)
        return self._rank_range.rank(position)

    def groups(self, axes: AxesLike, *, view: str | None = None, ordered: bool = False) -> Groups:
        """Return all groups along a set of axes: ``"dp-cp"``, or a sequence of names.

        The members of a group are in the order of the mesh, whatever the order of request, so ``"dp-cp"`` and
        ``"cp-dp"`` are one kind. With ``ordered=True`` the first axis *named* varies fastest instead.

        >>> Mesh(cp=2, dp=2).groups("dp-cp").tolist(), Mesh(cp=2, dp=2).groups("dp-cp", ordered=True).tolist()
        ([[0, 1, 2, 3]], [[0, 2, 1, 3]])
        """
        mesh = self.view(view)
        pairs = mesh._pairs
        chosen = mesh.axis_pairs(axes, ordered=ordered)
        return Groups(
            rank_range=self._rank_range,
            axes=tuple(chosen),
            members=Strided(tuple(chosen.values())),
            fixed={name: pair for name, pair in pairs.items() if name not in chosen},
        )

    def axis_pairs(self, axes: AxesLike, *, ordered: bool = False) -> dict[str, tuple[int, int]]:
        """Size and stride of each of these axes, in the order of the mesh, or as named; split ones by sub-axes.

        >>> Mesh(tp=2, cp=4).split("cp", inner=2, outer=...).axis_pairs("cp-tp", ordered=True)
        {'inner': (2, 2), 'outer': (2, 4), 'tp': (2, 1)}
        """
        named = self._leaves(axis_names(axes))
        return {name: self._pairs[name] for name in (named if ordered else self._sizes) if ordered or name in named}

    def slice(self, axes: AxesLike, of: int, *, view: str | None = None) -> Mesh:
        """Return the sub-mesh of some axes through rank ``of``; the other axes are fixed at this rank's coordinate.

        Axes keep the order of the mesh. The ranks need not be consecutive: they equal ``groups(axes).of(rank)``.

        >>> mesh = Mesh(tp=2, dp=2, pp=2)
        >>> mesh.slice("tp-dp", of=5), mesh.slice("dp-pp", of=5).groups("dp").tolist()
        (Mesh(tp=2, dp=2, offset=4), [[1, 3], [5, 7]])
        """
        chosen = self.view(view).axis_pairs(axes)
        ranks = self.groups(axes, view=view).of(of).array
        sizes = {name: size for name, (size, _) in chosen.items()}
        return self._with(sizes=sizes, rank_range=RankRange.at(ranks), parts={}, views={})

    def __getitem__(self, at: str | tuple[str | int, ...]) -> Mesh:
        """Return the sub-mesh at positions along some axes, each axis followed by its position.

        >>> mesh = Mesh(tp=2, dp=2, pp=2)
        >>> mesh["pp", 1], mesh["pp", 1, "tp", 0].groups("dp").tolist()
        (Mesh(tp=2, dp=2, offset=4), [[4, 6]])
        """
        pairs = at if isinstance(at, tuple) else (at,)
        fixed = dict(zip(axis_names(pairs[::2]), pairs[1::2], strict=False))  # type: ignore[arg-type]  # it checks them
        kept = [name for name in self._sizes if name not in fixed]
        if len(pairs) % 2 or not kept:
            raise LayoutError(
                f"mesh[{', '.join(map(quoted, pairs))}] is not a sub-mesh; give a position behind each axis that is "
                "fixed, such as mesh['pp', 0], and leave one axis; mesh.slice('tp-dp', of=rank) names those that stay",
                received=at,
            )
        return self.slice(kept, of=self.rank(**dict.fromkeys(kept, 0), **fixed))  # type: ignore[arg-type]  # checked

    def flatten(self, axis: str, /, *axes: str, name: str | None = None) -> Mesh:
        """Join axes into one, in place of the first of them in the mesh; views do not carry over.

        Its name is theirs, joined by underscores, unless ``name`` is given. Ranks between axes that are not neighbours
        move behind them: the mesh then has a rank map.

        >>> Mesh(tp=2, cp=2, dp=2).flatten("dp", "cp"), Mesh(tp=2, cp=2, dp=2).flatten("tp", "dp").rank_map
        (Mesh(tp=2, dp_cp=4), (0, 1, 4, 5, 2, 3, 6, 7))
        """
        chosen = self.axis_pairs((axis, *axes))
        first = next(iter(chosen))
        joined = "_".join((axis, *axes)) if name is None else name
        rest = {other: {other: pair} for other, pair in self._pairs.items() if other not in chosen}
        blocks = [
            (joined, chosen) if other == first else (other, rest[other])
            for other in self._sizes
            if other == first or other in rest
        ]
        positions = Strided(tuple(pair for _, along in blocks for pair in along.values())).values()
        return self._with(
            sizes=_unique((other, prod(size for size, _ in along.values())) for other, along in blocks),
            rank_range=RankRange.at(self._rank_range.ranks(positions)),
            parts={},
            views={},
        )

    def rename(self, **names: str) -> Mesh:
        """Give axes other names, in the views that share them too.

        >>> Mesh(tp=2, dp=4).rename(dp="data")
        Mesh(tp=2, data=4)
        """
        for axis in names:
            find(axis, self._sizes)

        def renamed(mesh: Mesh, views: dict[str, Mesh]) -> Mesh:
            sizes = _unique((names.get(axis, axis), size) for axis, size in mesh._sizes.items())
            parts = {axis: tuple(names.get(leaf, leaf) for leaf in leaves) for axis, leaves in mesh._parts.items()}
            if taken := sorted(sizes.keys() & parts.keys()):
                raise LayoutError(
                    f"{taken[0]!r} names the axis that was split into {', '.join(parts[taken[0]])}; use another name",
                    axis=taken[0],
                )
            return mesh._with(sizes=sizes, parts=parts, views=views)

        return renamed(self, {view: renamed(other, {}) for view, other in self._views.items()})

    def _leaves(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names with every split axis replaced by its sub-axes."""
        if not self._parts:
            return tuple([find(name, self._sizes) for name in names])
        leaves: list[str] = []
        for name in names:
            if name in self._parts:
                leaves.extend(self._leaves(self._parts[name]))
            else:
                leaves.append(find(name, (*self._sizes, *self._parts)))
        return axis_names(leaves)

    # -- other meshes from this one -----------------------------------------------------------------------------

    def replace(self, *, offset: int | None = None, rank_map: Iterable[int] | EllipsisType | None = ...) -> Mesh:
        """Lay the axes and views over other ranks; a map that is not given moves along with the offset.

        >>> Mesh(tp=2, dp=2).replace(offset=4, rank_map=(4, 6, 5, 7)).groups("tp").tolist()
        [[4, 6], [5, 7]]
        """
        start = self.offset if offset is None else integer(offset, "offset", least=0)
        moved = self._rank_range.moved(start)
        rank_range = moved if rank_map is ... else moved.ordered(rank_map)
        return self._with(
            rank_range=rank_range, views={name: view._with(rank_range=rank_range) for name, view in self._views.items()}
        )

    def with_view(self, name: str, /, *, shared: Iterable[str] | None = None, **sizes: int) -> Mesh:
        """Return the mesh with one more factorisation of its ranks, whose ``shared`` axes are checked to be equal.

        By default every axis that both name is shared. Two axes are equal when they give the same groups in the
        same order: same size and same stride.

        >>> Mesh(tp=2, dp=2, pp=2).with_view("expert", ep=2, pp=4)
        Traceback (most recent call last):
        rankmesh.errors.LayoutError: view 'expert' shares 'pp' with the mesh, but its groups differ: \
the mesh has [0, 4], the view has [0, 2, 4, 6]; give 'pp' one size and one stride in both, or leave it out of shared
        """
        view = self._with(sizes=_factors(name, sizes, self.size), parts={}, views={})
        if axis_name(name) in self._views:
            raise LayoutError(f"the mesh has a view {name!r} already; give the second one another name", view=name)
        known = {*self._sizes, *self._parts}
        for axis in [axis for axis in sizes if axis in known] if shared is None else axis_names(shared):
            ours, theirs = self.groups(axis), view.groups(axis)
            # Equal patterns tile the ranks in one way only: the lowest one not yet covered must start a group.
            if ours.members != theirs.members:
                raise LayoutError(
                    f"view {name!r} shares {axis!r} with the mesh, but its groups differ: the mesh has "
                    f"{listed(ours[0])}, the view has {listed(theirs[0])}; give {axis!r} one size and one stride in "
                    "both, or leave it out of shared",
                    view=name,
                    axis=axis,
                    mesh_groups=ours,
                    view_groups=theirs,
                )
        return self._with(views={**self._views, name: view})

    def split(self, axis: str, /, *, view: str | None = None, **sizes: int | EllipsisType) -> Mesh:
        """Replace one axis by sub-axes, the first adjacent; one size may be ``...``: it is inferred.

        The split axis can still be named: it means all of its sub-axes.

        >>> rings = Mesh(cp=16).split("cp", inner=2, middle=2, outer=...)
        >>> rings.axes
        {'inner': 2, 'middle': 2, 'outer': 4}
        >>> rings.groups("middle")[0], rings.groups("outer")[3], rings.groups("cp").size
        (Group(0, 2), Group(3, 7, 11, 15), 16)
        """
        if view is not None:
            return self._with(views={**self._views, view: self.view(view)._split(axis, sizes)})
        return self._split(axis, sizes)

    def _split(self, axis: str, sizes: Mapping[str, int | EllipsisType]) -> Mesh:
        total = self._sizes[find(axis, self._sizes)]
        asked = {axis_name(name): None if size is ... else axis_size(name, size) for name, size in sizes.items()}
        if not asked:
            raise LayoutError(
                f"axis {axis!r} is split into nothing; name sub-axes, such as inner=2, outer=...", axis=axis
            )
        filled = fill(asked, total, f"size of axis {axis!r}")
        taken = (self._sizes.keys() | self._parts.keys()) & filled.keys()
        if taken:
            raise LayoutError(
                f"sub-axis {sorted(taken)[0]!r} of {axis!r} has the name of another axis of the mesh; use another",
                axis=axis,
            )
        leaves: dict[str, int] = {}
        for name, size in self._sizes.items():
            leaves.update(filled if name == axis else {name: size})
        return self._with(sizes=leaves, parts={**self._parts, axis: tuple(filled)})

    def reorder(self, order: AxesLike) -> Mesh:
        """Put the axes in another rank order; axes of size 1 may be left out. Views do not carry over.

        A split axis means its sub-axes, the first adjacent.

        >>> Mesh(tp=2, dp=4, pp=2).reorder("tp-pp-dp").strides
        {'tp': 1, 'pp': 2, 'dp': 4}
        """
        names = self._leaves(axis_names(order))
        omitted = [name for name in self._sizes if name not in names]
        missing = [name for name in omitted if self._sizes[name] > 1]
        if missing:
            raise LayoutError(
                f"order {'-'.join(names)!r} leaves out {', '.join(missing)}, whose size is more than 1; add "
                f"-{'-'.join(missing)}",
                order=names,
                missing=missing,
            )
        return self._with(sizes={name: self._sizes[name] for name in (*names, *omitted)}, views={})

    # -- value semantics ----------------------------------------------------------------------------------------

    def to_dict(self) -> MeshData:
        """Plain data from which ``from_dict`` makes an equal mesh."""
        axes = self._axes_to_dict()
        data: MeshData = {"axes": axes["axes"], "offset": self.offset}
        if self.rank_map is not None:
            data["rank_map"] = list(self.rank_map)
        if not self._rank_range.consecutive:
            data["consecutive"] = False
        if "parts" in axes:
            data["parts"] = axes["parts"]
        if self._views:
            data["views"] = {name: view._axes_to_dict() for name, view in self._views.items()}
        return data

    def _axes_to_dict(self) -> AxesData:
        data: AxesData = {"axes": [[name, size] for name, size in self._sizes.items()]}
        if self._parts:
            data["parts"] = {name: list(parts) for name, parts in self._parts.items()}
        return data

    @classmethod
    def from_dict(cls, data: MeshData) -> Mesh:
        """Return the mesh of ``to_dict``; sizes, map and parts are checked as in the constructor."""
        try:
            return cls._from_dict(data)
        except LayoutError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LayoutError(
                f"this data is not a mesh ({type(error).__name__}: {first_line(error)}); a mesh has axes, pairs of "
                "name and size, and an offset; write it with Mesh.to_dict()",
                received=data,
            ) from error

    @classmethod
    def _from_dict(cls, data: MeshData) -> Mesh:
        consecutive, rank_map = data.get("consecutive", True), data.get("rank_map")
        if not isinstance(consecutive, bool):
            raise LayoutError(f"consecutive is {quoted(consecutive)}; give true or false", received=consecutive)
        ranks = None if rank_map is None else array(rank_map, "rank_map")
        sizes = _unique(array(data["axes"], "axes of a mesh"))
        mesh = cls.of(sizes, offset=data["offset"], rank_map=ranks if consecutive else None)
        if not consecutive:
            mesh = mesh._with(rank_range=mesh._rank_range.ordered(data["rank_map"], consecutive=False))
        views = {}
        for name, view in data.get("views", {}).items():
            other = mesh._with(
                sizes=_factors(axis_name(name), _unique(array(view["axes"], f"axes of view {name!r}")), mesh.size)
            )
            views[name] = other._with(parts=other._checked_parts(view.get("parts", {})))
        return mesh._with(parts=mesh._checked_parts(data.get("parts", {})), views=views)

    def _checked_parts(self, parts: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
        split = {axis_name(name): axis_names(array(leaves, f"parts of {name!r}")) for name, leaves in parts.items()}
        known = {*self._sizes, *split}
        for name, leaves in split.items():
            if not leaves or name in self._sizes or not known.issuperset(leaves):
                raise LayoutError(
                    f"parts {quoted(leaves)} of axis {name!r} are not axes of the mesh; name axes", axis=name
                )
        try:
            TopologicalSorter(split).prepare()
        except CycleError as error:
            cycle = tuple(dict.fromkeys(error.args[1]))
            raise LayoutError(
                f"the parts of {', '.join(cycle)} are each other's; list each split axis with the axes of the mesh "
                "that replace it",
                axes=cycle,
                parts=split,
            ) from error
        return split

    @cached_property
    def _value(self) -> tuple[object, ...]:
        return (
            tuple(self._sizes.items()),
            self._rank_range,
            frozenset(self._parts.items()),
            frozenset((name, view._value) for name, view in self._views.items()),
        )

    def __eq__(self, other: object) -> bool:
        return self._value == other._value if isinstance(other, Mesh) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> tuple[object, ...]:
        return Mesh.from_dict, (self.to_dict(),)

    def __contains__(self, rank: object) -> bool:
        return rank in self._rank_range

    def __str__(self) -> str:
        """Return the axis string: ``Mesh.parse`` reads it."""
        return ",".join(f"{name}={size}" for name, size in self._sizes.items())

    def __repr__(self) -> str:
        words = [f"{name}={size}" for name, size in self._sizes.items()]
        words += [f"offset={self.offset}"] if self.offset else []
        words += [f"rank_map=<{self.size} ranks>"] if self.rank_map else []
        views = "".join(
            f".with_view({name!r}, {', '.join(str(view).split(','))})" for name, view in self._views.items()
        )
        return f"Mesh({', '.join(words)}){views}"


def _factors(name: str, sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Check the sizes of a view, whose product must be the ``total`` of the mesh."""
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


def _digit(name: str, size: int, coordinate: Mapping[str, int]) -> int:
    if name not in coordinate:
        if size == 1:
            return 0
        raise LayoutError(
            f"the coordinate has no position along {name!r}, whose size is {size}; add {name}=0 to {name}={size - 1}",
            missing=name,
        )
    digit = integer(coordinate[name], f"position along axis {name!r}", least=0)
    if digit >= size:
        raise LayoutError(
            f"position {digit} along axis {name!r} does not exist: its size is {size}; give 0 to {size - 1}",
            axis=name,
            received=digit,
            size=size,
        )
    return digit


def _unique(pairs: Iterable[Sequence[str | int]]) -> dict[str, int]:
    listed = [(axis_name(name), axis_size(axis_name(name), size)) for name, size in pairs]
    axis_names([name for name, _ in listed])
    return dict(listed)
