"""Interpolations of OmegaConf: values of a YAML that are written in terms of others.

```
${a.b}   ${oc.select:a.b,1}             the value of another key, or 1
${oc.env:TP,4}   ${TP:4}   ${TP}        a variable of the environment (--set TP=8), or 4; the latter are Primus'
${multiply:${a.b},2}   ${mul:2,${c}}    NeMo's and others' products
```

Source: ``omegaconf.grammar`` and ``omegaconf.resolvers`` of OmegaConf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from rankmesh.readers.reading import Entry, Missing

__all__ = ["Interpolations"]

# How many are followed for one value, and how long it may grow meanwhile.
_MOST, _LENGTH = 32, 1000
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_PRODUCTS = ("mul", "multiply")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass
class Interpolations:
    """The values of a document's keys; ``used`` are the variables of the environment that it names."""

    entries: list[Entry]
    variables: Mapping[str, str]
    used: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._by_path = {entry.path: entry for entry in reversed(self.entries)}

    def resolved(self) -> list[Entry]:
        """Return the entries with their values; one that cannot be followed stays as it is written."""
        return [self._resolved(entry) for entry in self.entries]

    def _resolved(self, entry: Entry) -> Entry:
        text, lines, default = entry.value, dict.fromkeys(entry.also), False
        for _ in range(_MOST):
            inner = _INNERMOST.search(text) if isinstance(text, str) and len(text) <= _LENGTH else None
            if inner is None:
                break
            found = self._value(inner[1])
            if found is None:
                return entry
            value = found.value
            if isinstance(value, Missing):
                return replace(entry, value=value)
            default = default or found.default
            lines |= dict.fromkeys(line for line in (found.line, *found.also) if line not in (0, entry.line))
            whole = inner[0] == text
            text = (
                value if whole else f"{text[: inner.start()]}{'null' if value is None else value}{text[inner.end() :]}"
            )
        if isinstance(text, str) and _INNERMOST.search(text):
            return entry  # one that leads to itself, or is too long
        return replace(entry, value=text, also=tuple(lines), default=entry.default or default)

    def _value(self, body: str) -> Entry | None:
        """Return the value of one interpolation as an entry; None where it is of a kind that is not known."""
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
            return named or (Entry((), _typed(given[1]), 0) if len(given) == 2 else None)
        if name == "oc.env" and len(given) <= 2:
            return self._variable(*given)
        if name in _PRODUCTS and all(word.isdecimal() and len(word) < 10 for word in given):
            return Entry((), prod(map(int, given)), 0)
        return None

    def _variable(self, name: str, default: str | None = None, *, prefix: str = "oc.env:") -> Entry:
        self.used.add(name)
        if name in self.variables:
            return Entry((), _typed(self.variables[name]), 0)
        if default is None:
            return Entry((), Missing(f"${{{prefix}{name}}}", "the environment of the job gives it"), 0)
        return Entry((), _typed(default), 0, default=True)


def _typed(word: str) -> object:
    word = word.strip("'\"")
    return None if word == "null" else word
