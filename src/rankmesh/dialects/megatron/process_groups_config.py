"""Drop-in for ``megatron.core.process_groups_config``: process groups by short names, handed from part to part.

```
ProcessGroupCollection(tp=..., dp=...)                 by hand; a name that there is not is refused
ProcessGroupCollection.use_mpu_process_groups()        all groups of the parallel state
                      .use_mpu_process_groups(["tp"])  some of them
```

A field that was not set is no attribute; a field that is None is a group that this rank has not, or does without.
"""

# No postponed annotations here: the fields' types are those of Megatron-Core.

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, List, Optional  # noqa: UP035

from torch.distributed import ProcessGroup

from rankmesh.dialects.megatron import parallel_state
from rankmesh.dialects.megatron.prepared import for_ddp, for_optimizer, of_state
from rankmesh.errors import PlanError

__all__ = ["ProcessGroupCollection", "ProcessGroupHelperMeta"]


class ProcessGroupHelperMeta(type):
    """A class whose virtual_pipeline_model_parallel_size is set by a method alone."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "virtual_pipeline_model_parallel_size":
            raise AttributeError(
                f"received a value for {name}; it is not assigned; call set_virtual_pipeline_model_parallel_size()"
            )
        super().__setattr__(name, value)


@dataclass(init=False, repr=False, eq=False)
class ProcessGroupCollection:
    """Process groups by Megatron's short names, each set in the constructor or later.

    >>> ProcessGroupCollection()
    ProcessGroupCollection(empty)
    >>> ProcessGroupCollection(tp=None)
    ProcessGroupCollection(tp(None))
    """

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
    tp_dp_cp: ProcessGroup = field(init=False)
    dp: ProcessGroup = field(init=False)
    dp_cp: ProcessGroup = field(init=False)
    expt_dp: ProcessGroup = field(init=False)
    intra_dp_cp: ProcessGroup = field(init=False)
    intra_expt_dp: ProcessGroup = field(init=False)
    inter_dist_opt: ProcessGroup = field(init=False)
    intra_dist_opt: ProcessGroup = field(init=False)
    dp_cp_ag: ProcessGroup = field(init=False)
    expt_dp_ag: ProcessGroup = field(init=False)
    gtp_remat: ProcessGroup = field(init=False)
    expt_gtp_remat: ProcessGroup = field(init=False)
    dp_gtp_remat: ProcessGroup = field(init=False)
    dp_cp_gtp_remat: ProcessGroup = field(init=False)
    expt_dp_gtp_remat: ProcessGroup = field(init=False)
    tp_ep_pp_with_egtp_remat: ProcessGroup = field(init=False)

    def __init__(self, **kwargs):  # type: ignore[no-untyped-def]
        _check_names(kwargs, "Unknown attribute")
        for name, group in kwargs.items():
            setattr(self, name, group)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, ProcessGroupCollection) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # its groups change

    def __repr__(self):  # type: ignore[no-untyped-def]
        shown = [f"{name}({_size(getattr(self, name))})" for name in _names() if hasattr(self, name)]
        return f"ProcessGroupCollection({', '.join(shown) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(  # type: ignore[no-untyped-def]
        cls,
        required_pgs: List[str] | None = None,  # noqa: UP006
        *,
        state: Any = None,
    ):
        """The groups of a parallel state, the default one unless said; ``required_pgs``: the fields wanted."""
        wanted = list(_names()) if required_pgs is None else required_pgs
        _check_names(wanted, "Invalid process groups requested")
        return cls(**{name: of_state(state or parallel_state, name) for name in wanted})

    @staticmethod
    def setup_process_groups_for_optimizer(  # type: ignore[no-untyped-def]
        pg_collection: Optional["ProcessGroupCollection"],
        model_chunks: List,  # type: ignore[type-arg]  # noqa: UP006
        use_gloo_process_groups: bool = True,
    ):
        """What an optimizer needs, by its parameter names; None: the groups of the parallel state.

        Groups that follow from others are filled in, such as dp_cp without context parallelism; a missing one is a
        ``ValueError``.
        """
        return for_optimizer(pg_collection, model_chunks, use_gloo_process_groups)

    @staticmethod
    def setup_process_groups_for_ddp(pg_collection: Optional["ProcessGroupCollection"], config, ddp_config):  # type: ignore[no-untyped-def]
        """What DistributedDataParallel needs, by its parameter names; None: the groups of the parallel state.

        Without expert data parallelism this rank is alone in it, by a group that has no communicator.
        """
        return for_ddp(pg_collection, config, ddp_config)


def _names() -> tuple[str, ...]:
    return tuple(item.name for item in fields(ProcessGroupCollection))


def _check_names(names: Iterable[str], what: str) -> None:
    unknown = [name for name in names if name not in _names()]
    if unknown:
        raise PlanError(f"{what}: {unknown}; the groups are {', '.join(_names())}; use these", received=unknown)


def _size(group: Any) -> str:
    return "x".join(map(_size, group)) if isinstance(group, list | tuple) else str(group and group.size())
