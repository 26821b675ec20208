"""Names of a package that are loaded when they are first used, so that whoever does not use them does not wait.

>>> getattribute, names = loader("rankmesh.core", {"Sharding": "sharding"})
>>> getattribute("Sharding").__name__, "Sharding" in names()
('Sharding', True)
>>> getattribute("Shading")
Traceback (most recent call last):
AttributeError: module 'rankmesh.core' has no attribute 'Shading'
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType

__all__ = ["PROVIDED", "loader", "provided"]

# Modules of higher packages, by the names under which lower packages use them. ``rankmesh`` itself fills it.
PROVIDED: dict[str, str] = {}


def loader(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package whose ``names`` are in these modules of it.

    No name may also name a module: once the module is loaded, Python finds the module under it.
    """

    def load(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return load, lambda: sorted({*vars(sys.modules[package]), *names})


def provided(name: str) -> ModuleType:
    """Load the module of a higher package that ``PROVIDED`` names."""
    return import_module(PROVIDED[name])
