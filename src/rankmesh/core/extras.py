"""Extras: the packages that pip installs on request, and the error where one is missing.

```
pip install rankmesh                 plans and the rankmesh command: numpy, typer, rich, PyYAML
pip install 'rankmesh[configs]'      launch scripts, JSON and TOML training configs as SPECs: tree-sitter
pip install 'rankmesh[torch]'        live groups, the simulator, dialects, checks
pip install 'rankmesh[files]'        checkpoints of safetensors, read under any layout
pip install 'rankmesh[testing]'      the pytest plugin and the strategies
```

>>> with extra("configs"):
...     import a_package_that_nobody_has
Traceback (most recent call last):
rankmesh.errors.MissingExtra: the package 'a_package_that_nobody_has' is not installed; pip install 'rankmesh[configs]'
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rankmesh.errors import MissingExtra

__all__ = ["extra"]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around the imports of an extra's packages: one that is not installed is a ``MissingExtra``."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "rankmesh") or isinstance(error, MissingExtra):
            raise
        raise MissingExtra(
            f"the package {package!r} is not installed; pip install 'rankmesh[{name}]'",
            name=package,
            extra=name,
        ) from error
