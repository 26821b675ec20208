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

from typing import TYPE_CHECKING

from rankmesh.dialects.deepspeed.grid import Grid
from rankmesh.errors import PlanError
from rankmesh.groups.handles import LiveGroup
from rankmesh.groups.held import Held, refusing_sizes, world_size
from rankmesh.groups.live import LiveGroups
from rankmesh.layout import Mesh
from rankmesh.plan import GroupSpec, Options, Plan
from rankmesh.plan.recipes.sizes import world_and_dp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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


class Mpu(Grid):
    """The model-parallel unit over live groups of the kinds ``tp sp dp pp sp_dp mp``, whatever mesh they are of.

    ``Mpu(groups)`` uses groups that someone else owns; ``Mpu.connect`` makes them, and ``close`` destroys these.
    """

    def __init__(self, groups: LiveGroups) -> None:
        missing = [kind for kind in ("tp", "sp", "dp", "pp", "sp_dp", "mp") if kind not in groups]
        if missing:
            raise PlanError(
                f"received groups without {', '.join(missing)}; DeepSpeed asks for tp, sp, dp, pp, sp_dp and mp; "
                "connect the plan of rankmesh.dialects.deepspeed.plan(), or add these groups to yours",
                missing=tuple(missing),
            )
        self._groups = groups
        self._held: Held | None = None

    @classmethod
    def connect(cls, *, tp: int = 1, sp: int = 1, pp: int = 1) -> Mpu:
        """Make the groups of this rank in the initialised world; what the sizes leave of it is data parallel."""
        world = world_size("Mpu.connect()")
        with refusing_sizes():
            wanted = plan(world, tp=tp, sp=sp, pp=pp)
        held = Held("deepspeed", "Mpu.connect", "close")
        mpu = cls(held.open(wanted))
        mpu._held = held
        return mpu

    @property
    def groups(self) -> LiveGroups:
        """The live groups; ``NotInitialized`` after ``close``."""
        return self._groups if self._held is None else self._held.groups

    def _group(self, kind: str) -> LiveGroup:
        return self.groups[kind]

    def close(self) -> None:
        """Destroy the groups that ``connect`` made; groups that were given stay with their owner."""
        if self._held is not None:
            self._held.close()

    def __enter__(self) -> Mpu:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_global_rank(self) -> int:
        """The global rank of this process."""
        return self.groups.rank

    # -- tensors ----------------------------------------------------------------------------------

    def get_tensor_model_parallel_rank(self) -> int:
        """The position of this rank among those that share a layer's tensors."""
        return self._group("tp").rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """How many ranks share a layer's tensors."""
        return self._group("tp").size

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """The process group that shares a layer's tensors."""
        return self._group("tp").pg

    def get_tensor_model_parallel_src_rank(self) -> int:
        """The global rank from which that group broadcasts: its first member."""
        return self._group("tp").first

    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_group = get_tensor_model_parallel_group

    # -- stages -----------------------------------------------------------------------------------

    def get_pipeline_model_parallel_rank(self) -> int:
        """The stage of this rank."""
        return self._group("pp").rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """How many stages there are."""
        return self._group("pp").size

    def get_pipeline_model_parallel_group(self) -> ProcessGroup:
        """The process group of the stages that this rank's activations pass."""
        return self._group("pp").pg

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size
    get_pipe_parallel_group = get_pipeline_model_parallel_group

    # -- the whole model --------------------------------------------------------------------------

    def get_model_parallel_rank(self) -> int:
        """The position of this rank among those that hold one model: tensors and stages."""
        return self._group("mp").rank

    def get_model_parallel_world_size(self) -> int:
        """How many ranks hold one model."""
        return self._group("mp").size

    def get_model_parallel_group(self) -> ProcessGroup:
        """The process group that holds one model."""
        return self._group("mp").pg

    # -- data -------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        """The position of this rank among those that hold the same weights and other data."""
        return self._group("dp").rank

    def get_data_parallel_world_size(self) -> int:
        """How many ranks hold the same weights and other data."""
        return self._group("dp").size

    def get_data_parallel_group(self) -> ProcessGroup:
        """The process group that holds the same weights and other data."""
        return self._group("dp").pg

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The global ranks of the data-parallel group."""
        return list(self._group("dp").ranks)

    # -- sequences --------------------------------------------------------------------------------

    def get_sequence_parallel_rank(self) -> int:
        """The position of this rank among those that share a sequence."""
        return self._group("sp").rank

    def get_sequence_parallel_world_size(self) -> int:
        """How many ranks share a sequence."""
        return self._group("sp").size

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """The process group that shares a sequence."""
        return self._group("sp").pg

    def get_sequence_data_parallel_rank(self) -> int:
        """The position of this rank among those that hold the same weights, sequences and data taken together."""
        return self._group("sp_dp").rank

    def get_sequence_data_parallel_world_size(self) -> int:
        """How many ranks hold the same weights, sequences and data taken together."""
        return self._group("sp_dp").size

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """The process group of gradients and ZeRO shards."""
        return self._group("sp_dp").pg
