"""Notations: a sharding as others write it: MLIR's Shardy, JAX's PartitionSpec, NCCL's M2N; without any of them.

```
Mesh(tp=2, dp=4), cut ("dp-tp", None)
Shardy             <["dp"=4, "tp"=2]>   [{"dp", "tp"}, {}]
PartitionSpec      Mesh of shape (4, 2), ("dp", "tp")   P(("dp", "tp"), None)
M2N                dims (8,), placements (Shard(0),)
```

Each says which device has which part of an array that all devices have: what a tensor has beyond that (``at``,
``parts``, ``padded``, uneven cuts) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rankmesh.core.mesh import Mesh
from rankmesh.errors import LayoutError, quoted

if TYPE_CHECKING:
    from rankmesh.core.sharding import Sharding

__all__ = [
    "M2N",
    "check_even",
    "from_m2n",
    "from_partition_spec",
    "from_shardy",
    "m2n",
    "partition_spec",
    "refuse",
    "shardy",
]


class M2N(NamedTuple):
    """``nccl.m2n.Mesh(dims, start_rank)`` with one placement an axis: the tensor dimension that it cuts, or None."""

    dims: tuple[int, ...]
    start_rank: int
    placements: tuple[int | None, ...]


def refuse(sharding: Sharding, notation: str, *, at: bool = True, uneven: bool = True) -> None:
    """Raise ``LayoutError`` for what a notation cannot say."""
    why = None
    if sharding.at and at:
        why = f"tensors that only some ranks have, at={dict(sharding.at)}"
    elif sharding.parts:
        why = f"parts of a fused dimension, parts={quoted(sharding.parts)}"
    elif sharding.padded:
        why = f"padding, padded={quoted(sharding.padded)}"
    elif uneven:
        for dim, length in enumerate(sharding.shape):
            ways = sharding.shard_map.shards[dim]
            if length % ways:
                why = f"uneven cuts, and {ways} does not divide dimension {dim} of length {length}"
    if why:
        raise LayoutError(f"{notation} cannot say {why}; describe such a tensor with Sharding.to_dict()")


def _axes(sharding: Sharding) -> list[tuple[str, ...]]:
    """For each dimension the axes that cut it, outermost first; sub-axes for one that is split."""
    mesh = sharding.mesh.view(sharding.view)
    return [
        tuple(
            leaf for name in (names or "").split("-") if name for leaf in reversed(mesh.axis_pairs(name, ordered=True))
        )
        for names in sharding.cut or ()
    ]


def partition_spec(sharding: Sharding) -> tuple[str | tuple[str, ...] | None, ...]:
    """What ``jax.sharding.PartitionSpec`` takes."""
    refuse(sharding, "a PartitionSpec")
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in _axes(sharding))


def from_partition_spec(spec: Iterable[object], dimensions: int) -> tuple[str | None, ...]:
    """The cut that a ``PartitionSpec`` states of a tensor of so many dimensions; those that it leaves out are whole."""
    if isinstance(spec, str) or not isinstance(spec, Iterable):
        raise LayoutError(f"{quoted(spec)} is no PartitionSpec; give axes or None for each dimension: ('tp', None)")
    for partial in ("unreduced", "reduced"):  # sets of axes, of JAX's newer PartitionSpec
        if axes := getattr(spec, partial, None):
            raise LayoutError(
                f"the PartitionSpec is {partial} along {', '.join(sorted(axes))}, which a sharding cannot say; reduce "
                "the array first"
            )
    entries: list[tuple[str, ...]] = []
    for given in spec:
        one = () if given is None else (given,) if isinstance(given, str) else given
        if not isinstance(one, tuple | list) or not all(isinstance(axis, str) for axis in one):
            raise LayoutError(
                f"{quoted(one)} of a PartitionSpec names no axes: the compiler chooses; give an axis, a tuple of axes, "
                "or None"
            )
        entries.append(tuple(one))
    if len(entries) > dimensions:
        raise LayoutError(
            f"a PartitionSpec of {len(entries)} entries is given for a tensor of {dimensions} dimensions; give one for "
            "each dimension"
        )
    return tuple("-".join(one) or None for one in entries) + (None,) * (dimensions - len(entries))


def check_even(sharding: Sharding, notation: str) -> Sharding:
    """The sharding, whose cuts are even: others mean something else by an uneven one, or refuse it."""
    for dim, length in enumerate(sharding.shape):
        ways = sharding.shard_map.shards[dim]
        if length % ways:
            raise LayoutError(
                f"{notation} cuts evenly, and {ways} does not divide dimension {dim} of length {length}; give the "
                "padded shape, or construct the Sharding with that cut"
            )
    return sharding


def shardy(sharding: Sharding, name: str = "mesh") -> str:
    """The mesh and the sharding as MLIR text."""
    refuse(sharding, "Shardy")
    if sharding.mesh.offset:
        raise LayoutError(f"Shardy counts devices from 0, and the mesh begins at rank {sharding.mesh.offset}; shift it")
    axes = reversed(sharding.mesh.view(sharding.view).axes.items())
    sizes = ", ".join(f'"{axis}"={size}' for axis, size in axes)
    ranks = sharding.mesh.rank_map
    devices = f", device_ids=[{', '.join(map(str, ranks))}]" if ranks else ""
    cuts = ", ".join("{" + ", ".join(f'"{axis}"' for axis in cut) + "}" for cut in _axes(sharding))
    return f"sdy.mesh @{name} = <[{sizes}]{devices}>\n#sdy.sharding<@{name}, [{cuts}]>"


def from_shardy(text: str) -> tuple[Mesh, tuple[str | None, ...]]:
    """Mesh and cut of such a text. Raises ``LayoutError`` for one that says more: open dimensions, parts of axes."""
    mesh = re.search(r"sdy\.mesh @\"?([\w.]+)\"? = <\[([^\]]*)\](?:, device_ids=\[([\d, ]+)\])?>", text)
    cuts = re.search(r"#sdy\.sharding<@\"?([\w.]+)\"?, \[([^\]]*)\]>", text)
    if mesh is None or cuts is None or mesh[1] != cuts[1]:
        raise LayoutError(
            f"{quoted(text)} is no sdy.mesh with a #sdy.sharding on it of closed dimensions; write "
            '<["dp"=4, "tp"=2]> and [{"dp"}, {}]'
        )
    sizes = {axis: int(size) for axis, size in re.findall(r'"(\w+)"=(\d+)', mesh[2])}
    found = re.findall(r"\{([^}]*)\}", cuts[2])
    for dimension in found:
        if not re.fullmatch(r'("\w+"(, "\w+")*)?', dimension.strip()):
            raise LayoutError(
                f"{quoted(dimension)} is no list of whole axes in quotes; split the axis, close the dimension"
            )
    ranks = [int(rank) for rank in mesh[3].split(",")] if mesh[3] else None
    axes = dict(reversed(sizes.items()))
    return Mesh.of(axes, rank_map=ranks), tuple("-".join(re.findall(r'"(\w+)"', one)) or None for one in found)


def m2n(sharding: Sharding) -> M2N:
    """The mesh and the placements of NCCL's M2N: at most two axes, of which one cuts, over consecutive ranks."""
    refuse(sharding, "M2N", at=False)
    if sharding.mesh.rank_map:
        raise LayoutError("M2N cannot say a rank_map: its ranks are consecutive; give a mesh without one")
    mesh = sharding.mesh.view(sharding.view)
    dims = {axis: dim for dim, axes in enumerate(_axes(sharding)) for axis in axes}
    _check_order(sharding, mesh.axes)
    start, merged = sharding.mesh.offset, list[tuple[int, int | None]]()
    fixed = dict(sharding.shard_map.at)
    for axis, size in reversed(mesh.axes.items()):  # outermost first
        if size == 1:
            continue
        stride = mesh.strides[axis]
        if kept := fixed.get((size, stride)):
            if merged or len(kept) > 1:
                raise LayoutError(f"M2N takes consecutive ranks, and at={sharding.at} leaves gaps between them")
            start += kept[0] * stride
            continue
        if merged and merged[-1][1] == dims.get(axis):
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, dims.get(axis)))
    if len(merged) > 2 or sum(dim is not None for _, dim in merged) > 1:
        shown = ", ".join(f"{size} {'copies' if dim is None else f'cut dimension {dim}'}" for size, dim in merged)
        raise LayoutError(f"M2N takes two axes, of which one cuts the tensor; this has {shown}, outermost first")
    merged = merged or [(1, None)]
    return M2N(tuple(size for size, _ in merged), start, tuple(dim for _, dim in merged))


