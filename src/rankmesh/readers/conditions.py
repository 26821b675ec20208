"""Which branches of a script may run: conditions over words that the script itself states are decided.

```
if [ $A = b ]; then ... elif [[ -z $C ]]; then ...     by text and by whole numbers
case $MODEL in 7b*|8b) ...                             by patterns
[ -n "$X" ] && ...        [ -d data ] || ...           the second may run or not
if [ $A = b ] && [ $C = d ]; then ...                  any branch may run
```
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rankmesh.readers.expand import Expander
from rankmesh.readers.tokens import Word, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["chosen"]

_NUMBERS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_Bodies = tuple[list[list["Node"]], bool, list[tuple[int, str]]]


def chosen(node: Node, expander: Expander, run: Callable[[Iterable[Node]], None]) -> _Bodies:
    """The bodies of an ``if``, ``case`` or ``&&`` that may run; whether one of them does; the defaults that decide.

    ``run`` reads the statements of a condition.
    """
    decider = _Decider(expander)
    bodies: list[list[Node]] = []
    certain = False
    negated = node.type == "list" and any(child.type == "||" for child in node.children)
    for known, condition, body in decider.clauses(node):
        verdict = known
        if condition:
            run(condition)
            verdict = decider.decide(condition[-1])
            verdict = not verdict if negated and verdict is not None else verdict
        if verdict is not False:
            bodies.append(body)
        if verdict:
            certain = True
            break
    else:
        certain = not bodies  # no branch runs, which is certain too
    return bodies, certain, decider.notes


class _Decider:
    """Decides conditions with the variables of a script."""

    def __init__(self, expander: Expander) -> None:
        self.expander = expander
        self.notes: list[tuple[int, str]] = []

    def clauses(self, node: Node) -> Iterator[tuple[bool | None, list[Node], list[Node]]]:
        """Each branch: whether it is taken if none before it was, None for unknown; its condition; its body."""
        if node.type == "case_statement":
            yield from self.items(node)
            return
        if node.type == "list":
            left, *right = node.named_children
            yield None, [left], right
            return
        parts: list[list[Node]] = [[], []]
        for child in node.children:
            if child.type == "then":
                parts.append([])
            elif child.is_named and child.type not in ("elif_clause", "else_clause", "comment"):
                parts[-1].append(child)
        yield None, parts[1], parts[-1]
        for child in node.named_children:
            if child.type == "elif_clause":
                yield from self.clauses(child)
            elif child.type == "else_clause":
                yield True, [], child.named_children

    def items(self, node: Node) -> Iterator[tuple[bool | None, list[Node], list[Node]]]:
        value = node.child_by_field_name("value")
        text = self.known(value) if value is not None else None
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            found = [self.matches(pattern, text) for pattern in patterns]
            falls = any(child.type in (";&", ";;&") for child in item.children)
            verdict = None if falls or (None in found and True not in found) else True in found
            ids = {pattern.id for pattern in patterns}
            yield verdict, [], [child for child in item.named_children if child.id not in ids]

    def matches(self, pattern: Node, text: str | None) -> bool | None:
        written = self.known(pattern)
        if written == "*":
            return True
        if text is None or written is None:
            return None
        if pattern.type in ("string", "raw_string"):
            return written == text
        return None if any(sign in written for sign in "()\\") else fnmatchcase(text, written)

    def decide(self, node: Node) -> bool | None:
        """Whether a condition is true; None where that is not known, or where a part of it sets a variable."""
        written, sign = self.expander.source_of(node), node.children[0].type if node.children else ""
        if node.type == "test_command" and len(node.named_children) == 1 and sign in ("[", "[["):
            sets = ":=" in written or "((" in written
            return None if sets else self.test(node.named_children[0], patterns=sign == "[[")
        return {"true": True, "false": False}.get(written)

    def test(self, node: Node, *, patterns: bool) -> bool | None:
        sign = next((child.type for child in node.children if not child.is_named), "")
        signs = [self.expander.source_of(child) for child in node.named_children if child.type == "test_operator"]
        words = [child for child in node.named_children if child.type != "test_operator"]
        if node.type == "unary_expression" and signs and signs[0] in ("-z", "-n") and len(words) == 1:
            text = self.known(words[0])
            return None if text is None else (text == "") == (signs[0] == "-z")
        if node.type != "binary_expression" or len(words) != 2:
            return None
        left, right = map(self.known, words)
        if left is None or right is None:
            return None
        if signs and signs[0] in _NUMBERS and all(text.strip().isdecimal() for text in (left, right)):
            return bool(_NUMBERS[signs[0]](int(left), int(right)))
        if sign in ("=", "==", "!=") and not (patterns and any(letter in right for letter in "*?[\\(|")):
            return (left == right) != (sign == "!=")
        return None

    def known(self, node: Node) -> str | None:
        """The text of a word, None if it is unknown; a default that it comes from is noted."""
        word: Word = self.expander.text(node)
        text = text_of(word)
        if text is not None and any(part.default for part in word):
            line = self.expander.lines(node.start_byte)[0]
            self.notes.append((line, f"{self.expander.source_of(node)} is read as its default, which decides a branch"))
        return text
