"""Refusals: what a framework raises while it constructs or loads a model, as an error with a fix that helps.

```
a package is missing              MissingExtra   pip install accelerate
sizes or a model it cannot take   LayoutError    its own words, or the line that it asserts; change the sizes
anything else                     LayoutError    its own words; where to look
```
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from pathlib import Path
from traceback import extract_tb

from rankmesh.errors import LayoutError, MissingExtra, RankmeshError, cut, first_line

__all__ = ["missing", "not_installed", "refusal"]

# What frameworks raise for sizes and configurations that they cannot take.
_OF_SIZES = (AssertionError, TypeError, ValueError)
# The extra of a requirement in the metadata of a package, and the name of what it requires.
_EXTRA, _NAME = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]"), re.compile(r"[A-Za-z0-9][\w.-]*")
# What an error names: a package to install, or a requirement in quotes.
_TO_INSTALL = re.compile(r"pip install (?:-\w+ )*['\"`]?([A-Za-z0-9][\w.-]*)")
_REQUIRED = re.compile(r"['\"`]([A-Za-z0-9][\w.-]*)[<>=!~]=")


def missing(side: EntryPoint) -> list[str]:
    """Return the packages that are not installed of those that the extra with the side's name lists."""
    requirements = (side.dist.requires if side.dist is not None else None) or ()
    wanted = [text for text in requirements if side.name in _EXTRA.findall(text)]
    return [name for name in (_NAME.match(text).group() for text in wanted) if not _is_installed(name)]  # type: ignore[union-attr]


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def not_installed(side: str, packages: Iterable[str]) -> MissingExtra:
    """Return the error for packages that a side needs, with one command that installs them all."""
    names = list(packages)
    what = f"the package {names[0]!r} is" if len(names) == 1 else f"the packages {', '.join(map(repr, names))} are"
    return MissingExtra(
        f"{what} not installed, and side {side} runs its own loader; pip install {' '.join(names)}",
        name=names[0],
        names=tuple(names),
        extra=side,
    )


def refusal(what: str, name: str, error: BaseException, **values: object) -> RankmeshError:
    """Return the error for what the side of this name raised; ``what`` begins the sentence: ``vllm refuses 'tp=3'``."""
    absent = next(_imports(error), None)
    if absent is not None:
        package = _package(absent)
        if package is not None:
            return not_installed(name, [package])
        return MissingExtra(
            f"{what}: {first_line(absent)}; install what it asks for, or another release of {name}",
            name=name,
            names=(),
            extra=name,
        )
    if isinstance(error, _OF_SIZES):
        return LayoutError(f"{what}: {_why(error)}; change the sizes or the model", **values)
    return LayoutError(
        f"{what}: {type(error).__name__}: {_why(error)}; this release of {name} may not have the model: "
        "RANKMESH_DEBUG=1 shows where it fails",
        **values,
    )


def _imports(error: BaseException | None) -> Iterator[ImportError]:
    """Yield the imports that failed, of an error and its causes."""
    while error is not None:
        if isinstance(error, ImportError):
            yield error
        error = error.__cause__


def _package(error: ImportError) -> str | None:
    """Return the package that a failed import lacks, as pip names it; None where the error does not tell."""
    if isinstance(error, ModuleNotFoundError) and error.name and _NAME.fullmatch(error.name):
        return error.name.partition(".")[0].replace("megatron", "megatron-core")
    found = _TO_INSTALL.search(str(error)) or _REQUIRED.search(str(error))
    return None if found is None else found.group(1)


def _why(error: BaseException) -> str:
    """Return the first two lines of an error, as pydantic has the point in the second; else where it was raised."""
    words = " ".join(line.strip() for line in str(error).splitlines()[:2]).strip()
    if words:
        return words
    frames = extract_tb(error.__traceback__)
    if not frames:
        return first_line(error)
    return cut(f"{first_line(error)} at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}")
