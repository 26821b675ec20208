"""DTensors as shardings: their mesh and their placements.

```
mesh (dp, tp), placements            cut of a tensor of two dimensions
[Shard(0), Replicate()]              ("dp", None)
[Replicate(), Shard(1)]              (None, "tp")
[Shard(0), Shard(0)]                 ("dp-tp", None)           dp cuts first
[_StridedShard(0), Shard(0)]         ("tp-dp", None)           tp cuts first: FSDP2 over tensor parallelism
```

Ranks of different stages have different tensors: combine the shardings of all ranks before planning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor, Replicate, Shard

from rankmesh.backend.meshes import strided_shard
from rankmesh.core.mesh import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import LayoutError, quoted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["cut_of", "mesh_of", "placements_of", "sharding_of"]


def sharding_of(tensor: DTensor) -> Sharding:
    """Return the sharding of one DTensor: its global shape on its mesh."""
    return Sharding(mesh_of(tensor.device_mesh), cut_of(tensor), tuple(tensor.shape), str(tensor.dtype))


def cut_of(tensor: DTensor) -> tuple[str | None, ...]:
    """Return the axes of the mesh that cut each dimension of a DTensor, outermost first: ``"dp-tp"``."""
    sizes = dict(zip(_names(tensor.device_mesh), tensor.device_mesh.mesh.shape, strict=True))
    cuts: list[list[str]] = [[] for _ in tensor.shape]
    # From the last mesh dimension to the first: a plain shard cuts before those behind it, a strided one after some.
    for name, placement in reversed(list(zip(sizes, tensor.placements, strict=True))):
        if isinstance(placement, Replicate):
            continue
        dim = _dim(placement, len(tensor.shape))
        cuts[dim].insert(_place(cuts[dim], sizes, placement), name)
    return tuple("-".join(axes) or None for axes in cuts)


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Return the mesh of a DeviceMesh, whose last dimension is adjacent; its ranks must have no gaps."""
    ranks = device_mesh.mesh.flatten().tolist()
    offset = min(ranks)
    if sorted(ranks) != list(range(offset, offset + len(ranks))):
        raise LayoutError(
            f"the DeviceMesh has gaps between its ranks {ranks[:8]}; state the sharding on a mesh without gaps, and "
            "say where on it this one is: Sharding(mesh, ..., at={'pp': 1})",
            ranks=tuple(ranks),
        )
    sizes = dict(zip(_names(device_mesh)[::-1], device_mesh.mesh.shape[::-1], strict=True))
    return Mesh(offset=offset, rank_map=ranks, **sizes)


def placements_of(sharding: Sharding, device_mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements of a sharding, one for each dimension of a ``DeviceMesh`` of the same ranks and axes."""
    for option in ("at", "parts", "padded"):
        if value := getattr(sharding, option):
            raise LayoutError(
                f"a DTensor has cuts only, and this sharding has {option}={quoted(dict(value))}; describe it with "
                "Sharding.to_dict()"
            )
    there = mesh_of(device_mesh)
    if there != sharding.mesh or sharding.view:
        raise LayoutError(
            f"the DeviceMesh is {there}, and the sharding is on {sharding.mesh}{' (a view)' if sharding.view else ''}; "
            "make the DeviceMesh of the same ranks and axes, the first of which is its last dimension"
        )
    cuts = [tuple(filter(None, (axes or "").split("-"))) for axes in sharding.cut or ()]
    names = list(_names(device_mesh))
    made: list[Placement] = []
    for number, name in enumerate(names):
        dim = next((dim for dim, axes in enumerate(cuts) if name in axes), None)
        if dim is None:
            made.append(Replicate())
            continue
        # The axes behind it in the mesh that cut before it: torch calls that strided.
        before = [axis for axis in cuts[dim][: cuts[dim].index(name)] if axis in names[number + 1 :]]
        factor = prod(there.axes[axis] for axis in before)
        made.append(Shard(dim) if factor == 1 else strided_shard(dim, factor))
    return tuple(made)


def _names(device_mesh: DeviceMesh) -> Sequence[str]:
    return device_mesh.mesh_dim_names or tuple(f"dim{number}" for number in range(device_mesh.ndim))


def _dim(placement: Placement, dimensions: int) -> int:
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int) or (not isinstance(placement, Shard) and not hasattr(placement, "split_factor")):
        raise LayoutError(
            f"placement {placement} does not say where each element is, as partial sums do not; redistribute the "
            "DTensor to Shard or Replicate first",
            placement=placement,
        )
    return dim % dimensions


def _place(axes: Sequence[str], sizes: Mapping[str, int], placement: Placement) -> int:
    """Return the number of placed axes that cut before a placement: those that its split factor counts."""
    factor, passed = getattr(placement, "split_factor", 1), 1
    for place in range(len(axes) + 1):
        if passed == factor:
            return place
        passed *= sizes[axes[place]] if place < len(axes) else 1
    raise LayoutError(
        f"the split factor of placement {placement} is not a product of the axes behind it ({', '.join(axes)}); "
        "redistribute the DTensor to plain shards first",
        placement=placement,
    )
