"""What is public: names with their parameters and methods, commands with their options, JSON keys, exit statuses.

`python -m tests.public` writes docs/reference/public.md. A change of it is a decision, and CHANGELOG.md has its line.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from rankmesh.cli.app import PANELS, app
from rankmesh.cli.shell import EXIT_CODES

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "public.md"
PACKAGES = ("rankmesh", "rankmesh.core", "rankmesh.core.recipes", "rankmesh.readers", "rankmesh.viz")
PACKAGES += ("rankmesh.errors", "rankmesh.sim", "rankmesh.testing", "rankmesh.testing.strategies")

HEAD = """# What is public

Every name, parameter, option, JSON key and exit status that [stays what it is](stability.md) from 1.0 on. A test
compares this page with the code.
"""
# Commands whose output needs no job and no torch, and what they print as JSON.
PRINTED = {
    "show": ("show", "tp=2,dp=2"),
    "groups": ("groups", "tp=2,dp=2", "tp"),
    "explain": ("explain", "tp=2,dp=2", "3"),
    "diff": ("diff", "tp=2,dp=2", "dp=2,tp=2"),
    "where": ("where",),
    "cluster": ("cluster", "host=2,leaf=2"),
    "place": ("place", "tp=2,dp=2", "--cluster", "host=2,leaf=2"),
    "search": ("search", "--world=4", "--cluster=host=2,leaf=2", "--model=llama3-8b", "--batch=8", "--sequence=128"),
    "transfer": ("transfer", "--model", "llama3-8b", "megatron:tp=2", "vllm:tp=2"),
    "presets": ("presets",),
    "schema": ("schema",),
}


def page() -> str:
    """The text of the page."""
    sections = {package: names(package) for package in PACKAGES}
    sections |= {"Commands": commands(), "JSON": keys(), "Exit statuses": EXIT_CODES.splitlines()}
    return HEAD + "".join(_section(title, lines) for title, lines in sections.items())


def _section(title: str, lines: Iterable[str]) -> str:
    listed = "\n".join(lines)
    return f"\n## {title}\n\n<!-- not run: names, not code -->\n```text\n{listed}\n```\n"


def commands() -> Iterator[str]:
    """The lines of the command line: each command with its arguments and options."""
    root = get_command(app)
    for name in sorted(PANELS):
        yield from _command(name, root.get_command(None, name))  # type: ignore[attr-defined, arg-type]


def _command(name: str, command: Any) -> Iterator[str]:
    options = [param for param in command.params if param.param_type_name == "option"]
    arguments = [param.metavar or str(param.name).upper() for param in command.params if param not in options]
    yield " ".join([name, *arguments])
    yield from sorted("  " + " ".join(sorted([*option.opts, *option.secondary_opts])) for option in options)
    for other in getattr(command, "commands", {}).values():
        yield from _command(f"{name} {other.name}", other)


def keys() -> Iterator[str]:
    """The keys of what commands print with ``--json``, the keys of rows in brackets."""
    for name, words in PRINTED.items():
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code == (name == "diff"), done.output
        yield f"{name}  {_shape(json.loads(done.stdout))}"


def _shape(data: object, depth: int = 2) -> str:
    if isinstance(data, list):
        return f"[{_shape(data[0], depth)}]" if data and isinstance(data[0], dict) else "[]"
    if not isinstance(data, dict) or not depth:
        return ""
    rows = {key: _shape(value, depth - 1) for key, value in sorted(data.items())}
    return ", ".join(
        f"{key} {shape}" if shape.startswith("[") and shape != "[]" else key for key, shape in rows.items()
    )


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
