"""Stand-ins for packages that a framework imports for its kernels, where they are not installed.

To construct and load a model runs no kernel, so what defines or imports one gets a module of any name:

>>> with stand_ins("a_package_of_kernels"):
...     from a_package_of_kernels.language import jit
...     @jit
...     def kernel(): ...
>>> kernel.__name__
'kernel'
>>> import a_package_of_kernels
Traceback (most recent call last):
ModuleNotFoundError: No module named 'a_package_of_kernels'
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["stand_ins"]

# What has been made, by name: modules that imported some of it keep the same ones.
_MADE: dict[str, ModuleType] = {}


@contextmanager
def stand_ins(*packages: str, hidden: Sequence[str] = ()) -> Iterator[None]:
    """Let ``import`` find each of these packages: the installed one, or else a stand-in, until the end.

    ``hidden`` packages are stand-ins even where they are installed.
    """
    finder = _Finder({*hidden, *(name for name in packages if not _installed(name))})
    apart = {name: module for name, module in sys.modules.items() if finder.covers(name)}
    for name in apart:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in _MADE.items() if finder.covers(name)})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.covers(name)]:
            del sys.modules[name]
        sys.modules.update(apart)


def _installed(package: str) -> bool:
    return package in sys.modules or find_spec(package) is not None


class _Anything(ModuleType):
    """A module, class, decorator or value: whatever is asked of it while kernels are defined."""

    __path__: list[str] = []  # noqa: RUF012  - an attribute of a module
    __version__ = "0"

    def __call__(self, *given: Any, **_options: Any) -> Any:
        """What it decorates; itself, where it has only options."""
        return given[0] if len(given) == 1 and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[0].isupper() else _Anything(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder:
    """Finds any module of some packages; a loader of them too."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def covers(self, name: str) -> bool:
        return name.partition(".")[0] in self._packages

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if self.covers(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MADE.setdefault(spec.name, _Anything(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its attributes are made when they are asked for."""
