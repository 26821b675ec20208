r"""JSON, TOML and YAML as entries: every value with the path of its keys and its line.

>>> [str(entry) for entry in entries("parallelism:\n  tp: 4\n", "run.yaml")]
['parallelism.tp = 4']
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankmesh.core.documents import Invalid, Unreadable, YamlTree, compose_yaml, parse_json, parse_toml, refused_as
from rankmesh.errors import PlanError, extra
from rankmesh.readers.reading import Entry

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["entries"]

_ENDINGS = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def entries(text: str, path: str) -> list[Entry]:
    """The values of a document in the order of its lines, none where it is no mapping; a list is one value.

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


def _json_mapping(text: str) -> dict[str, Any] | None:
    parsed = parse_json(text)
    return parsed if isinstance(parsed, dict) else None


def _walk_json(text: str, _: object) -> Iterator[Entry]:
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


def _walk_toml(text: str, parsed: dict[str, Any]) -> Iterator[Entry]:
    """Each value with the line of its key, or of the first ``[[table]]`` of a list of tables."""
    lines: dict[tuple[str, ...], int] = {}
    for node in _tree("toml", text).named_children:
        if node.type in ("table", "table_array_element"):
            key, *rest = node.named_children
            lines.setdefault(_names(key), _line(node))
            _place(rest, _names(key), lines)
        else:
            _place([node], (), lines)
    found = (Entry(path, value, lines.get(path, 1)) for path, value in _leaves(parsed, ()))
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
    return (_text(key),) if key.type == "bare_key" else tuple(parse_toml(f"{_text(key)} = 0"))


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


def _yaml_mapping(text: str) -> YamlTree | None:
    tree = compose_yaml(text)
    return tree if tree.node is not None and tree.node.id == "mapping" else None


def _yaml_entries(tree: YamlTree, node: Any, path: tuple[str, ...], line: int) -> Iterator[Entry]:
    """Each value below a node; what a mapping merges comes after its own, and the first of what it merges counts."""
    if node.id != "mapping":
        yield Entry(path, tree.value(node), line)
        return
    if not node.value:
        yield Entry(path, {}, line)
    merged = [value for key, value in node.value if key.tag.endswith(":merge")]
    names = set()
    for key, value in node.value:
        if key.id == "scalar" and not key.tag.endswith(":merge"):
            names.add(key.value)
            yield from _yaml_entries(tree, value, (*path, key.value), key.start_mark.line + 1)
    for part in (part for value in merged for part in (value.value if value.id == "sequence" else [value])):
        if part.id != "mapping":
            raise Unreadable(f"merges what is no mapping (line {part.start_mark.line + 1})")
        inherited = [entry for entry in _yaml_entries(tree, part, path, line) if entry.path != path]
        yield from (entry for entry in inherited if entry.path[len(path)] not in names)
        names |= {entry.path[len(path)] for entry in inherited}


# What a text is if it is a mapping in a form, None otherwise, and the values of that; forms are tried in this order.
_FORMS: Mapping[str, tuple[Callable[[str], Any], Callable[[str, Any], Iterator[Entry]]]] = {
    "json": (_json_mapping, _walk_json),
    "toml": (lambda text: parse_toml(text) or None, _walk_toml),
    "yaml": (_yaml_mapping, lambda _, tree: _yaml_entries(tree, tree.node, (), 1)),
}