def from_m2n(m2n: M2N, shape: Sequence[int], names: Sequence[str] | None) -> tuple[Mesh, tuple[str | None, ...]]:
    """Mesh and cut of M2N's mesh and placements; ``names`` are those of its axes, outermost first."""
    dims, start, placements = m2n
    axes = tuple(names) if names is not None else tuple(f"axis{number}" for number in range(len(dims)))
    if not len(dims) == len(placements) == len(axes):
        raise LayoutError(
            f"M2N's mesh of {len(dims)} axes has {len(placements)} placements and {len(axes)} names; give one for each "
            "axis"
        )
    cutting = [dim for dim in placements if dim is not None]
    if len(dims) > 2 or len(cutting) > 1:
        raise LayoutError(
            f"M2N takes two axes, of which one cuts the tensor, and {len(dims)} axes with placements "
            f"{quoted(placements)} are given; write such a sharding with its axes"
        )
    if any(type(dim) is not int or not 0 <= dim < len(shape) for dim in cutting):
        raise LayoutError(
            f"placements {quoted(placements)} cut a tensor of {len(shape)} dimensions; give a dimension from 0, or None"
        )
    mesh = Mesh.of(dict(zip(axes[::-1], dims[::-1], strict=True)), offset=start)
    by_dim = {dim: axis for axis, dim in zip(axes, placements, strict=True)}
    return mesh, tuple(by_dim.get(dim) for dim in range(len(shape)))


def _check_order(sharding: Sharding, axes: Mapping[str, int]) -> None:
    outermost = list(axes)[::-1]
    for cut in _axes(sharding):
        wide: Sequence[str] = [axis for axis in cut if axes.get(axis, 1) > 1]
        if list(wide) != sorted(wide, key=outermost.index):
            raise LayoutError(
                f"M2N cuts in the order of the mesh, {'-'.join(outermost)} outermost first, and a dimension is cut by "
                f"{'-'.join(wide)}; permute the axes"
            )
