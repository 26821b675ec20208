"""Torch's ``DeviceMesh`` over process groups that exist, and memory that the GPUs of a group share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.device_mesh import DeviceMesh

from rankmesh.core.strided import IntArray
from rankmesh.errors import ConnectError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["device_mesh", "flatten", "forget_meshes", "forget_shardings", "strided_shard", "unfold"]


def device_mesh(
    groups: list[dist.ProcessGroup], ranks: IntArray | None, axes: tuple[str, ...], device_type: str | None
) -> DeviceMesh:
    """Return a ``DeviceMesh`` over process groups that exist; ``ranks`` has one axis for each of them."""
    kind = device_type or ("cuda" if "nccl" in dist.get_backend(groups[0]) else "cpu")
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=axes)
    return DeviceMesh.from_group(groups, kind, mesh=torch.tensor(ranks), mesh_dim_names=axes)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a mesh dimension that shards after later ones, as FSDP2 does over tensor parallelism."""
    # Loading torch's sharded tensors takes a third of the time of loading torch: each process would pay for it.
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def unfold(
    root: DeviceMesh, axes: tuple[str, ...], sizes: tuple[int, ...], groups: Sequence[dist.ProcessGroup | None]
) -> DeviceMesh:
    """Return a mesh of these dimensions over a mesh of one, over groups that exist; None: there is none."""
    if _RESOURCES is not None:
        raise ConnectError(
            f"torch {torch.__version__} has no mesh of several views of its ranks, as torchtitan's is; "
            "pip install 'torch>=2.10'"
        )
    made = _within(root, _rows(type(root._layout), sizes), axes)
    _register(root, groups)
    return _named(made, groups)


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str, pg: dist.ProcessGroup) -> DeviceMesh:
    """Give a ``DeviceMesh`` the dimension ``name``: its dimensions ``axes`` joined, over a group that exists."""
    if _RESOURCES is not None:
        joined = DeviceMesh(mesh.device_type, mesh[axes].mesh.flatten(), mesh_dim_names=(name,), _init_backend=False)
        joined = _named(joined, [pg])
        root = _RESOURCES.get_root_mesh(mesh)
        _RESOURCES.child_to_root_mapping[joined] = root
        _RESOURCES.root_to_flatten_mapping.setdefault(root, {})[name] = joined
        places = tuple(map(root.mesh_dim_names.index, axes))
        _RESOURCES.flatten_name_to_root_dims.setdefault(root, {})[name] = places
        return joined
    root, layout = mesh._get_root_mesh(), mesh[axes]._layout
    joined = _named(_within(root, _collapsed(layout), (name,)), [pg])
    _register(root, [pg])
    root._flatten_mapping[name] = joined
    return joined


# Torch before 2.10 keeps beside its meshes which one is part of which; later each mesh has its root.
_RESOURCES: Any = None if hasattr(DeviceMesh, "_get_root_mesh") else torch_meshes._mesh_resources


def _within(root: DeviceMesh, layout: Any, axes: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of this layout of the ranks of its root."""
    how: dict[str, Any] = {"_layout": layout, "_rank_map": root._rank_map, "_root_mesh": root, "_init_backend": False}
    return DeviceMesh(root.device_type, mesh_dim_names=axes, **how)


def _rows(kind: Any, sizes: tuple[int, ...]) -> Any:
    """Return the layout of these sizes, the last adjacent; torch before 2.13 wants the strides, too."""
    if hasattr(kind, "from_sizes_strides"):
        return kind.from_sizes_strides(sizes)
    return kind(sizes, tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes))))


def _collapsed(layout: Any) -> Any:
    """Return a layout with all dimensions of another joined into one."""
    if hasattr(layout, "collapse"):
        return type(layout)([layout.collapse()])
    joined = layout.coalesce()
    return joined.nest() if len(joined) > 1 else joined


def _named(mesh: Any, groups: Sequence[dist.ProcessGroup | None]) -> DeviceMesh:
    """Return the mesh, with these groups for its dimensions."""
    mesh._dim_group_names = ["" if pg is None else pg.group_name for pg in groups]
    made: DeviceMesh = mesh
    return made


def _register(root: DeviceMesh, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Let the root find the groups; torch 2.10 asks its registry of all groups instead."""
    known: dict[str, dist.ProcessGroup] = getattr(root, "_pg_registry", {})
    known.update({pg.group_name: pg for pg in groups if pg is not None})


def forget_meshes() -> None:
    """Empty torch's caches of meshes: they know a mesh by its ranks, and have the position of the rank that made it."""
    forget_shardings()
    if _RESOURCES is not None:
        _RESOURCES.__init__()


def forget_shardings() -> None:
    """Empty torch's caches of how operations shard DTensors, on this thread and on the one of its GPU's backward pass.

    They know a mesh by its ranks. On a new mesh of the same ranks torch would call the groups of the one before.
    """
    _forget_shardings_here()
    if torch.cuda.is_initialized():
        forget: Any = _ForgetInBackward.apply
        with suppress(RuntimeError):  # of a device that fails
            forget(torch.zeros((), device="cuda", requires_grad=True)).backward()


class _ForgetInBackward(torch.autograd.Function):
    """Nothing, but in its backward pass it empties the caches of the thread that runs it."""

    @staticmethod
    def forward(_context: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        _forget_shardings_here()
        return gradient


def _forget_shardings_here() -> None:
    from torch.distributed.tensor import DTensor

    propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    propagate.cache.cache_clear()
    in_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # torch 2.10 and newer
    if in_native is not None:
        in_native()
