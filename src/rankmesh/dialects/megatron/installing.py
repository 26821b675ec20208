"""Install: Megatron's own code on our modules, without changing a line of it.

```
sys.modules["megatron.core.parallel_state"]        ours
megatron.core.parallel_state, megatron.core.mpu    ours
tensor_parallel.layers.get_tensor_model_parallel_group, imported before    ours
```

Megatron is imported first if it is not yet, and its version looked at: our modules then have the names, parameters and
answers of that release (``releases``). Then every module-level name of the process that refers to one of the three
modules, or to a function or class of theirs, refers to ours of the same name; ``uninstall`` puts each one back, also in
modules of Megatron that were imported meanwhile. What is out of reach: references that a program keeps in objects,
default arguments or closures, and what its own modules imported from Megatron meanwhile. Install early.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from rankmesh.dialects.megatron import hyper_comm_grid, parallel_state, prepared, process_groups_config, releases
from rankmesh.dialects.megatron.state import ParallelState
from rankmesh.errors import ConnectError

__all__ = ["install", "uninstall"]

_PACKAGE = "megatron.core"
_Undo = Callable[[], None]
# By identity, because values need not be hashable: what is replaced, with what.
_Replacements = dict[int, tuple[Any, Any]]
_undo: list[_Undo] = []


def install(state: ParallelState | None = None) -> None:
    """Put the drop-ins in place of Megatron's modules; ``state`` in place of the default parallel state.

    Process group collections are then made from ``state``, too. Under a release that is not among ``releases.KNOWN``
    a ``UserWarning`` says so, and which of its names ours have not.

    Calling it again is nothing. Raises ``ConnectError`` where megatron-core is not installed, or its own parallel state
    is initialised, whose groups would be lost.
    """
    if _undo:
        return
    ours: dict[str, Any] = {
        "parallel_state": parallel_state if state is None else state,
        "hyper_comm_grid": hyper_comm_grid,
        "process_groups_config": process_groups_config,
    }
    theirs = {name: _peer(f"{_PACKAGE}.{name}") for name in ours}
    if theirs["parallel_state"].is_initialized():
        raise ConnectError(
            "received install() while Megatron's own parallel state is initialised; its groups would be out of reach; "
            "call its destroy_model_parallel() first"
        )
    release = _release(theirs)
    _follow(ours, release)
    replacements = dict(_replacements(theirs, ours))
    for name, module in ours.items():
        _put(sys.modules, f"{_PACKAGE}.{name}", module)
    for module in list(sys.modules.values()):
        if not _is_one_of(module, theirs, ours):
            _replace(module, replacements)
    for user in (prepared, process_groups_config):  # a collection is that of the installed state
        _put(vars(user), "parallel_state", ours["parallel_state"])
    _undo.insert(0, lambda: _end(replacements, ours))


def uninstall() -> None:
    """Put everything back as ``install`` found it; our groups live on until they are destroyed."""
    while _undo:
        _undo.pop()()


def _end(replacements: _Replacements, ours: dict[str, Any]) -> None:
    _give_back(replacements)
    _follow(ours, None)


def _follow(ours: dict[str, Any], release: releases.Release | None) -> None:
    """Our modules as a release has them; None: as they are by themselves."""
    releases.follow(ours["parallel_state"], release)
    releases.follow_collections(process_groups_config, release)
    hyper_comm_grid.RELEASE = release


def _release(theirs: dict[str, Any]) -> releases.Release:
    """The release that is installed; a warning where it is none that is compared with in tests."""
    version = str(_peer(f"{_PACKAGE}.package_info").__version__)
    release = releases.parse(version)
    if release not in releases.KNOWN:
        known = [".".join(map(str, one)) for one in (releases.KNOWN[0], releases.KNOWN[-1])]
        ours = {"parallel_state": parallel_state, "process_groups_config": process_groups_config}
        lacking = [
            name
            for module, own in ours.items()
            for name, value in vars(theirs[module]).items()
            if getattr(value, "__module__", None) == theirs[module].__name__ and not hasattr(own, name)
        ]
        warnings.warn(
            f"received install() under megatron-core {version}; the drop-ins are tested with {' to '.join(known)}, and "
            f"behave as the nearest; what they have not: {', '.join(lacking) or 'nothing'}",
            stacklevel=3,
        )
    return release


def _give_back(replacements: _Replacements) -> None:
    """Megatron's own names in those of its modules that were imported while ours were in place."""
    backwards = {id(new): (new, old) for old, new in replacements.values()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE.partition(".")[0]:
            for attribute, new in _replaceable(module, backwards):
                vars(module)[attribute] = new


def _peer(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron tells what else could be installed
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ConnectError(
                f"received install() where {name} cannot be imported ({error}); it replaces modules of megatron-core; "
                "pip install megatron-core, or import rankmesh.dialects.megatron in its place"
            ) from error


def _replacements(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[tuple[int, tuple[Any, Any]]]:
    for name, module in theirs.items():
        yield id(module), (module, ours[name])
        for attribute, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and hasattr(ours[name], attribute):
                yield id(value), (value, getattr(ours[name], attribute))


def _is_one_of(module: ModuleType, theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    return any(module is other for other in (*theirs.values(), *ours.values()))


def _replace(module: ModuleType, replacements: _Replacements) -> None:
    for name, new in _replaceable(module, replacements):
        _put(vars(module), name, new)


def _replaceable(module: ModuleType, replacements: _Replacements) -> Iterator[tuple[str, Any]]:
    for name, value in list(getattr(module, "__dict__", {}).items()):
        old, new = replacements.get(id(value), (None, None))
        if new is not None and old is value:
            yield name, new


def _put(names: dict[str, Any], name: str, value: Any) -> None:
    old = names[name]

    def back() -> None:
        if names.get(name) is value:  # someone else's later change stays
            names[name] = old

    names[name] = value
    _undo.append(back)
