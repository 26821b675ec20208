"""Meshes: named axes laid over a contiguous span of global ranks.

    rank = offset + Σ coordinate[a] · stride[a]        stride[a] = Π sizes of the axes before a

```
Mesh(tp=2, dp=2, pp=2)         pp=0            pp=1
                              tp=0 tp=1       tp=0 tp=1
                        dp=0    0    1          4    5
                        dp=1    2    3          6    7
```

The first axis varies fastest: ranks next to each other differ in ``tp`` here, which is where the fastest links are.

>>> mesh = Mesh(tp=2, cp=2, dp=4, pp=2)
>>> mesh.size, mesh.strides
(32, {'tp': 1, 'cp': 2, 'dp': 4, 'pp': 16})
>>> mesh.coordinate(13)
{'tp': 1, 'cp': 0, 'dp': 3, 'pp': 0}
>>> mesh.rank(tp=1, cp=0, dp=3, pp=0)
13
>>> mesh.groups("dp-cp").of(13)
Group(1, 3, 5, 7, 9, 11, 13, 15)

Experts see the same ranks through another factorisation, a *view*, whose shared axes are proved equal:

>>> mesh = mesh.with_view("expert", etp=1, ep=8, edp=2, pp=2, shared=("pp",))
>>> mesh.groups("ep", view="expert").of(13)
Group(8, 9, 10, 11, 12, 13, 14, 15)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from types import EllipsisType
from typing import Any

from rankmesh.core.axes import AxesLike, axis_name, axis_names, axis_size, fill, find, integer, parse_axes
from rankmesh.core.groups import Groups
from rankmesh.core.rank_range import RankRange
from rankmesh.core.strided import Strided
from rankmesh.core.views import factors, prove_shared
from rankmesh.errors import LayoutError

__all__ = ["Mesh"]


class Mesh:
    """Named axes over ranks ``offset`` to ``offset + size - 1``; frozen, hashable, equal when equivalent.

    Keyword order is rank order, the first axis adjacent. ``rank_map`` lists the global rank at each position, for
    clusters whose rank numbers do not follow the wiring; the identity map is the same mesh as no map.

    Raises ``LayoutError`` for sizes that are not integers of at least 1, and for a map that is no permutation.
    """

    __slots__ = ("_pairs", "_parts", "_pattern", "_rank_range", "_sizes", "_views")

    _sizes: dict[str, int]
    _parts: dict[str, tuple[str, ...]]
    _pattern: Strided
    _pairs: dict[str, tuple[int, int]]
    _rank_range: RankRange
    _views: dict[str, Mesh]

    def __init__(self, /, *, offset: int = 0, rank_map: Iterable[int] | None = None, **sizes: int) -> None:
        checked = {axis_name(name): axis_size(name, size) for name, size in sizes.items()}
        if not checked:
            raise LayoutError("received no axes; a mesh has at least one, such as Mesh(dp=8)")
        self._set(checked, RankRange.of(offset, prod(checked.values()), rank_map), {}, {})

    def _set(
        self, sizes: dict[str, int], rank_range: RankRange, parts: dict[str, tuple[str, ...]], views: dict[str, Mesh]
    ) -> None:
        pattern = Strided.dense(sizes.values())
        values = {
            "_sizes": sizes,
            "_parts": parts,
            "_pattern": pattern,
            "_pairs": dict(zip(sizes, pattern.pairs, strict=True)),
            "_rank_range": rank_range,
            "_views": views,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _with(
        self,
        *,
        sizes: dict[str, int] | None = None,
        rank_range: RankRange | None = None,
        parts: dict[str, tuple[str, ...]] | None = None,
        views: dict[str, Mesh] | None = None,
    ) -> Mesh:
        other = object.__new__(Mesh)
        other._set(
            self._sizes if sizes is None else sizes,
            self._rank_range if rank_range is None else rank_range,
            self._parts if parts is None else parts,
            self._views if views is None else views,
        )
        return other

    @classmethod
    def of(cls, sizes: Mapping[str, int], *, offset: int = 0, rank_map: Iterable[int] | None = None) -> Mesh:
        """The mesh of sizes that a program holds in a mapping, in its order.

        >>> Mesh.of({"tp": 2, "dp": 4})
        Mesh(tp=2, dp=4)
        """
        if not isinstance(sizes, Mapping):
            raise LayoutError(
                f"received {sizes!r} as sizes of a mesh; give a mapping, such as {{'tp': 2, 'dp': 4}}", received=sizes
            )
        return cls(offset=offset, rank_map=rank_map, **{axis_name(name): size for name, size in sizes.items()})

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        world_size: int | None = None,
        offset: int = 0,
        rank_map: Iterable[int] | None = None,
    ) -> Mesh:
        """The mesh of an axis string; with ``world_size``, one size may be ``*``: what is left.

        >>> Mesh.parse("tp=2,cp=2,dp=*,pp=2", world_size=32)
        Mesh(tp=2, cp=2, dp=4, pp=2)
        """
        start = integer(offset, "offset", least=0)
        total = None if world_size is None else integer(world_size, "world_size", least=1)
        left = None if total is None else integer(total - start, "world_size minus offset", least=1)
        return cls.of(fill(parse_axes(text), left, "world_size"), offset=start, rank_map=rank_map)

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
        """How many ranks the mesh covers."""
        return self._rank_range.size

    @property
    def offset(self) -> int:
        """The first global rank."""
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
        """The other factorisations of the same span, by name."""
        return dict(self._views)

    def view(self, name: str | None) -> Mesh:
        """The factorisation of one view as a mesh of its own; None is the mesh itself."""
        return self if name is None else self._views[find(name, self._views, "view")]

    # -- ranks and coordinates ----------------------------------------------------------------------------------

    def coordinate(self, rank: int, *, view: str | None = None) -> dict[str, int]:
        """The position of a global rank along each axis (of a view).

        >>> Mesh(tp=2, dp=2, offset=4).coordinate(6)
        {'tp': 0, 'dp': 1}
        """
        mesh = self.view(view)
        return dict(zip(mesh._sizes, mesh._pattern.digits(self._rank_range.position(rank)), strict=True))

    def rank(self, /, *, view: str | None = None, **coordinate: int) -> int:
        """The global rank at a coordinate; axes of size 1 may be left out.

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
        """All groups along a set of axes: ``"dp-cp"``, or a sequence of names.

        The members of a group are in the order of the mesh, whatever the order of request, so ``"dp-cp"`` and
        ``"cp-dp"`` are one kind. With ``ordered=True`` the first axis *named* varies fastest instead.

        >>> Mesh(cp=2, dp=2).groups("dp-cp").tolist(), Mesh(cp=2, dp=2).groups("dp-cp", ordered=True).tolist()
        ([[0, 1, 2, 3]], [[0, 2, 1, 3]])
        """
        mesh = self.view(view)
        named = mesh._leaves(axis_names(axes))
        pairs = mesh._pairs
        chosen = named if ordered else tuple([name for name in mesh._sizes if name in named])
        return Groups(
            rank_range=self._rank_range,
            axes=chosen,
            members=Strided(tuple([pairs[name] for name in chosen])),
            fixed=tuple([name for name in pairs if name not in chosen]),
            bases=Strided(tuple([pair for name, pair in pairs.items() if name not in chosen])),
        )

    def slice(self, axes: AxesLike, of: int, *, view: str | None = None) -> Mesh:
        """The sub-mesh of some axes through one rank, the others left where that rank is.

        Its ranks must be contiguous, as those of the fastest axes are; ``groups`` lists them wherever they are. Axes
        stand in the order of the mesh.

        >>> mesh = Mesh(tp=2, dp=2, pp=2)
        >>> mesh.slice("tp-dp", of=5)
        Mesh(tp=2, dp=2, offset=4)
        """
        own = self.groups(axes, view=view)
        members = own.of(of)
        first = min(members)
        if sorted(members) != list(range(first, first + len(members))):
            along = "-".join(own.axes)
            raise LayoutError(
                f"received axes {along!r} for a sub-mesh through rank {of}; its ranks are {members!r}, and a mesh "
                f"covers contiguous ranks; use groups({along!r}).of({of})",
                axes=own.axes,
                rank=of,
            )
        sizes = {name: size for name, size in self.view(view)._sizes.items() if name in own.axes}
        return Mesh.of(sizes, offset=first, rank_map=members.ranks)

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """The sub-mesh of some axes, where it is the same for every rank: the other axes have size 1.

        >>> Mesh(tp=2, dp=2, pp=1)["dp", "tp"]
        Mesh(tp=2, dp=2)
        """
        groups = self.groups(axes)
        if len(groups) > 1:
            along = "-".join(groups.axes)
            raise LayoutError(
                f"received mesh[{along!r}]; there are {len(groups)} such sub-meshes, one for each position along "
                f"{', '.join(groups.fixed)}, and a mesh is the same on every rank; say whose: mesh.slice({along!r}, "
                f"of=rank), or list all with mesh.groups({along!r})",
                axes=groups.axes,
                slices=len(groups),
            )
        return self.slice(axes, of=self.offset)

    def _leaves(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names with every split axis replaced by its sub-axes."""
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
        """The same axes and views over other ranks; a map that is not given moves along with the offset.

        >>> Mesh(tp=2, dp=2).replace(offset=4, rank_map=(4, 6, 5, 7)).groups("tp").tolist()
        [[4, 6], [5, 7]]
        """
        start = self.offset if offset is None else integer(offset, "offset", least=0)
        moved = self.rank_map and tuple(rank + start - self.offset for rank in self.rank_map)
        rank_range = RankRange.of(start, self.size, moved if rank_map is ... else rank_map)
        return self._with(
            rank_range=rank_range, views={name: view._with(rank_range=rank_range) for name, view in self._views.items()}
        )

    def with_view(self, name: str, /, *, shared: Iterable[str] | None = None, **sizes: int) -> Mesh:
        """The mesh with one more factorisation of its span, whose ``shared`` axes are proved equal.

        By default every axis that both name is shared. Two axes are equal when they give the same groups in the
        same order: same size and same stride.

        >>> Mesh(tp=2, dp=2, pp=2).with_view("expert", ep=2, pp=4)
        Traceback (most recent call last):
        rankmesh.errors.LayoutError: received view 'expert' with sharing of 'pp', but its groups differ: \
the mesh has [0, 4], the view has [0, 2, 4, 6]; give 'pp' one size and one stride in both, or leave it out of shared
        """
        view = Mesh.of(factors(name, sizes, self.size), offset=self.offset, rank_map=self.rank_map)
        if axis_name(name) in self._views:
            raise LayoutError(
                f"received a second view named {name!r}; each view has its own name; rename one", view=name
            )
        prove_shared(self, view, name, shared)
        return self._with(views={**self._views, name: view})

    def split(self, axis: str, /, *, view: str | None = None, **sizes: int | EllipsisType) -> Mesh:
        """The mesh with one axis replaced by sub-axes, the first adjacent; one size may be ``...``: what is left.

        The split axis can still be named: it stands for all of its sub-axes.

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
            raise LayoutError(f"received no sub-axes for {axis!r}; name them, such as inner=2, outer=...", axis=axis)
        filled = fill(asked, total, f"size of axis {axis!r}")
        taken = (self._sizes.keys() | self._parts.keys()) & filled.keys()
        if taken:
            raise LayoutError(
                f"received sub-axis {sorted(taken)[0]!r} of {axis!r}; the mesh has that name already; use another",
                axis=axis,
            )
        leaves: dict[str, int] = {}
        for name, size in self._sizes.items():
            leaves.update(filled if name == axis else {name: size})
        return self._with(sizes=leaves, parts={**self._parts, axis: tuple(filled)})

    def reorder(self, order: AxesLike) -> Mesh:
        """The same axes and sizes in another rank order; axes of size 1 may be left out. Views do not carry over.

        A split axis stands for its sub-axes, the first adjacent.

        >>> Mesh(tp=2, dp=4, pp=2).reorder("tp-pp-dp").strides
        {'tp': 1, 'pp': 2, 'dp': 4}
        """
        names = self._leaves(axis_names(order))
        left = [name for name in self._sizes if name not in names]
        missing = [name for name in left if self._sizes[name] > 1]
        if missing:
            raise LayoutError(
                f"received order {'-'.join(names)!r}, which leaves out {', '.join(missing)}; "
                "an order names every axis whose size is more than 1",
                order=names,
                missing=missing,
            )
        return self._with(sizes={name: self._sizes[name] for name in (*names, *left)}, views={})

    # -- value semantics ----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which ``from_dict`` makes an equal mesh."""
        data: dict[str, Any] = {"axes": [[name, size] for name, size in self._sizes.items()], "offset": self.offset}
        if self.rank_map is not None:
            data["rank_map"] = list(self.rank_map)
        if self._parts:
            data["parts"] = {name: list(parts) for name, parts in self._parts.items()}
        if self._views:
            data["views"] = {
                name: {key: value for key, value in view.to_dict().items() if key in ("axes", "parts")}
                for name, view in self._views.items()
            }
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Mesh:
        """The mesh of ``to_dict``; sizes, map and parts are checked as in the constructor."""
        try:
            return cls._from_dict(data)
        except LayoutError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LayoutError(
                f"received data that is no mesh ({type(error).__name__}: {error}); it has axes, pairs of name and "
                "size, and an offset; write it with Mesh.to_dict()",
                received=data,
            ) from error

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> Mesh:
        mesh = cls.of(_unique(data["axes"]), offset=data["offset"], rank_map=data.get("rank_map"))
        views = {
            axis_name(name): cls.from_dict(
                {"axes": view["axes"], "parts": view.get("parts", {}), "offset": mesh.offset, "rank_map": mesh.rank_map}
            )
            for name, view in data.get("views", {}).items()
        }
        for name, view in views.items():
            factors(name, view.axes, mesh.size)
        return mesh._with(parts=mesh._checked_parts(data.get("parts", {})), views=views)

    def _checked_parts(self, parts: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
        split = {axis_name(name): axis_names(leaves) for name, leaves in parts.items()}
        known = {*self._sizes, *split}
        for name, leaves in split.items():
            if not leaves or name in self._sizes or not known.issuperset(leaves):
                raise LayoutError(f"received parts {leaves} of axis {name!r}; they must be axes of the mesh", axis=name)
        _check_acyclic(split)
        return split

    @property
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

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"received a new value for {name!r}; a mesh is frozen; make another one")

    def __reduce__(self) -> tuple[object, ...]:
        return Mesh.from_dict, (self.to_dict(),)

    def __contains__(self, rank: object) -> bool:
        return rank in self._rank_range

    def __str__(self) -> str:
        """The axis string: ``Mesh.parse`` reads it."""
        return ",".join(f"{name}={size}" for name, size in self._sizes.items())

    def __repr__(self) -> str:
        words = [f"{name}={size}" for name, size in self._sizes.items()]
        words += [f"offset={self.offset}"] if self.offset else []
        words += [f"rank_map=<{self.size} ranks>"] if self.rank_map else []
        views = "".join(
            f".with_view({name!r}, {', '.join(str(view).split(','))})" for name, view in self._views.items()
        )
        return f"Mesh({', '.join(words)}){views}"


def _digit(name: str, size: int, coordinate: Mapping[str, int]) -> int:
    if name not in coordinate:
        if size == 1:
            return 0
        raise LayoutError(
            f"received a coordinate without {name!r} (size {size}); a rank needs a position along every axis; "
            f"add {name}=0 to {name}={size - 1}",
            missing=name,
        )
    digit = integer(coordinate[name], f"position along axis {name!r}", least=0)
    if digit >= size:
        raise LayoutError(
            f"received position {digit} along axis {name!r}; its size is {size}, so positions go from 0 to {size - 1}",
            axis=name,
            received=digit,
            size=size,
        )
    return digit


def _unique(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    listed = [(axis_name(name), size) for name, size in pairs]
    axis_names([name for name, _ in listed])
    return dict(listed)


def _check_acyclic(parts: Mapping[str, tuple[str, ...]]) -> None:
    open_axes = dict(parts)
    while open_axes:
        done = [name for name, leaves in open_axes.items() if open_axes.keys().isdisjoint(leaves)]
        if not done:
            raise LayoutError(
                f"received parts {parts!r}, in which {', '.join(open_axes)} lead in a circle; parts end at axes of the "
                "mesh; list each split axis with the sub-axes that replace it",
                axes=tuple(open_axes),
                parts=dict(parts),
            )
        for name in done:
            del open_axes[name]
