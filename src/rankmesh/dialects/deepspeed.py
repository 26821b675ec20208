"""DeepSpeed's ``mpu``, which is also the grid of its ``PipelineModule``: which ranks share a layer, a sequence, data.

    rank = tp + TP · (sp + SP · (dp + DP · pp))        DeepSpeed's own grid: pipe slowest, then data, then tensors

```
method family                          axes          kind in the plan
tensor_model, slice                    tp            tp
sequence                               sp            sp
data                                   dp            dp
sequence_data                          sp, dp        sp_dp         ZeRO shards over it
pipeline_model, pipe                   pp            pp
model                                  tp, pp        mp            overflow checks, gradient norms

DeepSpeed's axis of a topology         pipe     data     model           model is tensor parallelism
axis of the plan                       pp       dp       tp              sp is 1
```

```python
with Mpu.connect(tp=2, pp=2) as mpu:                       # or Mpu(rm.connect(plan(world, tp=2, pp=2)))
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
```

There is no ``initialize_sequence_parallel``: DeepSpeed takes an object that has it for one that knows sequences alone.
Source: DeepSpeed 0.19.8, ``deepspeed.runtime.pipe.topology`` and ``deepspeed.utils.groups``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from rankmesh.core import GroupSpec, Mesh, Options, Plan
from rankmesh.core.recipes.sizes import world_and_dp
from rankmesh.errors import ConnectError, PlanError, quoted
from rankmesh.runtime.getters import Getters, first_of, group_of, rank_in, ranks_of, size_of
from rankmesh.runtime.handles import LiveGroup
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.registry import Registry, refusing_sizes, world_size

__all__ = ["Mpu", "ProcessCoord", "Topology", "plan"]

_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}


class ProcessCoord(NamedTuple):
    """A rank's position in a topology."""

    pipe: int
    data: int
    model: int


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
                f"a mesh of {quoted(mesh.axes)} is not a topology of DeepSpeed, whose axes are pp, dp and tp, where "
                "every other has one rank; connect rankmesh.dialects.deepspeed.plan(tp=..., pp=...)",
                axes=mesh.axes,
            )
        self._mesh = mesh
        self.axes = list(_AXES)
        self.dims = [self.get_dim(axis) for axis in self.axes]

    def get_axis_names(self) -> list[str]:
        """Return the axes, first the slowest."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 for one that there is not, as in DeepSpeed."""
        return self._mesh.axes[_AXES[axis]] if axis in _AXES else 0

    def world_size(self) -> int:
        """Return the product of the axes' sizes."""
        return self._mesh.size

    def get_coord(self, rank: int) -> ProcessCoord:
        """Return the position of a rank, by axis."""
        place = self._mesh.coordinate(rank)
        return ProcessCoord(*(place[ours] for ours in _AXES.values()))

    def get_rank(self, **coord: int) -> int:
        """Return the rank at a place; every axis is named."""
        return self._mesh.rank(view=None, **{_AXES[axis]: position for axis, position in coord.items()})

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the place of a rank for file names, without some axes: ``model_01``."""
        place = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{place[axis]:02d}" for axis in self.axes if axis not in omit_axes)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one position of an axis, ascending."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the ranks of every group along an axis."""
        return self._mesh.groups(_AXES[axis]).tolist() if axis in _AXES else []

    def filter_match(self, **positions: int) -> list[int]:
        """Return the ranks at these positions, ascending."""
        wanted = positions.items()
        return [rank for rank in self._mesh.rank_range.members if wanted <= self.get_coord(rank)._asdict().items()]


def plan(
    world_size: int | None = None,
    *,
    tp: int = 1,
    sp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    options: Options | None = None,
) -> Plan:
    """Return the groups that DeepSpeed asks for; ``dp`` and ``world_size`` follow from each other.

    >>> plan(16, tp=2, sp=2, pp=2).groups("sp_dp").of(0).ranks
    (0, 2, 4, 6)
    """
    world, data = world_and_dp(world_size, dp, tp=tp, sp=sp, pp=pp)
    specs = [GroupSpec(name) for name in ("tp", "sp", "dp", "pp")]
    specs += [GroupSpec("sp_dp", "sp-dp"), GroupSpec("mp", "tp-pp")]
    return Plan(Mesh(tp=tp, sp=sp, dp=data, pp=pp), specs, world_size=world, options=options)


