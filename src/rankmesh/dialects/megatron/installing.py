"""Install: Megatron's own code on our modules, without changing a line of it.

```
sys.modules["megatron.core.parallel_state"]        ours
megatron.core.parallel_state, megatron.core.mpu    ours
tensor_parallel.layers.get_tensor_model_parallel_group, imported before    ours
```

Megatron is imported first if it is not yet, and its version looked at: our modules then have the names, parameters and
answers of that release (``releases``). Then every module-level name of the process that refers to one of the two
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

from rankmesh.dialects.megatron import hyper_comm_grid, parallel_state, releases
from rankmesh.errors import ConnectError

__all__ = ["install", "uninstall"]

_PACKAGE = "megatron.core"
# By identity, because values need not be hashable: what is replaced, with what.
_Replacement = tuple[object, object]
_Replacements = dict[int, _Replacement]


class _Installation:
    """The replacements in Megatron's modules, in order, each with the original."""

    def __init__(self, state: ModuleType, theirs: dict[str, ModuleType], ours: dict[str, ModuleType]) -> None:
        self._state = state
        self._undo: list[Callable[[], None]] = []
        self._replacements = dict(_replacements(theirs, ours))
        for name, module in ours.items():
            self._put(sys.modules, f"{_PACKAGE}.{name}", module)
        for module in list(sys.modules.values()):
            if not any(module is other for other in (*theirs.values(), *ours.values())):
                for name, new in _replaceable(module, self._replacements):
                    self._put(vars(module), name, new)

    def _put(self, names: dict[str, Any], name: str, value: object) -> None:
        old = names[name]

        def back() -> None:
            if names.get(name) is value:  # someone else's later change stays
                names[name] = old

        names[name] = value
        self._undo.append(back)

    def end(self) -> None:
        """Restore the names that were there, and Megatron's own names in its modules imported since."""
        while self._undo:
            self._undo.pop()()
        releases.follow(self._state, None)
        backwards = {id(new): (new, old) for old, new in self._replacements.values()}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == _PACKAGE.partition(".")[0]:
                for attribute, new in _replaceable(module, backwards):
                    vars(module)[attribute] = new


# What uninstall() ends: a process has one Megatron.
_installed: _Installation | None = None


def install(state: ModuleType | None = None) -> None:
    """Put the drop-ins in place of Megatron's modules; ``state`` in place of the default parallel state.

    Megatron's process group collections are then made from ``state``, too. Under a release that is not among
    ``releases.KNOWN`` a ``UserWarning`` says so, and names what ours lack.

    Does nothing when called again. Raises ``ConnectError`` where megatron-core is not installed, or its own parallel
    state is initialised, whose groups would be lost.
    """
    global _installed
    if _installed is not None:
        return
    chosen = state or parallel_state
    ours: dict[str, ModuleType] = {
        "parallel_state": chosen,
        "hyper_comm_grid": hyper_comm_grid,
    }
    theirs = {name: _peer(f"{_PACKAGE}.{name}") for name in ours}
    if theirs["parallel_state"].is_initialized():
        raise ConnectError(
            "Megatron's own parallel state is initialised, and install() would put its groups out of reach; call its "
            "destroy_model_parallel() first"
        )
    releases.follow(chosen, _release(theirs))
    _installed = _Installation(chosen, theirs, ours)


def uninstall() -> None:
    """Put everything back as ``install`` found it; our groups live on until they are destroyed."""
    global _installed
    if _installed is not None:
        _installed.end()
        _installed = None


def _release(theirs: dict[str, ModuleType]) -> releases.Release:
    """Return the release that is installed; a warning where it is none that is compared with in tests."""
    version = str(_peer(f"{_PACKAGE}.package_info").__version__)
    release = releases.parse(version)
    if release not in releases.KNOWN:
        known = [".".join(map(str, one)) for one in (releases.KNOWN[0], releases.KNOWN[-1])]
        lacking = [
            name
            for name, value in vars(theirs["parallel_state"]).items()
            if getattr(value, "__module__", None) == f"{_PACKAGE}.parallel_state" and not hasattr(parallel_state, name)
        ]
        warnings.warn(
            f"megatron-core {version} is not among the releases that the drop-ins are tested with, "
            f"{' to '.join(known)}; they behave as the nearest, and lack: {', '.join(lacking) or 'nothing'}",
            stacklevel=3,
        )
    return release


def _peer(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron suggests what else could be installed
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ConnectError(
                f"{name} cannot be imported ({error}), and install() replaces modules of megatron-core; pip install "
                "megatron-core, or import rankmesh.dialects.megatron in its place"
            ) from error


def _replacements(theirs: dict[str, ModuleType], ours: dict[str, ModuleType]) -> Iterator[tuple[int, _Replacement]]:
    for name, module in theirs.items():
        yield id(module), (module, ours[name])
        for attribute, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and hasattr(ours[name], attribute):
                yield id(value), (value, getattr(ours[name], attribute))


def _replaceable(module: ModuleType, replacements: _Replacements) -> Iterator[tuple[str, object]]:
    for name, value in list(getattr(module, "__dict__", {}).items()):
        old, new = replacements.get(id(value), (None, None))
        if new is not None and old is value:
            yield name, new
