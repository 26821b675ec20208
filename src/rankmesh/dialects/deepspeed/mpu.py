"""DeepSpeed's ``mpu``: the object that tells it which ranks share a layer, a sequence, a pipeline, and data.

    rank = tp + TP · (sp + SP · (dp + DP · pp))        DeepSpeed's own grid: pipe slowest, then data, then tensors

```
method family                          axes          kind in the plan
tensor_model, slice                    tp            tp
sequence                               sp            sp
data                                   dp            dp
sequence_data                          sp, dp        sp_dp         ZeRO shards over it
pipeline_model, pipe                   pp            pp
model                                  tp, pp        mp            overflow checks, gradient norms
```

```python
with Mpu.connect(tp=2, pp=2) as mpu:                       # or Mpu(rm.connect(plan(world, tp=2, pp=2)))
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
```

There is no ``initialize_sequence_parallel``: DeepSpeed takes an object that has it for one that knows sequences alone.
"""

from __future__ import annotations

from rankmesh.core import GroupSpec, Mesh, Options, Plan
from rankmesh.core.recipes.sizes import world_and_dp
from rankmesh.dialects.deepspeed.grid import Grid
from rankmesh.errors import PlanError
from rankmesh.runtime.getters import Getters, first_of, group_of, rank_in, ranks_of, size_of
from rankmesh.runtime.handles import LiveGroup
from rankmesh.runtime.live import LiveGroups
from rankmesh.runtime.registry import Registry, refusing_sizes, world_size

__all__ = ["Mpu", "plan"]


def plan(
    world_size: int | None = None,
    *,
    tp: int = 1,
    sp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    options: Options | None = None,
) -> Plan:
    """The groups that DeepSpeed asks for; ``dp`` and ``world_size`` follow from each other.

    >>> plan(16, tp=2, sp=2, pp=2).groups("sp_dp").of(0).ranks
    (0, 2, 4, 6)
    """
    world, data = world_and_dp(world_size, dp, tp=tp, sp=sp, pp=pp)
    specs = [GroupSpec(name) for name in ("tp", "sp", "dp", "pp")]
    specs += [GroupSpec("sp_dp", "sp-dp"), GroupSpec("mp", "tp-pp")]
    return Plan(Mesh(tp=tp, sp=sp, dp=data, pp=pp), specs, world_size=world, options=options)


class Mpu(Grid, Getters):
    """The model-parallel unit over live groups of the kinds ``tp sp dp pp sp_dp mp``, whatever mesh they are of.

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
        """Make the groups of this rank in the initialised world; what the sizes leave of it is data parallel."""
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

    def __enter__(self) -> Mpu:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_global_rank(self) -> int:
        """The global rank of this process."""
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
