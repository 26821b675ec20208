"""Extras: what rankmesh needs beside numpy, and for what.

```
pip install rankmesh                 plan: meshes, plans, recipes, presets, JSON, pictures, pages
pip install 'rankmesh[cli]'          the rankmesh command
pip install 'rankmesh[configs]'      training configs and scripts as SPECs, YAML files
pip install 'rankmesh[torch]'        live groups, the simulator, dialects, checks
pip install 'rankmesh[files]'        checkpoints of safetensors, read under any layout
pip install 'rankmesh[testing]'      the pytest plugin and the strategies
```

>>> with extra("cli"):
...     import a_package_that_nobody_has
Traceback (most recent call last):
rankmesh.errors.MissingExtra: received no package 'a_package_that_nobody_has'; it comes with an extra; \
pip install 'rankmesh[cli]'
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
            f"received no package {package!r}; it comes with an extra; pip install 'rankmesh[{name}]'",
            name=package,
            extra=name,
        ) from error
