"""torchtitan's ``ParallelDims``: its degrees, and the device meshes over them; no process group twice.

```
dataloading   pp  batch         .       cp   tp           batch  = dp_replicate x dp_shard
dense         pp  dp_replicate  dp_shard cp  tp           loss   = batch x cp
              pp  dp_replicate  fsdp         tp           fsdp   = dp_shard x cp            (partial_dtensor)
              pp  dp            .       cp   tp           dp     = batch                    (spmd_types)
sparse        pp  dp_replicate  efsdp        ep           efsdp  = dp_shard x cp x tp / ep
```

```python
from rankmesh.dialects.torchtitan import ParallelDims      # instead of torchtitan.distributed
dims = ParallelDims(dp_replicate=1, dp_shard=-1, cp=1, tp=2, pp=1, ep=1, world_size=8)
fully_shard(model, mesh=dims.get_mesh("fsdp"))
```

What differs: torchtitan makes process groups for each of its meshes, most of them several times; here each set of ranks
has one, after the ranks have agreed on the degrees, and ``close`` destroys them. Degrees that it asserts on are a
``SizesError``, which is an ``AssertionError`` too. Source: torchtitan 0.3.0, ``torchtitan.distributed.parallel_dims``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rankmesh.backend import meshes
from rankmesh.core import Plan, recipes
from rankmesh.errors import PlanError, SizesError, quoted
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.registry import Registry, refusing_sizes, register

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelDims"]

_BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")
# By backend: the axes between stages and tensors of the mesh that parameters lie on.
_DENSE = {
    "partial_dtensor": ("dp_replicate", "fsdp"),
    "full_dtensor": ("dp_replicate", "dp_shard", "cp"),
    "spmd_types": ("dp_replicate", "dp_shard", "cp"),
}
# The axes of a dense layer's mesh; those of experts.
_SPMD = {backend: (*axes, "tp") for backend, axes in _DENSE.items()} | {"spmd_types": ("dp", "cp", "tp")}
_SPARSE = ("dp_replicate", "efsdp", "ep")
# Axes of a tensor's layout that a mesh has; it leaves the others out.
_IN_BAND = {"partial_dtensor": ("tp", "ep"), "spmd_types": ("dp", "cp", "tp", "ep")}


def _above_one(axis: str) -> property:
    return property(lambda self: getattr(self, axis) > 1, doc=f"Whether the degree ``{axis}`` is above 1.")


@dataclass
class ParallelDims(AbstractContextManager["ParallelDims"]):
    """The degrees of a job, and its meshes; all ranks ask for their first one together, when the groups are made.

    ``close``, or leaving a ``with`` block, destroys them. ``dp_shard=-1`` is what the others leave of ``world_size``.
    Raises ``SizesError`` (an ``AssertionError`` and a ``ValueError``) for degrees that do not give the world, and
    ``PlanError`` for another ``spmd_backend``.

    >>> dims = ParallelDims(dp_replicate=2, dp_shard=-1, cp=1, tp=2, pp=1, ep=1, world_size=8)
    >>> dims.dp_shard, dims.fsdp_enabled, dims.cp_enabled, dims.seq_len_divisor
    (2, True, False, 4)
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    world_size: int
    spmd_backend: str = "spmd_types"
    plan: Plan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        others = self.dp_replicate * self.cp * self.tp * self.pp
        if self.dp_shard == -1 and others > 0:
            self.dp_shard = self.world_size // others
        if self.spmd_backend not in _BACKENDS:
            raise PlanError(
                f"spmd_backend {quoted(self.spmd_backend)} is unknown; use one of {', '.join(_BACKENDS)}",
                received=self.spmd_backend,
            )
        if self.dp_shard < 1:
            raise SizesError(
                f"dp_shard is {self.dp_shard} in a world of {self.world_size}, of which the other degrees take "
                f"{others}; it is 1 or more, or -1 for what they leave; lower the others",
                dp_shard=self.dp_shard,
            )
        with refusing_sizes():
            self.plan = self._planned()
        self._registry = Registry("torchtitan", "build_mesh", "close")
        self._world: DeviceMesh | None = None
        self._whole: dict[str, DeviceMesh] = {}
        self._single: dict[str, DeviceMesh] = {}
        self._several: dict[tuple[str, ...], DeviceMesh] = {}
        register(self)

    @classmethod
    def from_config(cls, parallelism_config: Any, world_size: int) -> ParallelDims:
        """Return the degrees of torchtitan's ``ParallelismConfig``."""
        given = parallelism_config
        return cls(
            dp_replicate=given.data_parallel_replicate_degree,
            dp_shard=given.data_parallel_shard_degree,
            cp=given.context_parallel_degree,
            tp=given.tensor_parallel_degree,
            pp=given.pipeline_parallel_degree,
            ep=given.expert_parallel_degree,
            world_size=world_size,
            spmd_backend=given.spmd_backend,
        )

    def _planned(self) -> Plan:
        """Return the kinds that meshes of this backend are made of; without experts there is no ``efsdp``."""
        plan = recipes.torchtitan(
            self.world_size, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp,
            pp=self.pp, ep=self.ep,
        )  # fmt: skip
        unused = {"etp", "dp_shard" if self.spmd_backend == "partial_dtensor" else "fsdp"}
        return plan.without(*(unused if self.ep > 1 else unused | {"efsdp"}))

    # -- which axes there are ---------------------------------------------------------------------------------------

    dp_replicate_enabled = _above_one("dp_replicate")
    dp_shard_enabled = _above_one("dp_shard")
    cp_enabled = _above_one("cp")
    tp_enabled = _above_one("tp")
    pp_enabled = _above_one("pp")
    ep_enabled = _above_one("ep")

    @property
    def dp_enabled(self) -> bool:
        """True if data is parallel, replicated or sharded."""
        return self.dp_replicate > 1 or self.dp_shard > 1

    @property
    def dp_cp_enabled(self) -> bool:
        """True if a loss is reduced over ranks."""
        return self.dp_enabled or self.cp > 1

    @property
    def fsdp_enabled(self) -> bool:
        """True if parameters are sharded over data or sequences."""
        return self.dp_shard > 1 or self.cp > 1

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that see the same data."""
        return self.cp * self.tp * self.pp

    @property
    def seq_len_divisor(self) -> int:
        """The divisor of the length of a sequence: tp for sequence parallelism, 2 x cp for balanced sharding."""
        return self.tp * self.cp * 2

    # -- the meshes ---------------------------------------------------------------------------------------------------

    def build_mesh(self) -> DeviceMesh:
        """Make every process group and mesh; the mesh of the whole world."""
        groups = self._registry.open(self.plan)
        self._world = _mesh_of_the_world()
        self._whole = _whole_meshes(self._world, groups, self)
        self._single = dict(_single_axes(self._whole))
        return self._world

    def _meshes(self) -> dict[str, DeviceMesh]:
        """Return the mesh of each axis, made now if they are not there."""
        if not self._single:
            self.build_mesh()
        return self._single

    def _exists(self, name: str, size: int) -> bool:
        """Return whether one may ask for an axis: data shards also where there is one, for mixed precision."""
        if name == "dp_shard" and self.spmd_backend != "partial_dtensor":
            return True
        if name == "efsdp":
            return self.ep > 1
        return name == "fsdp" or size > 1

    def get_optional_mesh(self, dims: str | list[str], *, include_singleton_axes: bool = False) -> DeviceMesh | None:
        """Return the mesh along these axes; None where one has one rank and ``include_singleton_axes`` is False.

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
        # Kept: two meshes are equal where they are one object.
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
        """Return the mesh along these axes; ``PlanError``, a ``ValueError``, where one of them has one rank only."""
        mesh = self.get_optional_mesh(dims)
        if mesh is None:
            raise PlanError(
                f"Mesh {dims!r} is not available: one of its axes has one rank only; ask get_optional_mesh(), or "
                "raise the degree",
                received=dims,
            )
        return mesh

    def get_activated_mesh(self, axes: list[str]) -> DeviceMesh | None:
        """Return the mesh along the named axes that exist; None if none exists."""
        there = [axis for axis in axes if axis in self._meshes() and self.get_optional_mesh(axis) is not None]
        return self.get_optional_mesh(there) if there else None

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """Return the mesh of each axis of more than one rank, by name."""
        return {
            name: mesh for name, mesh in self._meshes().items() if mesh.size() > 1 and self._exists(name, mesh.size())
        }

    def spmd_meshes(self) -> list[DeviceMesh]:
        """Return the meshes of a dense and of an expert layer, along the axes that exist."""
        found = (self.get_activated_mesh(list(axes)) for axes in (_SPMD[self.spmd_backend], _SPARSE))
        return [mesh for mesh in found if mesh is not None]

    def spmd_dense_mesh(self) -> DeviceMesh:
        """Return the mesh (dp, cp, tp) of forward and backward; with ``spmd_types`` only."""
        self._meshes()
        return self._whole["spmd_dense_for_fwdbwd"]

    def spmd_sparse_mesh(self) -> DeviceMesh | None:
        """Return the mesh (dp_replicate, efsdp, ep) of experts; None where there are none, or no ``spmd_types``."""
        self._meshes()
        return self._whole.get("spmd_sparse_for_fwdbwd")

    def get_dense_tp_mesh(self) -> DeviceMesh:
        """Return the tensor-parallel mesh of dense layers."""
        if self.spmd_backend == "partial_dtensor":
            return self.get_mesh("tp")
        return (self.spmd_dense_mesh() if self.spmd_backend == "spmd_types" else self.spmd_meshes()[0])["tp"]

    def resolve_mesh(self, axes: Iterable[str]) -> DeviceMesh | None:
        """Return the mesh of a tensor's layout, from the axes that it names; None where none of them exists.

        With ``full_dtensor`` it is one of ``spmd_meshes()``, else ``PlanError``, a ``ValueError``.
        """
        names = [str(getattr(axis, "value", axis)) for axis in axes]
        if self.spmd_backend != "full_dtensor":
            return self.get_activated_mesh([name for name in names if name in _IN_BAND[self.spmd_backend]])
        mesh = self.get_activated_mesh(list(_concrete(names)))
        if mesh is not None and mesh not in self.spmd_meshes():
            raise PlanError(
                f"Resolved mesh {mesh.mesh_dim_names} does not match any _SPMD mesh: these are "
                f"{[one.mesh_dim_names for one in self.spmd_meshes()]}; name all axes of one",
                received=tuple(names),
            )
        return mesh

    def resolve_shared_mesh(self, placements: Iterable[Any]) -> DeviceMesh | None:
        """Return the mesh of layouts that name equal axes; entries that are None do not count."""
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
        for kept in (self._whole, self._single, self._several):
            kept.clear()
        self._registry.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def _concrete(names: Iterable[str]) -> Iterator[str]:
    """Yield the axes of storage: dp is replicas and shards; batch and loss are not axes of storage."""
    for name in names:
        if name in ("batch", "loss"):
            raise PlanError(f"{name!r} is not an axis of a layout, since no tensor is sharded along it; name dp and cp")
        yield from ("dp_replicate", "dp_shard") if name == "dp" else (name,)


