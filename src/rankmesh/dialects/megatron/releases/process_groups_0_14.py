"""Megatron-Core 0.14: three classes of process groups, where later releases have one collection.

Run over the globals of ``process_groups_config``, after it: see ``releases``.

```
ModelCommProcessGroups       the model's layers       use_mpu_process_groups() takes them from the parallel state
GradCommProcessGroups        DistributedDataParallel
GradFinalizeProcessGroups    finalize_model_grads
```
"""

# No postponed annotations here: the fields' types are those of Megatron-Core.

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, List  # noqa: UP035

from torch.distributed import ProcessGroup

from rankmesh.dialects.megatron.prepared import of_state
from rankmesh.errors import PlanError

if TYPE_CHECKING:  # it is the module's own, which install() may have exchanged
    from rankmesh.dialects.megatron import parallel_state


@dataclass
class ModelCommProcessGroups:
    """The process groups of a model's layers, each set in the constructor or later."""

    tp: ProcessGroup = field(init=False)
    pp: ProcessGroup = field(init=False)
    mp: ProcessGroup = field(init=False)
    embd: ProcessGroup = field(init=False)
    pos_embd: ProcessGroup = field(init=False)
    cp: ProcessGroup = field(init=False)
    tp_cp: ProcessGroup = field(init=False)
    hcp: List[ProcessGroup] = field(init=False)  # noqa: UP006
    ep: ProcessGroup = field(init=False)
    expt_tp: ProcessGroup = field(init=False)
    tp_ep: ProcessGroup = field(init=False)
    tp_ep_pp: ProcessGroup = field(init=False)
    expt_dp: ProcessGroup = field(init=False)

    def __init__(self, **kwargs: Any) -> None:
        self._check(kwargs, "Unknown attribute")
        for name, group in kwargs.items():
            setattr(self, name, group)

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: List[str] | None = None):  # type: ignore[no-untyped-def]  # noqa: UP006
        """The groups of the parallel state; ``required_pgs``: the fields wanted."""
        wanted = [item.name for item in fields(cls)] if required_pgs is None else required_pgs
        cls._check(wanted, "Invalid process groups requested")
        return cls(**{name: of_state(parallel_state, name) for name in wanted})

    @classmethod
    def _check(cls, names: Any, what: str) -> None:
        known = [item.name for item in fields(cls)]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise PlanError(f"{what}: {unknown}; the groups are {', '.join(known)}; use these", received=unknown)


@dataclass
class GradCommProcessGroups:
    """The process groups over which gradients are reduced, each set later."""

    dp: ProcessGroup = field(init=False)
    dp_cp: ProcessGroup = field(init=False)
    expt_dp: ProcessGroup = field(init=False)
    intra_dp_cp: ProcessGroup = field(init=False)
    intra_expt_dp: ProcessGroup = field(init=False)
    inter_dist_opt: ProcessGroup = field(init=False)


@dataclass
class GradFinalizeProcessGroups:
    """The process groups that finish gradients: embeddings, and what layers of a sequence share; each set later."""

    tp: ProcessGroup = field(init=False)
    pp: ProcessGroup = field(init=False)
    embd: ProcessGroup = field(init=False)
    pos_embd: ProcessGroup = field(init=False)
    dp_cp: ProcessGroup = field(init=False)
    cp: ProcessGroup = field(init=False)
