r"""JSON, TOML and YAML as entries: every value with the path of its keys and its line.

>>> [str(entry) for entry in entries("parallelism:\n  tp: 4\n", "run.yaml")], syntax("[a]\nb = 1\n", "x")
(['parallelism.tp = 4'], 'toml')
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from rankmesh.errors import PlanError
from rankmesh.readers.reading import Entry

__all__ = ["entries", "syntax"]

_LIMIT = 100_000
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_ENDINGS = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def syntax(text: str, path: str) -> str | None:
    """``json``, ``toml`` or ``yaml`` if the text is a mapping in it, None if in none of them.

    A file whose name ends as one of them, and whose text is broken, is refused with the reason.
    """
    claimed = next((name for ending, name in _ENDINGS.items() if path.endswith(ending)), None)
    return next((name for name in _LOADERS if _is_mapping(name, text, path, strict=name == claimed)), None)


def _is_mapping(name: str, text: str, path: str, *, strict: bool) -> bool:
    try:
        return isinstance(_LOADERS[name](text), dict)
    except RecursionError:
        raise PlanError(
            f"{path}: received a file that is nested too deeply; give a training config", path=path
        ) from None
    except ValueError as error:
        if strict:
            why = " ".join(str(error).split())
            raise PlanError(f"{path}: received a file that is no {name.upper()} ({why}); mend it", path=path) from error
        return False


def entries(text: str, path: str) -> list[Entry]:
    """The values of a document in the order of its lines; a list is one value."""
    name = syntax(text, path)
    found = list(islice(_WALKERS[name](text), _LIMIT + 1)) if name else []
    if len(found) > _LIMIT:
        raise PlanError(f"{path}: received more than {_LIMIT} values; a training config has fewer", path=path)
    return found


def _load_json(text: str) -> Any:
    return json.loads(text)


def _load_toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text) or None


def _load_yaml(text: str) -> Any:
    node = _yaml_node(text)
    return {} if node is not None and node.id == "mapping" else None


_LOADERS = {"json": _load_json, "toml": _load_toml, "yaml": _load_yaml}


def _walk_json(text: str) -> Iterator[Entry]:
    """Tokens of a text that is known to be JSON; each key's line is that of its name."""
    stack: list[list[Any]] = []  # [is it an object, key, line of the key, start of a list]
    tokens = list(_TOKEN.finditer(text))
    for number, token in enumerate(tokens):
        word = token[0]
        if word in "{[":
            stack.append([word == "{", None, 0, token.start()])
        elif word in "}]":
            closed = stack.pop()
            if not closed[0] and all(level[0] for level in stack):
                yield _json_entry(stack, text[closed[3] : token.end()])
        elif word in ",:":
            continue
        elif stack[-1][0] and tokens[number + 1][0] == ":":
            stack[-1][1:3] = [json.loads(word), text.count("\n", 0, token.start()) + 1]
        elif all(level[0] for level in stack):
            yield _json_entry(stack, word)


def _json_entry(stack: list[list[Any]], text: str) -> Entry:
    return Entry(tuple(level[1] for level in stack), json.loads(text), stack[-1][2] if stack else 1)


def _walk_toml(text: str) -> Iterator[Entry]:
    """A value's line is the one without which the document no longer has the value."""
    lines = text.splitlines(keepends=True)
    document = _load_toml(text)
    for path, value in _leaves(document, ()):
        yield Entry(path, value, next((n for n, line in _naming(lines, path) if _states(lines, n, path)), 1))


def _naming(lines: list[str], path: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if path[-1] in line)


def _states(lines: list[str], number: int, path: tuple[str, ...]) -> bool:
    try:
        rest: Any = _load_toml("".join([*lines[: number - 1], "\n", *lines[number:]])) or {}
    except ValueError:
        return True
    for name in path:
        if not isinstance(rest, dict) or name not in rest:
            return True
        rest = rest[name]
    return False


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def _yaml_loader(text: str) -> Any:
    import yaml

    return yaml.SafeLoader(text)


def _yaml_node(text: str) -> Any:
    import yaml

    try:
        node = _yaml_loader(text).get_single_node()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return node


def _walk_yaml(text: str) -> Iterator[Entry]:
    return _yaml_entries(_yaml_node(text), (), 1, ())


def _yaml_entries(node: Any, path: tuple[str, ...], line: int, outer: tuple[Any, ...]) -> Iterator[Entry]:
    if node in outer or len(outer) > _LIMIT:
        return
    if node.id != "mapping":
        yield Entry(path, _yaml_value(node), line)
        return
    merged = [value for key, value in node.value if key.tag.endswith(":merge")]
    own = [(key.value, key.start_mark.line + 1, value) for key, value in node.value if key.id == "scalar"]
    own = [row for row in own if row[0] != "<<" or not merged]
    for name, number, value in own:
        yield from _yaml_entries(value, (*path, name), number, (*outer, node))
    if not node.value:
        yield Entry(path, {}, line)
    names = {name for name, _, _ in own}
    for value in merged:
        for part in value.value if value.id == "sequence" else [value]:
            inherited = _yaml_entries(part, path, line, (*outer, node))
            yield from (entry for entry in inherited if entry.path[len(path)] not in names)


def _yaml_value(node: Any) -> Any:
    import yaml

    loader = _yaml_loader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError):  # a tag of another library: its text
        return node.value if isinstance(node.value, str) else None


_WALKERS = {"json": _walk_json, "toml": _walk_toml, "yaml": _walk_yaml}
