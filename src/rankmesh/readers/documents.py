r"""JSON, TOML and YAML as entries: every value with the path of its keys and its line.

>>> [str(entry) for entry in entries("parallelism:\n  tp: 4\n", "run.yaml")], syntax("[a]\nb = 1\n", "x")
(['parallelism.tp = 4'], 'toml')
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

from rankmesh.core.extras import extra
from rankmesh.errors import PlanError
from rankmesh.readers.reading import Entry

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["entries", "syntax"]

_LIMIT = 100_000
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
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _load_toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        with extra("configs"):
            import tomli as tomllib
    return tomllib.loads(text) or None


def _load_yaml(text: str) -> Any:
    node = _yaml_node(text)
    return {} if node is not None and node.id == "mapping" else None


_LOADERS = {"json": _load_json, "toml": _load_toml, "yaml": _load_yaml}


def _walk_json(text: str) -> Iterator[Entry]:
    """Each value of a text that is known to be JSON; its line is that of its key."""
    waiting: list[tuple[tuple[str, ...], int, Node]] = [((), 1, _tree("json", text).named_children[0])]
    while waiting:
        path, line, node = waiting.pop()
        if node.type != "object":
            yield Entry(path, json.loads(_text(node)), line)
            continue
        pairs = [(pair.child_by_field_name("key"), pair.child_by_field_name("value")) for pair in _pairs(node)]
        inner = [((*path, json.loads(_text(key))), _line(key), value) for key, value in pairs if key and value]
        waiting += reversed(inner)


def _walk_toml(text: str) -> Iterator[Entry]:
    """Each value with the line of its key, or of the first ``[[table]]`` of a list of tables."""
    lines: dict[tuple[str, ...], int] = {}
    for node in _tree("toml", text).named_children:
        if node.type in ("table", "table_array_element"):
            key, *rest = node.named_children
            lines.setdefault(_names(key), _line(node))
            _place(rest, _names(key), lines)
        else:
            _place([node], (), lines)
    found = (Entry(path, value, lines.get(path, 1)) for path, value in _leaves(_load_toml(text), ()))
    return iter(sorted(found, key=lambda entry: entry.line))


def _place(nodes: list[Node], path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    """Note the lines of the keys in these pairs, and in the inline tables of their values."""
    for node in nodes:
        if node.type == "pair":
            key, value = node.named_children[0], node.named_children[-1]
            lines.setdefault((*path, *_names(key)), _line(key))
            if value.type == "inline_table":
                _place(_pairs(value), (*path, *_names(key)), lines)


def _names(key: Node) -> tuple[str, ...]:
    """The names of a key: one, or several joined by dots."""
    if key.type == "dotted_key":
        return tuple(name for part in key.named_children for name in _names(part))
    return (_text(key),) if key.type == "bare_key" else tuple(_load_toml(f"{_text(key)} = 0"))


def _tree(name: str, text: str) -> Node:
    """The syntax tree of a text, with the place of every node."""
    with extra("configs"):
        from tree_sitter import Language, Parser

        grammar = import_module(f"tree_sitter_{name}")
    return Parser(Language(grammar.language())).parse(text.encode()).root_node


def _pairs(node: Node) -> list[Node]:
    return [child for child in node.named_children if child.type == "pair"]


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _line(node: Node) -> int:
    return node.start_point.row + 1


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def _yaml_node(text: str) -> Any:
    import yaml

    try:
        node = yaml.SafeLoader(text).get_single_node()
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

    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError):  # a tag of another library: its text
        return node.value if isinstance(node.value, str) else None


_WALKERS = {"json": _walk_json, "toml": _walk_toml, "yaml": _walk_yaml}
