"""Drop-in for ``megatron.core.process_groups_config``: process groups by short names, handed from part to part.

```
ProcessGroupCollection(tp=..., dp=...)                 by hand; a name that there is not is refused
ProcessGroupCollection.use_mpu_process_groups()        all groups of the parallel state
                      .use_mpu_process_groups(["tp"])  some of them
```

A field that was not set is no attribute (None from Megatron-Core 0.19 on); a field that is None is a group that this
rank has not, or does without. ``RELEASE`` is the release of Megatron-Core that ``install()`` found, whose fields and
answers these classes then have; None: 0.16.1, with the fields of later releases.
"""

# No postponed annotations here: the fields' types are those of Megatron-Core.

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Dict, List, Optional  # noqa: UP035

from torch.distributed import ProcessGroup

from rankmesh.dialects.megatron import parallel_state
from rankmesh.dialects.megatron.multi_module import MultiModuleProcessGroupCollection
from rankmesh.dialects.megatron.prepared import for_ddp, for_optimizer, in_pieces, of_state
from rankmesh.errors import PlanError

__all__ = [
    "MultiModuleProcessGroupCollection",
    "ProcessGroupCollection",
    "ProcessGroupHelperMeta",
    "resolve_gtp_remat_group",
]

# Set before this file is run once more for a release: see ``releases``.
RELEASE: tuple[int, int] | None = globals().get("RELEASE")


def _since(release: tuple[int, int]) -> bool:
    """Whether there is what a release brought: nothing is left out unless an older release is followed."""
    return RELEASE is None or release <= RELEASE


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
    if _since((0, 19)):
        tp_ep_pp_with_egtp_remat: ProcessGroup = field(init=False)
    tp_dp_cp: ProcessGroup = field(init=False)
    dp: ProcessGroup = field(init=False)
    dp_cp: ProcessGroup = field(init=False)
    if _since((0, 19)):
        dp_cp_gtp_remat: ProcessGroup = field(init=False)
    if _since((0, 18)):
        dp_cp_ag: ProcessGroup = field(init=False)
    if _since((0, 19)):
        gtp_remat: ProcessGroup = field(init=False)
        expt_gtp_remat: ProcessGroup = field(init=False)
    expt_dp: ProcessGroup = field(init=False)
    if _since((0, 19)):
        expt_dp_gtp_remat: ProcessGroup = field(init=False)
    if _since((0, 18)):
        expt_dp_ag: ProcessGroup = field(init=False)
    intra_dp_cp: ProcessGroup = field(init=False)
    intra_expt_dp: ProcessGroup = field(init=False)
    inter_dist_opt: ProcessGroup = field(init=False)
    intra_dist_opt: ProcessGroup = field(init=False)

    def __init__(self, **kwargs):  # type: ignore[no-untyped-def]
        _check_names(kwargs, "Unknown attribute")
        for name, group in kwargs.items():
            setattr(self, name, group)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # its groups change

    def __getattr__(self, name: str) -> Any:
        # Reached for what was not set.
        if RELEASE is not None and RELEASE >= (0, 19) and name in _names():
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; it was not set")

    def __repr__(self):  # type: ignore[no-untyped-def]
        groups = {name: vars(self)[name] for name in _names() if name in vars(self)}
        if RELEASE is not None and RELEASE >= (0, 19):
            groups = {name: group for name, group in groups.items() if group is not None}
        shown = [f"{name}({_size(group)})" for name, group in groups.items()]
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
        source = parallel_state if state is None else state
        return cls(**{name: of_state(source, name, RELEASE) for name in wanted})

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
        return for_optimizer(pg_collection, model_chunks, use_gloo_process_groups, RELEASE)

    @staticmethod
    def setup_process_groups_for_ddp(pg_collection: Optional["ProcessGroupCollection"], config, ddp_config):  # type: ignore[no-untyped-def]
        """What DistributedDataParallel needs, by its parameter names; None: the groups of the parallel state.

        Without expert data parallelism this rank is alone in it, by a group that has no communicator.
        """
        return for_ddp(pg_collection, config, ddp_config, RELEASE)

    if _since((0, 19)):

        @staticmethod
        def is_gtp_remat_active(process_group_dict: Dict) -> bool:  # type: ignore[type-arg]  # noqa: UP006
            """Whether several ranks hold the pieces of one weight, of what the ``setup_process_groups_for_...`` give.

            >>> ProcessGroupCollection.is_gtp_remat_active({"gtp_remat_group": None})
            False
            """
            return in_pieces(process_group_dict)


def resolve_gtp_remat_group(pg_collection: Optional["ProcessGroupCollection"], is_expert: bool) -> Any:
    """The ranks that hold the pieces of a weight: the collection's, where it carries them, else the parallel state's.

    ``is_expert``: of an expert's weight. A collection that carries None means that there are none.
    """
    name = "expt_gtp_remat" if is_expert else "gtp_remat"
    if pg_collection is not None and name in vars(pg_collection):
        return getattr(pg_collection, name)
    return of_state(parallel_state, name, RELEASE)


def _names() -> tuple[str, ...]:
    return tuple(item.name for item in fields(ProcessGroupCollection))


def _check_names(names: Iterable[str], what: str) -> None:
    unknown = [name for name in names if name not in _names()]
    if unknown:
        raise PlanError(f"{what}: {unknown}; the groups are {', '.join(_names())}; use these", received=unknown)


def _size(group: Any) -> str:
    return str([each.size() for each in group] if isinstance(group, list | tuple) else group and group.size())


if not _since((0, 17)):
    del MultiModuleProcessGroupCollection
if not _since((0, 20)):
    del resolve_gtp_remat_group
