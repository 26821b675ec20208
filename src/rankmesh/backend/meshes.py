"""Torch's ``DeviceMesh`` over process groups that exist, and memory that the GPUs of a group share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from rankmesh.errors import ConnectError, first_line

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["device_mesh", "flatten", "strided_shard", "symmetric_memory", "unfold"]


def device_mesh(
    groups: list[dist.ProcessGroup], ranks: Any, axes: tuple[str, ...], device_type: str | None
) -> DeviceMesh:
    """A ``DeviceMesh`` over process groups that exist; ``ranks`` has one axis for each of them."""
    kind = device_type or ("cuda" if "nccl" in dist.get_backend(groups[0]) else "cpu")
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=axes)
    return DeviceMesh.from_group(groups, kind, mesh=torch.tensor(ranks), mesh_dim_names=axes)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of a mesh dimension that cuts after ones behind it, as FSDP2 cuts over tensor parallelism."""
    # Loading torch's sharded tensors takes a third of the time of loading torch: each process would pay for it.
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def unfold(
    root: DeviceMesh, axes: tuple[str, ...], sizes: tuple[int, ...], groups: Sequence[dist.ProcessGroup | None]
) -> DeviceMesh:
    """A mesh of these dimensions over the ranks of a mesh of one, over groups that exist; None: there is none."""
    made = DeviceMesh(
        root.device_type,
        _layout=type(root._layout).from_sizes_strides(sizes),
        _rank_map=root._rank_map,
        mesh_dim_names=axes,
        _root_mesh=root,
        _init_backend=False,
    )
    root._pg_registry.update({pg.group_name: pg for pg in groups if pg is not None})
    made._dim_group_names = [c10d.GroupName("") if pg is None else pg.group_name for pg in groups]
    return made


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str, pg: dist.ProcessGroup) -> DeviceMesh:
    """Give a ``DeviceMesh`` the dimension ``name``: its dimensions ``axes`` joined, over a group that exists."""
    root = mesh._get_root_mesh()
    layout = mesh[axes]._layout
    joined = DeviceMesh(
        mesh.device_type,
        _layout=type(layout)([layout.collapse()]),
        _rank_map=root._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=root,
        _init_backend=False,
    )
    joined._dim_group_names = [pg.group_name]
    root._pg_registry[pg.group_name] = pg
    root._flatten_mapping[name] = joined
    return joined


def symmetric_memory(size: int, pg: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """``size`` bytes that every GPU of the group maps, and their handle; ``ConnectError`` where there can be none."""
    if not torch.cuda.is_available():
        raise ConnectError("symmetric memory is memory of GPUs, and there is none here; use another buffer")
    import torch.distributed._symmetric_memory as symmetric

    try:
        memory = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return memory, symmetric.rendezvous(memory, pg)
    except RuntimeError as error:
        first = first_line(error)
        raise ConnectError(
            f"the {pg.size()} GPUs of the group share no symmetric memory ({first}); it needs NVLink between them all"
        ) from error