# -- the meshes ---------------------------------------------------------------------------------------------------


def _mesh_of_the_world() -> DeviceMesh:
    """Return the mesh of all ranks, over the world itself: the root of all others."""
    kind = "cuda" if "nccl" in dist.get_backend() else "cpu"
    world: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return meshes.device_mesh([world], None, ("world",), kind)


def _whole_meshes(world: DeviceMesh, groups: LiveGroups, dims: ParallelDims) -> dict[str, DeviceMesh]:
    """Return every mesh of several axes, by torchtitan's name; of those that hold some axes, the first serves."""

    def unfold(*axes: str) -> DeviceMesh:
        found = [_along(groups, axis, dims) for axis in axes]
        return meshes.unfold(world, axes, tuple(size for size, _ in found), [pg for _, pg in found])

    loading = unfold("pp", "batch", "cp", "tp")
    whole = {
        "dataloading": loading,
        "loss": meshes.flatten(loading, ("batch", "cp"), "loss_mesh", groups["loss"].pg),
        "dense": unfold("pp", *_DENSE[dims.spmd_backend], "tp"),
        "sparse": unfold("pp", *_SPARSE),
    }
    if dims.spmd_backend == "spmd_types":
        whole["spmd_dense_for_fwdbwd"] = unfold("pp", "dp", "cp", "tp")["dp", "cp", "tp"]
        if dims.ep > 1:
            whole["spmd_sparse_for_fwdbwd"] = whole["sparse"][_SPARSE]
    return whole


