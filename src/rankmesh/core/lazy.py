"""Names of a package that are loaded when they are first used, so that whoever does not use them does not wait.

>>> getattribute, names = loader("rankmesh.core", {"Sharding": "sharding"})
>>> getattribute("Sharding").__name__, "Sharding" in names()
('Sharding', True)
>>> getattribute("Shading")
Traceback (most recent call last):
AttributeError: module 'rankmesh.core' has no attribute 'Shading'
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["loader", "read_file", "watch"]

# Returns the ``core.source.Source`` of a file, for a world size. What knows formats lies above: ``rankmesh`` sets it.
read_file: Callable[[str | os.PathLike[str], int | None], Any]
# Starts what ``rm.init(record=)`` asks for, before the world is made; the result is called after it, and returns what
# ends the watches. It is `rankmesh.debug.watch.switch.begin`.
watch: Callable[[bool | str | os.PathLike[str]], Callable[[], list[Callable[[], None]]]]


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
