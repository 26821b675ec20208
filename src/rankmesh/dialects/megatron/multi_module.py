"""Several modules on one rank: the process groups of each, as pipelines of several modules take them."""

# No postponed annotations here: the fields' types are plain.

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from typing import Any, Dict, Optional  # noqa: UP035

from rankmesh.errors import PlanError

__all__ = ["MultiModuleProcessGroupCollection"]


class UnknownModule(PlanError, KeyError):
    """A name that no module has."""


@dataclass(repr=False)
class MultiModuleProcessGroupCollection:
    """The collections of the modules that a rank is part of, by name; one may be the language model.

    ``PlanError`` (a ``ValueError``) for no module at all, and for a language model that is none of them.

    >>> groups = MultiModuleProcessGroupCollection({"encoder": None, "llm": None}, "llm")
    >>> groups, len(groups), groups.has_language_model()
    (MultiModuleProcessGroupCollection(modules=[encoder, llm], language_model_module_name='llm'), 2, True)
    """

    module_pgs: Dict[str, Any]  # noqa: UP006
    language_model_module_name: Optional[str] = None  # noqa: UP045

    def __post_init__(self) -> None:
        if not self.module_pgs:
            raise PlanError("received no modules: module_pgs dict cannot be empty; name each module of this rank")
        if self.language_model_module_name is not None:
            self.get_module_collection(self.language_model_module_name, "language_model_module_name")

    def get_language_model_collection(self) -> Any:
        """The process groups of the language model; ``PlanError`` where this rank has none."""
        if self.language_model_module_name is None:
            raise PlanError(
                "received a request for the language model's groups; No language model specified for this collection; "
                "ask has_language_model() first"
            )
        return self.module_pgs[self.language_model_module_name]

    def get_language_model_cp_size(self) -> int:
        """The context-parallel size of the language model."""
        return int(self.get_language_model_collection().cp.size())

    def has_language_model(self) -> bool:
        """Whether this rank has a part of the language model."""
        return self.language_model_module_name is not None

    def get_module_collection(self, module_name: str, what: str = "Module") -> Any:
        """The process groups of one module; ``PlanError`` for a name that there is not."""
        if module_name not in self.module_pgs:
            raise PlanError(
                f"received {what} {module_name!r}, which is not found in collections, or module_pgs keys; they are "
                f"{list(self.module_pgs)}; use one of them",
                received=module_name,
            )
        return self.module_pgs[module_name]

    def __len__(self) -> int:
        return len(self.module_pgs)

    def __getitem__(self, module_name: str) -> Any:
        if module_name not in self.module_pgs:
            raise UnknownModule(f"received module {module_name!r}; they are {list(self.module_pgs)}", key=module_name)
        return self.module_pgs[module_name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module_pgs.values())

    def keys(self) -> KeysView[str]:
        """The names of the modules."""
        return self.module_pgs.keys()

    def values(self) -> ValuesView[Any]:
        """Their collections."""
        return self.module_pgs.values()

    def items(self) -> ItemsView[str, Any]:
        """Name and collection of each."""
        return self.module_pgs.items()

    def __repr__(self) -> str:
        named = self.language_model_module_name
        language = f", language_model_module_name={named!r}" if named else ""
        return f"MultiModuleProcessGroupCollection(modules=[{', '.join(self.module_pgs)}]{language})"