def _along(groups: LiveGroups, axis: str, dims: ParallelDims) -> tuple[int, ProcessGroup | None]:
    """Return the size of an axis, and its process group: without experts efsdp has none."""
    kind = "batch" if axis == "dp" else axis
    if kind not in groups.plan.kinds:
        return dims.dp_shard * dims.cp * dims.tp, None
    return groups[kind].size, groups[kind].pg


def _single_axes(whole: dict[str, DeviceMesh]) -> Iterator[tuple[str, DeviceMesh]]:
    """Yield the mesh of each axis, in torchtitan's order."""
    loading, dense, sparse = whole["dataloading"], whole["dense"], whole["sparse"]
    yield from (("pp", loading["pp"]), ("batch", loading["batch"]), ("loss", whole["loss"]))
    yield from (("dp_replicate", dense["dp_replicate"]), ("cp", loading["cp"]), ("tp", loading["tp"]))
    yield from (("ep", sparse["ep"]), ("efsdp", sparse["efsdp"]))
    if "spmd_dense_for_fwdbwd" in whole:
        yield "dp", whole["spmd_dense_for_fwdbwd"]["dp"]
    shards = "fsdp" if "fsdp" in (dense.mesh_dim_names or ()) else "dp_shard"
    yield shards, dense[shards]
