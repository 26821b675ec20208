"""OmegaConf and Hydra: the parents of a YAML, and values that are written in terms of others.

```
defaults: ../grpo.yaml                     NeMo-RL: a path, relative to the file
defaults: [base, _self_, {model: llama}]   Hydra: base.yaml, this file, model/llama.yaml below the key model

${a.b}   ${oc.select:a.b,1}             the value of another key, or 1
${oc.env:TP,4}   ${TP:4}   ${TP}        a variable of the environment (--set TP=8), or 4; the latter are Primus'
${multiply:${a.b},2}   ${mul:2,${c}}    NeMo's and others' products
```

Source: ``omegaconf.grammar`` and ``omegaconf.resolvers`` of OmegaConf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath

from rankmesh.core.documents import Budget, Unreadable, read_text
from rankmesh.errors import quoted
from rankmesh.readers.documents import read_document
from rankmesh.readers.options import Option
from rankmesh.readers.tokens import Missing

__all__ = ["Interpolations", "with_parents"]

_FILES = 64
_KEY, _SELF = "defaults", "_self_"
_ITSELF = (_SELF, "", False)
# How many are followed for one value, and how long it may grow meanwhile.
_MOST, _LENGTH = 32, 1000
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_PRODUCTS = ("mul", "multiply")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def with_parents(found: list[Option], path: str) -> list[Option]:
    """Merge the options of a file over the options of its parents, which have the line that names the parent.

    Raises ``Unreadable`` for a parent that cannot be read, which is named, and for more than 64 files.
    """
    return _merged(found, Path(path), Budget(_FILES), ())


def _merged(found: list[Option], path: Path, budget: Budget, below: tuple[Path, ...]) -> list[Option]:
    listed = next((option for option in found if option.path == (_KEY,)), None)
    if listed is None or not isinstance(listed.value, str | list):
        return found
    values: dict[tuple[str, ...], list[Option]] = {}
    settings = [option for option in found if option is not listed]
    layers = list(_names(listed))
    for name, key, optional in layers if _ITSELF in layers else [*layers, _ITSELF]:
        if optional and not (path.parent / _file(name)).is_file():
            continue  # Hydra leaves it out
        layer = settings if name == _SELF else _parent(name, key, path, listed, budget, below)
        # A value over a mapping, or a mapping over a value, replaces all of it.
        for at in {option.path for option in layer}:
            for other in [old for old in values if old[: len(at)] == at or at[: len(old)] == old]:
                del values[other]
        for option in layer:
            values.setdefault(option.path, []).append(option)
    return [option for same in values.values() for option in same]


def _file(name: str) -> str:
    return name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"


def _names(listed: Option) -> Iterator[tuple[str, str, bool]]:
    """Yield each file that is named, the key that its values are below, and whether it is optional.

    Hydra writes ``group@package: name``, with ``optional`` before the group or the name.
    """
    for item in listed.value if isinstance(listed.value, list) else [listed.value]:
        group, names = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else ("", item)
        for name in names if isinstance(names, list) else [names]:
            if name is None and group:
                continue  # a group of which none is chosen
            if not isinstance(name, str) or not isinstance(group, str):
                raise Unreadable(f"names a parent that is not known, {quoted(item)} (line {listed.line})")
            optional = group.startswith("optional ") or (not group and name.startswith("optional "))
            folder, _, package = group.removeprefix("override ").removeprefix("optional ").strip("/").partition("@")
            if not folder:
                name, _, package = name.removeprefix("optional ").partition("@")
            key = "" if package == "_global_" else package.removeprefix("_here_") or folder.replace("/", ".")
            yield (f"{folder}/{name}" if folder else name), key, optional


def _parent(name: str, key: str, path: Path, listed: Option, budget: Budget, below: tuple[Path, ...]) -> list[Option]:
    budget.spend()
    file = _file(name)
    where = path.parent / file
    if PurePosixPath(file).is_absolute() or where.resolve() in (*below, path.resolve()):
        raise Unreadable(
            f"names the parent {quoted(name)}, an absolute path or a file that names it (line {listed.line})"
        )
    try:
        text = read_text(where)
    except Unreadable as error:
        raise Unreadable(f"needs its parent {quoted(file)} (line {listed.line}), which {error}") from error
    found = _merged(read_document(text, str(where)), where, budget, (*below, path.resolve()))
    prefix = tuple(key.split(".")) if key else ()
    return [replace(option, path=(*prefix, *option.path), line=listed.line, also=()) for option in found]


@dataclass
class Interpolations:
    """The values of a document's keys; ``used`` are the variables of the environment that it names."""

    options: list[Option]
    variables: Mapping[str, str]
    used: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._by_path = {option.path: option for option in reversed(self.options)}

    def resolved(self) -> list[Option]:
        """Return the options with their values; one that cannot be followed stays as it is written."""
        return [self._resolved(option) for option in self.options]

    def _resolved(self, option: Option) -> Option:
        text, lines, default = option.value, dict.fromkeys(option.also), False
        for _ in range(_MOST):
            inner = _INNERMOST.search(text) if isinstance(text, str) and len(text) <= _LENGTH else None
            if inner is None:
                break
            found = self._value(inner[1])
            if found is None:
                return option
            value = found.value
            if isinstance(value, Missing):
                return replace(option, value=value)
            default = default or found.default
            lines |= dict.fromkeys(line for line in (found.line, *found.also) if line not in (0, option.line))
            whole = inner[0] == text
            text = (
                value if whole else f"{text[: inner.start()]}{'null' if value is None else value}{text[inner.end() :]}"
            )
        if isinstance(text, str) and _INNERMOST.search(text):
            return option  # one that leads to itself, or is too long
        return replace(option, value=text, also=tuple(lines), default=option.default or default)

    def _value(self, body: str) -> Option | None:
        """Return the value of one interpolation as an option; None for an unknown kind of interpolation."""
        name, colon, rest = body.partition(":")
        if not colon and tuple(body.split(".")) in self._by_path:
            return self._by_path[tuple(body.split("."))]
        if _VARIABLE.fullmatch(name):
            return self._variable(name, rest.removeprefix("-") if colon else None, prefix="")
        if not colon:
            return None
        given = [word.strip() for word in rest.split(",")]
        if name == "oc.select" and len(given) <= 2:
            named = self._by_path.get(tuple(given[0].split(".")))
            return named or (Option((), _typed(given[1]), 0) if len(given) == 2 else None)
        if name == "oc.env" and len(given) <= 2:
            return self._variable(*given)
        if name in _PRODUCTS and all(word.isdecimal() and len(word) < 10 for word in given):
            return Option((), prod(map(int, given)), 0)
        return None

    def _variable(self, name: str, default: str | None = None, *, prefix: str = "oc.env:") -> Option:
        self.used.add(name)
        if name in self.variables:
            return Option((), _typed(self.variables[name]), 0)
        if default is None:
            return Option((), Missing(f"${{{prefix}{name}}}", "the environment of the job gives it"), 0)
        return Option((), _typed(default), 0, default=True)


def _typed(word: str) -> object:
    word = word.strip("'\"")
    return None if word == "null" else word
