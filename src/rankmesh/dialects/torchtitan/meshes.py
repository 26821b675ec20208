"""The device meshes of torchtitan, over the live groups of its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankmesh.backend import meshes as torch_meshes
from rankmesh.dialects.torchtitan.degrees import Degrees
from rankmesh.runtime.live import LiveGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["IN_BAND", "SPARSE", "SPMD", "mesh_of_the_world", "single_axes", "whole_meshes"]

# By backend: the axes between stages and tensors of the mesh that parameters lie on.
_DENSE = {
    "partial_dtensor": ("dp_replicate", "fsdp"),
    "full_dtensor": ("dp_replicate", "dp_shard", "cp"),
    "spmd_types": ("dp_replicate", "dp_shard", "cp"),
}
# The axes of a dense layer's mesh; those of experts.
SPMD = {
    "partial_dtensor": ("dp_replicate", "fsdp", "tp"),
    "full_dtensor": ("dp_replicate", "dp_shard", "cp", "tp"),
    "spmd_types": ("dp", "cp", "tp"),
}
SPARSE = ("dp_replicate", "efsdp", "ep")
# Axes of a tensor's layout that a mesh is told of; the others stay outside.
IN_BAND = {"partial_dtensor": ("tp", "ep"), "spmd_types": ("dp", "cp", "tp", "ep")}


def mesh_of_the_world() -> DeviceMesh:
    """The mesh of all ranks, over the world itself: the root of all others."""
    kind = "cuda" if "nccl" in dist.get_backend() else "cpu"
    world: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return torch_meshes.device_mesh([world], None, ("world",), kind)


def whole_meshes(world: DeviceMesh, groups: LiveGroups, degrees: Degrees) -> dict[str, DeviceMesh]:
    """Every mesh of several axes, by torchtitan's name; of those that hold some axes, the first serves."""

    def unfold(*axes: str) -> DeviceMesh:
        found = [_along(groups, axis, degrees) for axis in axes]
        return torch_meshes.unfold(world, axes, tuple(size for size, _ in found), [pg for _, pg in found])

    loading = unfold("pp", "batch", "cp", "tp")
    whole = {
        "dataloading": loading,
        "loss": torch_meshes.flatten(loading, ("batch", "cp"), "loss_mesh", groups["loss"].pg),
        "dense": unfold("pp", *_DENSE[degrees.spmd_backend], "tp"),
        "sparse": unfold("pp", *SPARSE),
    }
    if degrees.spmd_backend == "spmd_types":
        whole["spmd_dense_for_fwdbwd"] = unfold("pp", "dp", "cp", "tp")["dp", "cp", "tp"]
        if degrees.ep > 1:
            whole["spmd_sparse_for_fwdbwd"] = whole["sparse"][SPARSE]
    return whole


def _along(groups: LiveGroups, axis: str, degrees: Degrees) -> tuple[int, ProcessGroup | None]:
    """The size of an axis, and its process group: without experts nobody asks for that of efsdp, so there is none."""
    kind = "batch" if axis == "dp" else axis
    if kind not in groups.plan.kinds:
        return degrees.dp_shard * degrees.cp * degrees.tp, None
    return groups[kind].size, groups[kind].pg


def single_axes(whole: dict[str, DeviceMesh]) -> Iterator[tuple[str, DeviceMesh]]:
    """The mesh of each axis, in torchtitan's order."""
    loading, dense, sparse = whole["dataloading"], whole["dense"], whole["sparse"]
    yield from (("pp", loading["pp"]), ("batch", loading["batch"]), ("loss", whole["loss"]))
    yield from (("dp_replicate", dense["dp_replicate"]), ("cp", loading["cp"]), ("tp", loading["tp"]))
    yield from (("ep", sparse["ep"]), ("efsdp", sparse["efsdp"]))
    if "spmd_dense_for_fwdbwd" in whole:
        yield "dp", whole["spmd_dense_for_fwdbwd"]["dp"]
    shards = "fsdp" if "fsdp" in (dense.mesh_dim_names or ()) else "dp_shard"
    yield shards, dense[shards]