class Mpu(Getters, AbstractContextManager["Mpu"]):
    """The model-parallel unit over live groups of the kinds ``tp sp dp pp sp_dp mp``, whatever mesh they are of.

    Over a mesh of pp, dp and tp alone it is also the grid of a ``PipelineModule``: see ``as_grid``.

    ``Mpu(groups)`` uses groups that someone else owns; ``Mpu.connect`` makes them, and ``close`` destroys these.
    """

    def __init__(self, groups: LiveGroups) -> None:
        missing = [kind for kind in ("tp", "sp", "dp", "pp", "sp_dp", "mp") if kind not in groups]
        if missing:
            raise PlanError(
                f"the groups have no {', '.join(missing)}; DeepSpeed asks for tp, sp, dp, pp, sp_dp and mp; "
                "connect the plan of rankmesh.dialects.deepspeed.plan(), or add these groups to yours",
                missing=tuple(missing),
            )
        self._groups = groups
        self._registry: Registry | None = None

    @classmethod
    def connect(cls, *, tp: int = 1, sp: int = 1, pp: int = 1) -> Mpu:
        """Make the groups of this rank in the initialised world; the rest of it is data parallel."""
        world = world_size("Mpu.connect()")
        with refusing_sizes():
            wanted = plan(world, tp=tp, sp=sp, pp=pp)
        registry = Registry("deepspeed", "Mpu.connect", "close")
        mpu = cls(registry.open(wanted))
        mpu._registry = registry
        return mpu

    @property
    def groups(self) -> LiveGroups:
        """The live groups; ``NotInitialized`` after ``close``."""
        return self._groups if self._registry is None else self._registry.groups

    def _group(self, kind: str) -> LiveGroup:
        return self.groups[kind]

    def close(self) -> None:
        """Destroy the groups that ``connect`` made; groups that were given stay with their owner."""
        if self._registry is not None:
            self._registry.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_global_rank(self) -> int:
        """Return the global rank of this process."""
        return self.groups.rank

    # -- tensors ----------------------------------------------------------------------------------

    get_tensor_model_parallel_rank = rank_in("tp")
    get_tensor_model_parallel_world_size = size_of("tp")
    get_tensor_model_parallel_group = group_of("tp")
    get_tensor_model_parallel_src_rank = first_of("tp")
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_group = get_tensor_model_parallel_group

    # -- stages -----------------------------------------------------------------------------------

    get_pipeline_model_parallel_rank = rank_in("pp")
    get_pipeline_model_parallel_world_size = size_of("pp")
    get_pipeline_model_parallel_group = group_of("pp")
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size
    get_pipe_parallel_group = get_pipeline_model_parallel_group

    # -- the whole model --------------------------------------------------------------------------

    get_model_parallel_rank = rank_in("mp")
    get_model_parallel_world_size = size_of("mp")
    get_model_parallel_group = group_of("mp")

    # -- data -------------------------------------------------------------------------------------

    get_data_parallel_rank = rank_in("dp")
    get_data_parallel_world_size = size_of("dp")
    get_data_parallel_group = group_of("dp")
    get_data_parallel_group_ranks = ranks_of("dp")

    # -- sequences --------------------------------------------------------------------------------

    get_sequence_parallel_rank = rank_in("sp")
    get_sequence_parallel_world_size = size_of("sp")
    get_sequence_parallel_group = group_of("sp")
    get_sequence_data_parallel_rank = rank_in("sp_dp")
    get_sequence_data_parallel_world_size = size_of("sp_dp")
    get_sequence_data_parallel_group = group_of("sp_dp")

    # -- the grid of a PipelineModule and its engine --------------------------------------------------------------

    def topology(self) -> Topology:
        """Return the topology to give to a ``PipelineModule``."""
        return Topology(self.groups.plan.mesh)

    _topo = property(topology)

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

    # What the grid has as attributes; in DeepSpeed's words slices are tensor parallelism, pp_group is a list of ranks.
    pipe_parallel_size = property(size_of("pp"))
    data_parallel_size = property(size_of("dp"))
    model_parallel_size = slice_parallel_size = property(size_of("tp"))
    stage_id = property(rank_in("pp"))
    data_parallel_id = property(rank_in("dp"))
    get_stage_id = rank_in("pp")
    get_data_parallel_id = rank_in("dp")
    pp_group = property(ranks_of("pp"))
    dp_group = property(ranks_of("dp"))
    slice_group = property(ranks_of("tp"))
    pp_proc_group = property(group_of("pp"))
    dp_proc_group = property(group_of("dp"))
    slice_proc_group = property(group_of("tp"))

    global_rank = property(get_global_rank)

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return self.groups.plan.mesh.size

    @property
    def is_first_stage(self) -> bool:
        """True if this rank is the first stage."""
        return self.groups["pp"].is_first

    @property
    def is_last_stage(self) -> bool:
        """True if this rank is the last stage."""
        return self.groups["pp"].is_last

    @property
    def p2p_groups(self) -> list[list[int]]:
        """Each rank of the world with the next stage after it, the first after the last."""
        after = {}
        for stages in self.topology().get_axis_comm_lists("pipe"):
            after.update({rank: stages[(place + 1) % len(stages)] for place, rank in enumerate(stages)})
        return [[rank, after[rank]] for rank in sorted(after)]

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the global rank of a stage of this rank's pipeline; ``data`` and ``model`` choose another's."""
        topology = self.topology()
        place = topology.get_coord(self.groups.rank)._replace(pipe=stage_id, **kwargs)
        return topology.get_rank(**place._asdict())
