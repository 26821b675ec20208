"""``megatron.core.process_groups_config`` without Megatron: process groups by short names, handed from part to part.

```
ProcessGroupCollection(tp=..., dp=...)                 by hand; a name that there is not is refused
ProcessGroupCollection.use_mpu_process_groups()        all groups of the parallel state
                      .use_mpu_process_groups(["tp"])  some of them
```

A field that was not set is not an attribute; a field that is None is a group that this rank does not have, or does
without. It has the fields of every release. Megatron's own module asks the parallel state for its groups, so
``install()`` leaves it in place.
"""

# No postponed annotations here: the fields' types are those of Megatron-Core.

from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Dict, List, Optional  # noqa: UP035

from torch.distributed import ProcessGroup

from rankmesh.dialects.megatron.releases import followed_state
from rankmesh.dialects.megatron.table import BY_KIND
from rankmesh.errors import PlanError

__all__ = [
    "MultiModuleProcessGroupCollection",
    "ProcessGroupCollection",
    "ProcessGroupHelperMeta",
    "resolve_gtp_remat_group",
]


class ProcessGroupHelperMeta(type):
    """A class whose virtual_pipeline_model_parallel_size is set by a method only."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "virtual_pipeline_model_parallel_size":
            raise AttributeError(f"{name} cannot be assigned; call set_virtual_pipeline_model_parallel_size()")
        super().__setattr__(name, value)


# The kinds of a parallel state whose names differ from those of the fields.
_KINDS = {
    "expt_tp": "ep_tp",
    "tp_ep": "tp_ep_mp",
    "expt_dp": "ep_dp",
    "intra_expt_dp": "intra_ep_dp",
    "inter_dist_opt": "inter_ep_dp",
    "intra_dist_opt": "intra_dist_opt_instance",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp_gtp",
    "dp_cp_gtp_remat": "dp_cp",
    "expt_dp_gtp_remat": "ep_dp",
}
# Fields with the ranks that hold other pieces of each weight; those of groups that every state has.
_WHOLE = ("dp_cp_gtp_remat", "expt_dp_gtp_remat")
_ALWAYS = ("dp", "dp_cp", "intra_dp_cp", "dp_cp_gtp_remat")


def _of_state(state: ModuleType, name: str) -> ProcessGroup | list[ProcessGroup] | None:
    """Return one field of a collection from a parallel state; None where it has no such group."""
    kind = _KINDS.get(name, name)
    return state.rankmesh_state.given(kind, name in _ALWAYS, whole=name in _WHOLE) if kind in BY_KIND else None


def _size(group: ProcessGroup | list[ProcessGroup] | tuple[ProcessGroup, ...] | None) -> str:
    return str([each.size() for each in group] if isinstance(group, list | tuple) else group and group.size())


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
    tp_ep_pp_with_egtp_remat: ProcessGroup = field(init=False)
    tp_dp_cp: ProcessGroup = field(init=False)
    dp: ProcessGroup = field(init=False)
    dp_cp: ProcessGroup = field(init=False)
    dp_cp_gtp_remat: ProcessGroup = field(init=False)
    dp_cp_ag: ProcessGroup = field(init=False)
    gtp_remat: ProcessGroup = field(init=False)
    expt_gtp_remat: ProcessGroup = field(init=False)
    expt_dp: ProcessGroup = field(init=False)
    expt_dp_gtp_remat: ProcessGroup = field(init=False)
    expt_dp_ag: ProcessGroup = field(init=False)
    intra_dp_cp: ProcessGroup = field(init=False)
    intra_expt_dp: ProcessGroup = field(init=False)
    inter_dist_opt: ProcessGroup = field(init=False)
    intra_dist_opt: ProcessGroup = field(init=False)

    def __init__(self, **kwargs):  # type: ignore[no-untyped-def]
        self._check_names(kwargs, "Unknown attribute")
        for name, group in kwargs.items():
            setattr(self, name, group)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # its groups change

    def __getattr__(self, name: str) -> Any:
        # Reached for what was not set.
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; it was not set")

    def __repr__(self):  # type: ignore[no-untyped-def]
        groups = {name: vars(self)[name] for name in self._names() if name in vars(self)}
        shown = [f"{name}({_size(group)})" for name, group in groups.items()]
        return f"{type(self).__name__}({', '.join(shown) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(  # type: ignore[no-untyped-def]
        cls,
        required_pgs: List[str] | None = None,  # noqa: UP006
        *,
        state: ModuleType | None = None,
    ):
        """Return the groups of a parallel state, by default the followed one; ``required_pgs``: the fields wanted."""
        wanted = list(cls._names()) if required_pgs is None else required_pgs
        cls._check_names(wanted, "Invalid process groups requested")
        return cls(**{name: _of_state(state or followed_state(), name) for name in wanted})

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return tuple(item.name for item in fields(cls))

    @classmethod
    def _check_names(cls, names: Iterable[str], what: str) -> None:
        unknown = [name for name in names if name not in cls._names()]
        if unknown:
            raise PlanError(f"{what}: {unknown}; the groups are {', '.join(cls._names())}; use these", received=unknown)


def resolve_gtp_remat_group(pg_collection: Optional["ProcessGroupCollection"], is_expert: bool) -> Any:
    """Return the ranks that hold the pieces of a weight: the collection's, else the parallel state's.

    ``is_expert``: of an expert's weight. A collection that carries None means that there are none.
    """
    name = "expt_gtp_remat" if is_expert else "gtp_remat"
    if pg_collection is not None and name in vars(pg_collection):
        return getattr(pg_collection, name)
    return _of_state(followed_state(), name)


class UnknownModule(PlanError, KeyError):
    """A name that no module has; a ``ValueError`` too."""


@dataclass(repr=False)
class MultiModuleProcessGroupCollection:
    """The collections of the modules that a rank is part of, by name; one may be the language model.

    ``PlanError`` (a ``ValueError``) for no module at all, and for a language model that is none of them.

    >>> groups = MultiModuleProcessGroupCollection({"encoder": None, "llm": None}, "llm")
    >>> groups, len(groups), groups.has_language_model()
    (MultiModuleProcessGroupCollection(modules=[encoder, llm], language_model_module_name='llm'), 2, True)
    """

    module_pgs: Dict[str, ProcessGroupCollection]  # noqa: UP006
    language_model_module_name: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        if not self.module_pgs:
            raise PlanError("module_pgs dict cannot be empty; name each module of this rank")
        if self.language_model_module_name is not None:
            self.get_module_collection(self.language_model_module_name, "language_model_module_name")

    def get_language_model_collection(self) -> ProcessGroupCollection:
        """Return the process groups of the language model; ``PlanError`` where this rank has none."""
        if self.language_model_module_name is None:
            raise PlanError(
                "No language model specified for this collection; ask has_language_model() first, or name it"
            )
        return self.module_pgs[self.language_model_module_name]

    def get_language_model_cp_size(self) -> int:
        """Return the context-parallel size of the language model."""
        return int(self.get_language_model_collection().cp.size())

    def has_language_model(self) -> bool:
        """Return whether this rank has a part of the language model."""
        return self.language_model_module_name is not None

    def get_module_collection(self, module_name: str, what: str = "Module") -> ProcessGroupCollection:
        """Return the process groups of one module; ``UnknownModule`` for a name that there is not."""
        if module_name not in self.module_pgs:
            raise UnknownModule(
                f"{what} {module_name!r} is not found in collections, or module_pgs keys, which are "
                f"{list(self.module_pgs)}; use one of them",
                key=module_name,
            )
        return self.module_pgs[module_name]

    def __len__(self) -> int:
        return len(self.module_pgs)

    def __getitem__(self, module_name: str) -> ProcessGroupCollection:
        return self.get_module_collection(module_name)

    def __iter__(self) -> Iterator[ProcessGroupCollection]:
        return iter(self.module_pgs.values())

    def keys(self) -> KeysView[str]:
        """Return the names of the modules."""
        return self.module_pgs.keys()

    def values(self) -> ValuesView[ProcessGroupCollection]:
        """Return their collections."""
        return self.module_pgs.values()

    def items(self) -> ItemsView[str, ProcessGroupCollection]:
        """Return name and collection of each."""
        return self.module_pgs.items()

    def __repr__(self) -> str:
        named = self.language_model_module_name
        language = f", language_model_module_name={named!r}" if named else ""
        return f"MultiModuleProcessGroupCollection(modules=[{', '.join(self.module_pgs)}]{language})"
