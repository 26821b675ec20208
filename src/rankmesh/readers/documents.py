r"""JSON, TOML and YAML as options: every value with the path of its keys and its line.

>>> [str(option) for option in read_document("parallelism:\n  tp: 4\n", "run.yaml")]
['parallelism.tp = 4']
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankmesh.core.documents import (
    Invalid,
    Unreadable,
    YamlTree,
    compose_yaml,
    parse_json,
    parse_toml,
    read_text,
    refused_as,
)
from rankmesh.errors import PlanError
from rankmesh.readers.options import Option, line_error

__all__ = ["found_file", "options_of", "over", "read_document", "yaml_pairs"]

# How many folders above a file are searched for a file that it names.
_ABOVE = 4

_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?')
# Texts of several lines, texts of one, comments; a line that begins a table or has a key.
_TOML_TEXT = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|("(?:\\.|[^"\\\n])*"|\'[^\'\n]*\')|#[^\n]*', re.DOTALL
)
_TOML_KEY = r"""(?:[\w-]+|"(?:\\.|[^"\\])*"|'[^']*')"""
_TOML_LINE = re.compile(rf"[ \t]*(\[{{1,2}}[ \t]*)?({_TOML_KEY}(?:[ \t]*\.[ \t]*{_TOML_KEY})*)[ \t]*(?(1)\]|=)")
_ENDINGS = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def read_document(text: str, path: str) -> list[Option]:
    """Return the values of a document in the order of its lines, none if it is not a mapping. A list is one value.

    A file whose name ends as one of these forms, and whose text is broken, is refused with the reason.
    """
    claimed = next((name for ending, name in _ENDINGS.items() if path.endswith(ending)), None)
    with refused_as(PlanError, path, "give a training config", path=path):
        for name, (parse, walk) in _FORMS.items():
            try:
                parsed = parse(text)
            except Invalid:
                if name == claimed:
                    raise
                continue
            if parsed is not None:
                return list(walk(text, parsed))
        return []


def found_file(path: str, name: object) -> Path | None:
    """Return a file that another one names: beside it or in the folders above, else in the current folder."""
    folders = (*Path(path).parents[:_ABOVE], Path())
    return next((file for folder in folders if (file := folder / str(name)).is_file()), None)


def options_of(named: Option, path: str) -> list[Option]:
    """Return the options of a file that another one names, with the line that names it."""
    file = found_file(path, named.value) or Path(path).parent / str(named.value)
    try:
        return [replace(option, line=named.line) for option in read_document(read_text(file), str(file))]
    except Unreadable as error:
        problem = f"the run's layout is in {named.value}, which {error}; give the path of that file, with --world-size"
        raise line_error(path, named.line, problem) from error


def over(given: list[Option], found: list[Option]) -> list[Option]:
    """Return the options of a command, and of its file where the command does not set them."""
    keys = {option.path[-1] for option in given}
    return [*given, *(option for option in found if option.path[-1] not in keys)]


class _Pairs(list[tuple[str, object]]):
    """A JSON object with the order and the repetitions of its keys."""


def _walk_json(text: str, _: object) -> Iterator[Option]:
    """Yield each value of a text that is known to be JSON, with the line of its key."""
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    # A text before a colon is a key, and the keys are in the order of the data.
    lines = (bisect_right(starts, found.start()) for found in _JSON_TEXT.finditer(text) if found[1])
    return _json_options(json.loads(text, object_pairs_hook=_Pairs), (), 1, lines)


def _json_options(value: object, path: tuple[str, ...], line: int, lines: Iterator[int]) -> Iterator[Option]:
    if not isinstance(value, _Pairs):
        yield Option(path, _plain(value, lines), line)
        return
    for name, inner in value:
        yield from _json_options(inner, (*path, name), next(lines), lines)


def _plain(value: object, lines: Iterator[int]) -> object:
    """Return a value as plain data, and skip the lines of its keys."""
    if isinstance(value, _Pairs):
        return {name: _plain(inner, lines) for name, inner in value if next(lines)}
    return [_plain(inner, lines) for inner in value] if isinstance(value, list) else value


def _walk_toml(text: str, parsed: dict[str, object]) -> Iterator[Option]:
    """Return each value with the line of its key, or of the table or inline table around it."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    depth = 0
    without_texts = _TOML_TEXT.sub(lambda found: "\n" * found[0].count("\n"), text).split("\n")
    without_notes = _TOML_TEXT.sub(lambda found: found[0] if found[1] else "\n" * found[0].count("\n"), text).split(
        "\n"
    )
    for number, (bare, written) in enumerate(zip(without_texts, without_notes, strict=True), 1):
        found = _TOML_LINE.match(written) if depth == 0 else None
        if found:
            names = _names(parse_toml(f"{found[2]} = 0"))
            table = names if found[1] else table
            lines.setdefault(names if found[1] else (*table, *names), number)
        depth += sum(map(bare.count, "[{")) - sum(map(bare.count, "]}"))
    found_options = (
        Option(path, value, next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1))
        for path, value in _leaves(parsed, ())
    )
    return iter(sorted(found_options, key=lambda option: option.line))


def _names(key: dict[str, object]) -> tuple[str, ...]:
    """Return the names of a dotted key, given as mappings inside each other."""
    ((name, inner),) = key.items()
    return (name, *(_names(inner) if isinstance(inner, dict) else ()))


def _leaves(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def yaml_pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a mapping; merged ones follow its own, and the first of them counts."""
    pairs = [(key, value) for key, value in node.value if key.id == "scalar" and not key.tag.endswith(":merge")]
    yield from pairs
    names = {key.value for key, _ in pairs}
    merged = [value for key, value in node.value if key.tag.endswith(":merge")]
    for part in (part for value in merged for part in (value.value if value.id == "sequence" else [value])):
        if part.id != "mapping":
            raise Unreadable(f"merges what is not a mapping (line {part.start_mark.line + 1})")
        inherited = [(key, value) for key, value in yaml_pairs(part) if key.value not in names]
        yield from inherited
        names |= {key.value for key, _ in inherited}


def _yaml_options(tree: YamlTree, node: Any, path: tuple[str, ...], line: int) -> Iterator[Option]:
    if node.id != "mapping" or not node.value:
        yield Option(path, {} if node.id == "mapping" else tree.value(node), line)
        return
    for key, value in yaml_pairs(node):
        yield from _yaml_options(tree, value, (*path, key.value), key.start_mark.line + 1)


# What a text is if it is a mapping in a form, None otherwise, and the values of that; forms are tried in this order.
_FORMS: Mapping[str, tuple[Callable[[str], Any], Callable[[str, Any], Iterator[Option]]]] = {
    "json": (lambda text: data if isinstance(data := parse_json(text), dict) else None, _walk_json),
    "toml": (lambda text: parse_toml(text) or None, _walk_toml),
    "yaml": (
        lambda text: tree if getattr((tree := compose_yaml(text)).node, "id", "") == "mapping" else None,
        lambda _, tree: _yaml_options(tree, tree.node, (), 1),
    ),
}
