"""Stand-ins for packages that a framework imports for its kernels, where they are not installed.

To construct and load a model runs no kernel, so what defines or imports one gets a module of any name:

>>> kernels = StandIns("a_package_of_kernels")
>>> with kernels:
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
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["StandIns", "settle_triton"]


def settle_triton() -> None:
    """Let torch find out whether triton is installed, before a stand-in of that name answers for it."""
    import torch._inductor.runtime.triton_compat
    import torch.utils.flop_counter  # noqa: F401


class StandIns:
    """Inside ``with``, let ``import`` find each of these packages: the installed one, or else a stand-in.

    ``hidden`` packages are stand-ins even where they are installed. Each ``with`` finds the modules that earlier ones
    have made, since what has imported some of them keeps them.
    """

    def __init__(self, *packages: str, hidden: Sequence[str] = ()) -> None:
        self._packages = {*hidden, *(name for name in packages if not _installed(name))}
        self._made: dict[str, ModuleType] = {}
        self._apart: dict[str, ModuleType] = {}

    def __enter__(self) -> None:
        self._apart = self._taken()
        sys.modules.update(self._made)
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        self._taken()
        sys.modules.update(self._apart)

    def _taken(self) -> dict[str, ModuleType]:
        """Take all modules of these packages from ``sys.modules``."""
        return {name: sys.modules.pop(name) for name in list(sys.modules) if self._covers(name)}

    def _covers(self, name: str) -> bool:
        return name.partition(".")[0] in self._packages

    # What an import asks of a finder, and of a loader.

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """Return a specification for any module of these packages."""
        return ModuleSpec(name, self, is_package=True) if self._covers(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in of this name."""
        return self._made.setdefault(spec.name, _Anything(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: attributes of a stand-in are made when they are first read."""


def _installed(package: str) -> bool:
    return package in sys.modules or find_spec(package) is not None


class _Anything(ModuleType):
    """A module, class, decorator or value, with any attribute that the definition of a kernel needs."""

    __path__: list[str] = []  # noqa: RUF012  - an attribute of a module
    __version__ = "0"

    def __call__(self, *given: Any, **_options: Any) -> Any:
        """Return the decorated object, or itself if it got only options."""
        return given[0] if len(given) == 1 and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[0].isupper() else _Anything(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made
