"""What is public: each name of the packages below, its parameters and methods. `python -m tests.public` writes it.

The list is docs/reference/public.md. A change of it is a decision, and CHANGELOG.md speaks of it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "public.md"
PACKAGES = ("rankmesh", "rankmesh.core", "rankmesh.core.recipes", "rankmesh.readers", "rankmesh.viz")
PACKAGES += ("rankmesh.errors", "rankmesh.sim", "rankmesh.testing", "rankmesh.testing.strategies")

HEAD = """# What is public

From 1.0 on these names stay what they are between releases that share their first number, and each change of them is
in the changelog. What is not listed here, and not in the reference of a [dialect](dialects.md), may change at any time.
"""


def page() -> str:
    """The text of the page."""
    return HEAD + "".join(map(_section, PACKAGES))


def _section(package: str) -> str:
    listed = "\n".join(names(package))
    return f"\n## {package}\n\n<!-- not run: names, not code -->\n```text\n{listed}\n```\n"


def names(package: str) -> Iterator[str]:
    """The lines of one package: each public name, and beneath it what belongs to it."""
    module = importlib.import_module(package)
    for name in sorted(module.__all__):
        value = getattr(module, name)
        home = getattr(value, "__module__", package)
        if package != "rankmesh" and name in importlib.import_module("rankmesh").__all__:
            yield f"{name}: as rankmesh.{name}"
        elif inspect.isclass(value):
            yield from _class(name, value, home)
        elif callable(value):
            yield f"{name}{_parameters(value)}"
        else:
            yield name


def _class(name: str, kind: type, home: str) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    made = "" if issubclass(kind, BaseException) else _parameters(kind)
    yield f"{name}{made}" + (f": {bases}" if bases else "")
    members = {**dict.fromkeys(_fields(kind)), **vars(kind)}
    for member, value in sorted(members.items()):
        if member.startswith("_") or issubclass(kind, BaseException):
            continue
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if callable(plain):
            yield f"  .{member}{_parameters(plain)}"
        elif not inspect.ismemberdescriptor(plain):
            yield f"  .{member}"


def _fields(kind: type) -> list[str]:
    """The fields of a dataclass whose constructor takes something else; of any other they are its parameters."""
    params = getattr(kind, "__dataclass_params__", None)
    return [field.name for field in fields(kind)] if params is not None and not params.init else []


def _parameters(value: object) -> str:
    """Names and kinds of the parameters, with ``=`` where there is a default: no values, no types."""
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    message, starred = [], False
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            message.append("*")
        starred |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        sign = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        message.append(f"{sign}{parameter.name}" + ("" if parameter.default is parameter.empty else "="))
    return f"({', '.join(message)})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
