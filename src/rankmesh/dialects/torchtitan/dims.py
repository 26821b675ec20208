"""``ParallelDims``: the meshes of the degrees, made at their first use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rankmesh.dialects.torchtitan.degrees import Degrees
from rankmesh.dialects.torchtitan.meshes import IN_BAND, SPARSE, SPMD, mesh_of_the_world, single_axes, whole_meshes
from rankmesh.errors import PlanError, SizesError, quoted
from rankmesh.runtime.registry import Registry, register

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelDims"]


class ParallelDims(Degrees):
    """The meshes of a job; all ranks ask for their first one together, and its process groups are made then.

    ``close``, or leaving a ``with`` block, destroys them.

    >>> dims = ParallelDims(dp_replicate=2, dp_shard=-1, cp=1, tp=2, pp=1, ep=1, world_size=8)
    >>> dims.dp_shard, dims.fsdp_enabled, dims.cp_enabled, dims.seq_len_divisor
    (2, True, False, 4)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._registry = Registry("torchtitan", "build_mesh", "close")
        self._world: DeviceMesh | None = None
        self._whole: dict[str, DeviceMesh] = {}
        self._single: dict[str, DeviceMesh] = {}
        self._several: dict[tuple[str, ...], DeviceMesh] = {}
        register(self)

    def build_mesh(self) -> DeviceMesh:
        """Make every process group and mesh; the mesh of the whole world."""
        groups = self._registry.open(self.plan)
        self._world = mesh_of_the_world()
        self._whole = whole_meshes(self._world, groups, self)
        self._single = dict(single_axes(self._whole))
        return self._world

    def _meshes(self) -> dict[str, DeviceMesh]:
        """The mesh of each axis, made now if they are not there."""
        if not self._single:
            self.build_mesh()
        return self._single

    def _exists(self, name: str, size: int) -> bool:
        """Whether one may ask for an axis: data shards also where there is one, for mixed precision."""
        if name == "dp_shard" and self.spmd_backend != "partial_dtensor":
            return True
        if name == "efsdp":
            return self.ep > 1
        return name == "fsdp" or size > 1

    def get_optional_mesh(self, dims: str | list[str], *, include_singleton_axes: bool = False) -> DeviceMesh | None:
        """The mesh along these axes; None where one of them has one rank only and ``include_singleton_axes`` is False.

        ``fsdp`` (``dp_shard`` with the other backends) always exists, ``efsdp`` wherever there are experts.
        ``PlanError``, a ``ValueError``, for a name that there is not, and for names of no common mesh.
        """
        names, single = [dims] if isinstance(dims, str) else list(dims), self._meshes()
        for name in names:
            if name not in single:
                raise PlanError(
                    f"Invalid mesh dim: {quoted(name)}; the axes with spmd_backend={self.spmd_backend!r} are "
                    f"{', '.join(single)}; use these",
                    received=name,
                )
        if not include_singleton_axes and not all(self._exists(name, single[name].size()) for name in names):
            return None
        return single[names[0]] if len(names) == 1 else self._joint(tuple(names))

    def _joint(self, names: tuple[str, ...]) -> DeviceMesh:
        # Kept: meshes are told apart by identity.
        if names not in self._several:
            holding = [mesh for mesh in self._whole.values() if set(names) <= set(mesh.mesh_dim_names or ())]
            if not holding:
                raise PlanError(
                    f"Invalid mesh name combinations: {list(names)}; no mesh has all of them; its meshes are "
                    f"{', '.join(str(mesh.mesh_dim_names) for mesh in self._whole.values())}; ask for axes of one",
                    received=names,
                )
            self._several[names] = holding[0][names]
        return self._several[names]

    def get_mesh(self, dims: str | list[str]) -> DeviceMesh:
        """The mesh along these axes; ``PlanError``, a ``ValueError``, where one of them has one rank only."""
        mesh = self.get_optional_mesh(dims)
        if mesh is None:
            raise PlanError(
                f"Mesh {dims!r} is not available: one of its axes has one rank only; ask get_optional_mesh(), or "
                "raise the degree",
                received=dims,
            )
        return mesh

    def get_activated_mesh(self, axes: list[str]) -> DeviceMesh | None:
        """The mesh along those of the axes that exist; None where none does."""
        there = [axis for axis in axes if axis in self._meshes() and self.get_optional_mesh(axis) is not None]
        return self.get_optional_mesh(there) if there else None

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """The mesh of each axis of more than one rank, by name."""
        return {
            name: mesh for name, mesh in self._meshes().items() if mesh.size() > 1 and self._exists(name, mesh.size())
        }

    def spmd_meshes(self) -> list[DeviceMesh]:
        """The meshes of a dense and of an expert layer, along the axes that exist."""
        meshes = (self.get_activated_mesh(list(axes)) for axes in (SPMD[self.spmd_backend], SPARSE))
        return [mesh for mesh in meshes if mesh is not None]

    def spmd_dense_mesh(self) -> DeviceMesh:
        """The mesh (dp, cp, tp) of forward and backward; with ``spmd_types`` alone."""
        self._meshes()
        return self._whole["spmd_dense_for_fwdbwd"]

    def spmd_sparse_mesh(self) -> DeviceMesh | None:
        """The mesh (dp_replicate, efsdp, ep) of experts; None where there are none, or no ``spmd_types``."""
        self._meshes()
        return self._whole.get("spmd_sparse_for_fwdbwd")

    def get_dense_tp_mesh(self) -> DeviceMesh:
        """The tensor-parallel mesh of dense layers."""
        if self.spmd_backend == "partial_dtensor":
            return self.get_mesh("tp")
        return (self.spmd_dense_mesh() if self.spmd_backend == "spmd_types" else self.spmd_meshes()[0])["tp"]

    def resolve_mesh(self, axes: Iterable[str]) -> DeviceMesh | None:
        """The mesh of a tensor's layout, from the axes that it names; None where none of them exists.

        With ``full_dtensor`` it is one of ``spmd_meshes()``, else ``PlanError``, a ``ValueError``.
        """
        names = [str(getattr(axis, "value", axis)) for axis in axes]
        if self.spmd_backend != "full_dtensor":
            return self.get_activated_mesh([name for name in names if name in IN_BAND[self.spmd_backend]])
        mesh = self.get_activated_mesh(list(_concrete(names)))
        if mesh is not None and mesh not in self.spmd_meshes():
            raise PlanError(
                f"Resolved mesh {mesh.mesh_dim_names} does not match any SPMD mesh: these are "
                f"{[one.mesh_dim_names for one in self.spmd_meshes()]}; name all axes of one",
                received=tuple(names),
            )
        return mesh

    def resolve_shared_mesh(self, placements: Iterable[Any]) -> DeviceMesh | None:
        """The mesh of layouts that name the same axes; entries that are None do not count."""
        named = [placement.axes() for placement in placements if placement is not None]
        if any(axes != named[0] for axes in named):
            raise SizesError(
                f"Inconsistent mesh axes within a boundary: {[tuple(map(str, axes)) for axes in named]}; "
                "the layouts of one boundary name the same axes; make them one",
                received=tuple(named),
            )
        return self.resolve_mesh(named[0]) if named else None

    @property
    def world_mesh(self) -> DeviceMesh:
        """The mesh of the whole world, of one dimension."""
        return self._world if self._world is not None else self.build_mesh()

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy the process groups; nothing where there are none. Meshes can be made again."""
        self._world = None
        for meshes in (self._whole, self._single, self._several):
            meshes.clear()
        self._registry.close()

    def __enter__(self) -> ParallelDims:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _concrete(names: Iterable[str]) -> Iterator[str]:
    """The axes of storage: dp is replicas and shards; what data loading and losses go over is none."""
    for name in names:
        if name in ("batch", "loss"):
            raise PlanError(f"{name!r} is no axis of a layout, since no tensor is cut along it; name dp and cp")
        yield from ("dp_replicate", "dp_shard") if name == "dp" else (name,)
