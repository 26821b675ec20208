"""What DeepSpeed's pipelines ask of their grid: stages, data-parallel ids, neighbours, and a topology of the world.

```
DeepSpeed's axis       pipe     data     model           model is tensor parallelism
mesh of the plan       pp       dp       tp              sp is 1
```

Source: DeepSpeed 0.19.8, ``deepspeed.runtime.pipe.topology``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rankmesh.core import Mesh
from rankmesh.errors import ConnectError, PlanError, quoted
from rankmesh.runtime.live import LiveGroups

__all__ = ["Grid", "Topology"]

_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}

ProcessCoord = namedtuple("ProcessCoord", ["pipe", "data", "model"])


class Topology:
    """DeepSpeed's ``ProcessTopology`` of a mesh: axes pipe, data and model, the last one adjacent.

    >>> topology = Topology(Mesh(tp=2, sp=1, dp=2, pp=2))
    >>> topology.get_coord(5), topology.get_rank(pipe=1, data=0, model=1), topology.get_axis_comm_lists("pipe")
    (ProcessCoord(pipe=1, data=0, model=1), 5, [[0, 4], [1, 5], [2, 6], [3, 7]])
    """

    def __init__(self, mesh: Mesh) -> None:
        other = [name for name, size in mesh.axes.items() if name not in _AXES.values() and size > 1]
        if other or not set(_AXES.values()) <= mesh.axes.keys():
            raise PlanError(
                f"a mesh of {quoted(mesh.axes)} is no topology of DeepSpeed, whose axes are pp, dp and tp, where "
                "every other has one rank; connect rankmesh.dialects.deepspeed.plan(tp=..., pp=...)",
                axes=mesh.axes,
            )
        self._mesh = mesh
        self.axes = list(_AXES)
        self.dims = [self.get_dim(axis) for axis in self.axes]

    def get_axis_names(self) -> list[str]:
        """The axes, first the slowest."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 for one that there is not, as in DeepSpeed."""
        return self._mesh.axes[_AXES[axis]] if axis in _AXES else 0

    def world_size(self) -> int:
        """How many ranks the axes have together."""
        return self._mesh.size

    def get_coord(self, rank: int) -> Any:
        """The place of a rank, by axis."""
        place = self._mesh.coordinate(rank)
        return ProcessCoord(*(place[ours] for ours in _AXES.values()))

    def get_rank(self, **coord: int) -> int:
        """The rank at a place; every axis is named."""
        return self._mesh.rank(view=None, **{_AXES[axis]: position for axis, position in coord.items()})

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The place of a rank for file names, without some axes: ``model_01``."""
        place = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{place[axis]:02d}" for axis in self.axes if axis not in omit_axes)

    def _ranks(self) -> range:
        return range(self._mesh.offset, self._mesh.offset + self._mesh.size)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one position of an axis, ascending."""
        return sorted(rank for rank in self._ranks() if getattr(self.get_coord(rank), axis) == idx)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks of every group along an axis."""
        return self._mesh.groups(_AXES[axis]).tolist() if axis in _AXES else []

    def filter_match(self, **positions: int) -> list[int]:
        """The ranks at these positions, ascending."""
        wanted = positions.items()
        return [rank for rank in self._ranks() if wanted <= self.get_coord(rank)._asdict().items()]


class Grid:
    """The part of an mpu that DeepSpeed's ``PipelineModule`` and ``PipelineEngine`` ask of their grid."""

    @property
    def groups(self) -> LiveGroups:
        """The live groups."""
        raise NotImplementedError

    def topology(self) -> Topology:
        """The topology to give to a ``PipelineModule``."""
        return Topology(self.groups.plan.mesh)

    @property
    def _topo(self) -> Topology:
        return self.topology()

    @contextmanager
    def as_grid(self) -> Iterator[Topology]:
        """While a ``PipelineModule`` is made inside, its grid is this object; gives the topology for it.

        DeepSpeed's own would make every group of the world once more.
        """
        try:
            from deepspeed.runtime.pipe import module  # type: ignore[import-not-found]
        except ImportError as error:
            raise ConnectError(f"as_grid() needs deepspeed, which cannot be imported ({error}); install it") from error
        theirs = module.PipelineParallelGrid
        module.PipelineParallelGrid = lambda topology=None, process_group=None: self
        try:
            yield self.topology()
        finally:
            module.PipelineParallelGrid = theirs

    @property
    def global_rank(self) -> int:
        """The global rank of this process."""
        return self.groups.rank

    @property
    def world_size(self) -> int:
        """How many ranks the grid has."""
        return self.groups.plan.mesh.size

    @property
    def pipe_parallel_size(self) -> int:
        """How many stages there are."""
        return self.groups["pp"].size

    @property
    def data_parallel_size(self) -> int:
        """How many pipelines there are."""
        return self.groups["dp"].size

    @property
    def model_parallel_size(self) -> int:
        """How many ranks share a layer's tensors, which DeepSpeed's grid calls model."""
        return self.groups["tp"].size

    slice_parallel_size = model_parallel_size

    @property
    def stage_id(self) -> int:
        """The stage of this rank."""
        return self.groups["pp"].rank

    @property
    def data_parallel_id(self) -> int:
        """Which pipeline this rank is in."""
        return self.groups["dp"].rank

    def get_stage_id(self) -> int:
        """The stage of this rank."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Which pipeline this rank is in."""
        return self.data_parallel_id

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is the first stage."""
        return self.groups["pp"].is_first

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is the last stage."""
        return self.groups["pp"].is_last

    @property
    def pp_group(self) -> list[int]:
        """The global ranks of this rank's stages."""
        return list(self.groups["pp"].ranks)

    @property
    def dp_group(self) -> list[int]:
        """The global ranks that hold the same stage."""
        return list(self.groups["dp"].ranks)

    @property
    def slice_group(self) -> list[int]:
        """The global ranks that share a layer's tensors."""
        return list(self.groups["tp"].ranks)

    @property
    def pp_proc_group(self) -> Any:
        """The process group of the stages."""
        return self.groups["pp"].pg

    @property
    def dp_proc_group(self) -> Any:
        """The process group of the ranks that hold the same stage."""
        return self.groups["dp"].pg

    @property
    def slice_proc_group(self) -> Any:
        """The process group of a layer's tensors."""
        return self.groups["tp"].pg

    @property
    def p2p_groups(self) -> list[list[int]]:
        """Each rank of the world with the next stage after it, the first after the last."""
        after = {}
        for stages in self.topology().get_axis_comm_lists("pipe"):
            after.update({rank: stages[(place + 1) % len(stages)] for place, rank in enumerate(stages)})
        return [[rank, after[rank]] for rank in sorted(after)]

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The global rank of a stage of this rank's pipeline; ``data`` and ``model`` choose another's."""
        topology = self.topology()
        place = topology.get_coord(self.groups.rank)._replace(pipe=stage_id, **kwargs)
        return topology.get_rank(**place._asdict())
