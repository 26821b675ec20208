"""Shardings: how one tensor is sharded on a mesh, and which ranks hold which shard.

For each tensor dimension the axes that cut it, outermost first, or None; axes that are not named hold copies:

```
Sharding(Mesh(tp=2, dp=2), ("tp", None), shape=(4, 6))        rank 0  rows 0..1        rank 1  rows 2..3
                                                              rank 2  rows 0..1        rank 3  rows 2..3
```

>>> up = Sharding(Mesh(tp=2, pp=2), ("tp", None), shape=(4, 6), dtype="bfloat16", at={"pp": 1})
>>> up.of(3)
Shard(boxes=(((2, 4), (0, 6)),), places=((0, 0),), shape=(2, 6))
>>> up.of(0).boxes
()

Uneven cuts follow ``torch.chunk``, as in DTensor and FSDP2: ``"dp-tp"`` cuts by ``dp`` and each piece by
``tp``; ``"tp-dp"`` is what DTensor calls a strided shard. A stride of s in Megatron is s equal ``parts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from rankmesh.core.axes import axis_names, integer
from rankmesh.core.boxes import Box
from rankmesh.core.boxes import size as elements
from rankmesh.core.cuts import Cut
from rankmesh.core.mesh import Mesh
from rankmesh.core.strided import IntArray, Strided
from rankmesh.errors import LayoutError, first_line, quoted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["DTYPES", "Shard", "ShardMap", "Sharding", "at_of"]

# An axis of a mesh: its size and its stride in positions.
Axis = tuple[int, int]

# Bytes of one element, by the names that torch gives dtypes.
DTYPES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


class ShardingData(TypedDict, total=False):
    """A sharding as plain data, without its mesh; what is not there has its default."""

    shape: list[int]
    dtype: str
    cut: list[str | None]
    at: dict[str, list[int]]
    view: str | None
    parts: dict[str, list[int]]
    padded: dict[str, int]


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that one rank holds.

    ``boxes``   of the whole tensor; none where the rank holds nothing
    ``places``  where each box starts in the rank's own tensor
    ``shape``   of the rank's own tensor, padding included
    """

    boxes: tuple[Box, ...]
    places: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor that the rank holds."""
        return sum(map(elements, self.boxes))


@dataclass(frozen=True, eq=False)
class ShardMap:
    """``axes``: for each dimension the axes that cut it, outermost first; ``at``: the axes with the positions kept."""

    mesh: Mesh
    axes: tuple[tuple[Axis, ...], ...]
    at: tuple[tuple[Axis, tuple[int, ...]], ...]

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the axes that cut each dimension."""
        return tuple(tuple(size for size, _ in axes) for axes in self.axes)

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """Number of shards of each dimension."""
        return tuple(prod(sizes) for sizes in self.sizes)

    def digits(self, rank: int) -> tuple[tuple[int, ...], ...] | None:
        """Return a rank's position along the axes of each dimension; None for a rank that holds nothing. O(axes)."""
        if rank not in self.mesh:
            return None
        position = self.mesh.rank_range.position(rank)
        if any(position // stride % size not in kept for (size, stride), kept in self.at):
            return None
        return tuple(tuple(position // stride % size for size, stride in axes) for axes in self.axes)

    @cached_property
    def _cutting(self) -> Strided:
        """The pattern of the axes that cut, the innermost fastest: a shard is its position there."""
        return Strided(tuple(axis for axes in self.axes[::-1] for axis in axes[::-1]))

    def _shards_at(self, positions: IntArray) -> IntArray:
        """Return the shard at each of these positions of the mesh, -1 where the tensor is not."""
        shard = self._cutting.position(positions)
        for (size, stride), kept in self.at:
            shard[~np.isin(positions // stride % size, kept)] = -1
        return shard

    @cached_property
    def _order(self) -> IntArray:
        """The positions that hold something by shard, (shards, copies)."""
        copies = self._cutting.complement(self.mesh.size).values()
        kept = copies[self._shards_at(copies) >= 0]
        return self._cutting.values()[:, None] + kept[None, :]

    @cached_property
    def first(self) -> IntArray:
        """The first position of each shard, which names the set of its copies whatever dimensions are cut."""
        return self._order[:, 0]

    @cached_property
    def ranks(self) -> IntArray:
        """The global ranks that hold each shard, (shards, copies), in the order of their positions."""
        return self.mesh.rank_range.ranks(self._order)

    def shard_of(self, ranks: IntArray) -> IntArray:
        """Return the shard of each of these ranks, -1 for those that hold nothing."""
        positions = self.mesh.rank_range.positions(ranks)
        return np.where(positions < 0, -1, self._shards_at(positions))

    @cached_property
    def copies(self) -> tuple[object, ...]:
        """Equal for two shard maps exactly when their sets of copies are the same, whichever dimensions are cut."""
        cutting = frozenset(axis for axes in self.axes for axis in axes if axis[0] > 1)
        kept = frozenset((axis, kept) for axis, kept in self.at if len(kept) < axis[0])
        return self.mesh.rank_range, cutting, kept


@dataclass(frozen=True)
class Sharding:
    """Sharding of one tensor of ``shape`` on a mesh (or a ``view`` of it); frozen, equal when equivalent.

    ``cut``     for each dimension the axes that cut it, outermost first (``"dp-tp"``), or None; None: all are whole
    ``dtype``   torch's name of it, such as ``"bfloat16"``, or the dtype itself
    ``at``      where the tensor is at all: positions by axis, ``{"pp": 1}``; several hold copies, ``{"pp": (0, -1)}``
    ``parts``   the lengths of a fused dimension's parts, each of which is cut by itself, ``(q, k, v)``: of the one
                dimension that is cut, else by dimension, ``{0: (q, k, v)}``
    ``padded``  by dimension the length that is stored and cut, ``{0: 51200}``, where that is more than in ``shape``

    Raises ``LayoutError`` for what does not fit together, ``UnknownAxis`` for axes that the mesh does not have.
    """

    mesh: Mesh
    cut: tuple[str | None, ...] | None = None
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    at: Mapping[str, int | tuple[int, ...]] | None = field(default=None, hash=False)
    view: str | None = None
    parts: Sequence[int] | Mapping[int, Sequence[int]] | None = field(default=None, hash=False)
    padded: Mapping[int, int] | None = field(default=None, hash=False)
    shard_map: ShardMap = field(init=False, repr=False, compare=False)
    cuts: tuple[Cut, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise LayoutError(f"the mesh of a sharding is {quoted(self.mesh)}; give a Mesh, such as Mesh(tp=2, dp=4)")
        try:
            self._normalise()
        except LayoutError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            given = {name: getattr(self, name) for name in ("cut", "shape", "at", "view", "parts", "padded")}
            raise LayoutError(
                f"{quoted(given)} does not describe a sharding ({first_line(error)}); give sizes as shape, axes or "
                "None for each dimension as cut, and mappings of axes as at, of dimensions as parts and padded",
                **given,
            ) from error

    def _normalise(self) -> None:
        what = "length of a dimension"
        shape = tuple([n if type(n) is int and n >= 0 else integer(n, what, least=0) for n in self.shape])
        names = _names(self.cut, len(shape))
        at = at_of(self.at)
        parts = _by_dimension(self.parts, names, len(shape))
        padded = dict(self.padded or {})
        where = _shard_map(self.mesh, self.view, names, at)
        # One spelling of equal values, and what follows from them.
        vars(self).update(
            shape=shape,
            cut=tuple(["-".join(axes) or None for axes in names]),
            dtype=_dtype(str(self.dtype)),
            at=dict(at) or None,
            parts=parts or None,
            padded=padded or None,
            shard_map=where,
            cuts=_cuts(shape, where.sizes, tuple(sorted(parts.items())), tuple(sorted(padded.items()))),
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize

    def of(self, rank: int) -> Shard:
        """Return the shard of one rank, in closed form: O(axes · boxes). A rank outside the mesh holds nothing."""
        digits = self.shard_map.digits(integer(rank, "rank", least=0))
        if digits is None:
            return Shard((), (), (0,) * len(self.shape))
        found = [cut.intervals(places) for cut, places in zip(self.cuts, digits, strict=True)]
        boxes = tuple(product(*([(low, high) for low, high, _ in pieces] for pieces in found)))
        places = tuple(product(*([place for _, _, place in pieces] for pieces in found)))
        return Shard(boxes, places, tuple(cut.extent(places) for cut, places in zip(self.cuts, digits, strict=True)))

    def holds(self, rank: int) -> bool:
        """Return whether the rank has a tensor of this sharding at all, be it empty."""
        return self.shard_map.digits(rank) is not None

    def to_dict(self) -> dict[str, object]:
        """Return the sharding as plain data, without its mesh."""
        data = {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "cut": list(self.cut or ()),
            "at": {axis: list(places) for axis, places in (self.at or {}).items()},  # type: ignore[arg-type]  # tuples
            "view": self.view,
            "parts": {str(dim): list(parts) for dim, parts in (self.parts or {}).items()},  # type: ignore[union-attr]
            "padded": {str(dim): length for dim, length in (self.padded or {}).items()},
        }
        return {name: value for name, value in data.items() if value or name == "shape"}

    @classmethod
    def from_dict(cls, mesh: Mesh, data: ShardingData) -> Sharding:
        """Return the sharding on a mesh that ``to_dict`` gave as plain data, also after JSON.

        >>> one = Sharding(Mesh(tp=2, pp=2), ("tp", None), shape=(8, 6), at={"pp": 1})
        >>> Sharding.from_dict(one.mesh, one.to_dict()) == one
        True
        """
        return cls(
            mesh,
            tuple(data["cut"]) if "cut" in data else None,
            shape=tuple(data["shape"]),
            dtype=data.get("dtype", "float32"),
            at={axis: tuple(places) for axis, places in data.get("at", {}).items()} or None,
            view=data.get("view"),
            parts={int(dim): parts for dim, parts in data.get("parts", {}).items()} or None,
            padded={int(dim): length for dim, length in data.get("padded", {}).items()} or None,
        )

    @classmethod
    def from_dtensor(cls, tensor: DTensor) -> Sharding:
        """Return the sharding of a DTensor: its global shape on its mesh, FSDP2's strided shards too.

        Raises ``LayoutError`` for partial placements, and a mesh with gaps between its ranks.
        """
        from rankmesh.backend.dtensors import sharding_of

        return sharding_of(tensor)

    def to_dtensor(self, device_mesh: DeviceMesh) -> tuple[Placement, ...]:
        """Return the placements on a ``DeviceMesh`` of these ranks and axes: ``DTensor.from_local(local, mesh, ...)``.

        Raises ``LayoutError`` for what DTensors cannot express: ``at``, ``parts``, ``padded``, views, another mesh.
        """
        from rankmesh.backend.dtensors import placements_of

        return placements_of(self, device_mesh)

    def __reduce__(self) -> tuple[object, ...]:
        given = (self.mesh, self.cut, self.shape, self.dtype, self.at, self.view, self.parts, self.padded)
        return Sharding, given


# What torch's dtypes are called elsewhere.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
          "fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn", "int": "int32", "long": "int64"}  # fmt: skip


@lru_cache(maxsize=256)
def _dtype(name: str) -> str:
    short = name.removeprefix("torch.")
    if short not in DTYPES:
        meant = _SHORT.get(short.lower()) or next(iter(get_close_matches(short, DTYPES, n=1)), None)
        fix = f"give one of torch's, by its name: {', '.join(sorted(DTYPES))}" if meant is None else f"write {meant!r}"
        raise LayoutError(f"unknown dtype {quoted(name)}; {fix}", received=name)
    return short


def _names(cut: object, dimensions: int) -> tuple[tuple[str, ...], ...]:
    if cut is None:
        return ((),) * dimensions
    if isinstance(cut, str) or not isinstance(cut, Iterable):
        raise LayoutError(f"cut is {quoted(cut)}; give axes or None for each dimension, such as ('tp', None)", cut=cut)
    names = tuple([() if axes is None else _named(axes) for axes in cut])
    if len(names) != dimensions:
        raise LayoutError(
            f"cut {quoted(tuple(cut))} has {len(names)} entries for a tensor of {dimensions} dimensions; give axes or "
            "None for each of them",
            cut=cut,
            dimensions=dimensions,
        )
    return names


@lru_cache(maxsize=1024)
def _named(axes: str) -> tuple[str, ...]:
    return axis_names(axes)


def _by_dimension(given: object, names: tuple[tuple[str, ...], ...], dimensions: int) -> dict[int, tuple[int, ...]]:
    """Return ``parts`` by dimension; a bare list is of the one dimension that is cut, or the first where none is."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {int(dim): tuple(parts) for dim, parts in given.items()}
    cut = [dim for dim, axes in enumerate(names) if axes]
    if len(cut) > 1 or not dimensions:
        raise LayoutError(
            f"parts={quoted(given)} could be of any of the {len(cut)} dimensions that are cut; say of which, such as "
            f"parts={{0: {quoted(given)}}}",
            parts=given,
        )
    return {cut[0] if cut else 0: tuple(given)}  # type: ignore[arg-type]  # a sequence; its items are checked next


@lru_cache(maxsize=4096)
def _cuts(
    shape: tuple[int, ...],
    sizes: tuple[tuple[int, ...], ...],
    parts: tuple[tuple[int, tuple[int, ...]], ...],
    padded: tuple[tuple[int, int], ...],
) -> tuple[Cut, ...]:
    parts_of, padded_of = dict(parts), dict(padded)
    for dim in (*parts_of, *padded_of):
        if not 0 <= dim < len(shape):
            raise LayoutError(
                f"dimension {dim} of a tensor of {len(shape)} dimensions does not exist; dimensions count from 0"
            )
    return tuple(
        Cut(sizes[dim], _parts(dim, length, parts_of.get(dim)), _padded(dim, length, parts_of, padded_of))
        for dim, length in enumerate(shape)
    )


def _parts(dim: int, length: int, parts: tuple[int, ...] | None) -> tuple[int, ...]:
    if parts is None:
        return (length,)
    checked = tuple(integer(part, f"part of dimension {dim}", least=1) for part in parts)
    if sum(checked) != length:
        raise LayoutError(
            f"parts {quoted(checked)} of dimension {dim} make {sum(checked)}, not its length {length}; change one",
            parts=checked,
            length=length,
        )
    return checked


def _padded(dim: int, length: int, parts: Mapping[int, object], padded: Mapping[int, int]) -> int:
    stored = integer(padded.get(dim, length), f"padded length of dimension {dim}", least=length)
    if dim in padded and dim in parts:
        raise LayoutError(
            f"dimension {dim} has parts and padding; a fused dimension cannot be padded; give one of the two"
        )
    return stored


@lru_cache(maxsize=4096)
def _shard_map(
    mesh: Mesh, view: str | None, cut: tuple[tuple[str, ...], ...], at: tuple[tuple[str, tuple[int, ...]], ...]
) -> ShardMap:
    """Return the shard map of checked names. Raises ``LayoutError`` for an axis that is named twice."""
    taken: set[str] = set()
    axes = tuple(tuple(axis for name in names for axis in _axes(mesh, view, name, taken)) for names in cut)
    fixed: list[tuple[Axis, tuple[int, ...]]] = []
    for name, kept in at:
        fixed += _fixed(_axes(mesh, view, name, taken), name, kept)
    return ShardMap(mesh, axes, tuple(sorted(fixed)))


def _axes(mesh: Mesh, view: str | None, name: str, taken: set[str]) -> tuple[Axis, ...]:
    """Return the axes that a name means, outermost first: one, or the sub-axes of a split one."""
    pairs = mesh.view(view).axis_pairs(name, ordered=True)
    for axis in pairs:
        if axis in taken:
            raise LayoutError(
                f"one sharding names axis {axis!r} twice; an axis cuts one dimension or is fixed by at; name it once",
                axis=axis,
            )
        taken.add(axis)
    return tuple(pair for pair in reversed(pairs.values()) if pair[0] > 1)


def _fixed(axes: tuple[Axis, ...], name: str, kept: tuple[int, ...]) -> list[tuple[Axis, tuple[int, ...]]]:
    size = prod(size for size, _ in axes)
    places = tuple(sorted({place + size if place < 0 else place for place in kept}))
    if not places or places[0] < 0 or places[-1] >= size:
        raise LayoutError(
            f"axis {name!r} has positions 0 to {size - 1}, not {kept[0] if len(kept) == 1 else list(kept)}; "
            f"give one of them in at, or -1 for the last",
            axis=name,
            received=kept,
            size=size,
        )
    if len(axes) == 1:
        return [(axes[0], places)]
    if len(places) > 1:
        raise LayoutError(
            f"at has several positions of {name!r}, which is split; name its sub-axes in at instead", axis=name
        )
    fixed: list[tuple[Axis, tuple[int, ...]]] = []
    for axis in axes[::-1]:
        places, digit = (places[0] // axis[0],), places[0] % axis[0]
        fixed.append((axis, (digit,)))
    return fixed


def at_of(at: Mapping[str, object] | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return ``at`` as a value: each axis with the positions at which the tensor is."""
    found = []
    for name, places in (at or {}).items():
        listed = tuple(places) if isinstance(places, tuple | list | range) else (places,)
        if not all(isinstance(place, int) and not isinstance(place, bool) for place in listed):
            raise LayoutError(
                f"the position of {name!r} in at is {quoted(places)}; give a whole number, or a tuple of them",
                axis=name,
            )
        found.append((name, listed))
    return tuple(sorted(found))
