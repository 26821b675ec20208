"""Variables of a shell script and their expansion: what a written word becomes.

```
$TP ${TP} ${TP:-4} ${TP-4} ${TP:=4} ${ARGS[@]} ${ARGS[*]} $((A * B)) "..." '...'      followed
$1 $@ $(command) ${TP%x} ${!TP}                                                       unknown, with the reason
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankmesh.errors import cut
from rankmesh.readers.tokens import BREAK, Part, Word, fields, gap_of, joined, lines_of, quoted, text_of, unbroken

if TYPE_CHECKING:
    from tree_sitter import Node

    from rankmesh.readers.script import Script

__all__ = ["SETS", "Expander", "Variable"]

_ESCAPE = re.compile(r"\\(\n|.)", re.DOTALL)
_ESCAPE_IN_QUOTES = re.compile(r"\\(\n|[\"$`\\])")
_PLAIN = re.compile(r"\$\{\w+(\[[@*]\])?\}")
# What arithmetic sets.
SETS = re.compile(r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))")
_DEFAULTS = (":-", "-", ":=", "=")
_SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    "%": lambda left, right: left - right * _SIGNS["/"](left, right),
}


@dataclass(frozen=True)
class Variable:
    """A variable: one word, or the words of an array; ``lines`` where it was set."""

    words: tuple[Word, ...]
    array: bool
    lines: tuple[int, ...]

    def same(self, other: Variable) -> bool:
        """Whether both have the same text, wherever it was written."""
        if self.words == other.words:
            return True
        texts = [[text_of(word) for word in variable.words] for variable in (self, other)]
        return texts[0] == texts[1] and None not in texts[0] and self.array == other.array


class Expander:
    """Expands the nodes of one source text with the variables of a script."""

    def __init__(self, source: bytes, lines: Callable[[int], tuple[int, ...]], script: Script) -> None:
        self.source = source
        self.lines = lines
        self.script = script

    def source_of(self, node: Node) -> str:
        """The text of a node as written; the grammar counts spaces before an expansion in quotes to it."""
        return self.source[self.start_of(node) : node.end_byte].decode(errors="replace")

    def start_of(self, node: Node) -> int:
        """Where the text of a node starts."""
        text = self.source[node.start_byte : node.end_byte]
        return node.end_byte - len(text.lstrip())

    def assign(self, node: Node) -> None:
        """``NAME=value``, ``NAME=( ... )`` and both with ``+=``."""
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        lines = self.lines(self.start_of(node))
        if name is None or name.type != "variable_name":
            written = self.source_of(node).partition("[")[0]
            self.leave_open(written, node, f"{written} is set element by element")
            return
        if value is not None and value.type == "array":
            made = Variable(tuple(self.words(value.named_children)), True, lines)
        else:
            made = Variable((unbroken(quoted(self.text(value))) if value is not None else (),), False, lines)
        key = self.source_of(name)
        appends = any(child.type == "+=" for child in node.children)
        if appends and key in self.script.variables:
            before = self.script.variables[key]
            self.script.budget.spend(len(before.words) + sum(map(len, before.words[:1])))
        self.script.variables[key] = _assigned(self.script.variables.get(key), made, appends=appends)

    def leave_open(self, name: str, node: Node, why: str, maybe: tuple[Word, ...] = ()) -> None:
        """From here on the variable has no one value, but for one that is given."""
        if name in self.script.given:
            self.script.asked.add(name)
            self.script.variables[name] = self.script.given[name]
            return
        lines = self.lines(self.start_of(node))
        part = Part(None, lines, True, f"${name}", why, tuple(self.alternatives(maybe)))
        self.script.variables[name] = Variable(((part,),), False, lines)

    def alternatives(self, words: Iterable[Word]) -> dict[Word, None]:
        """What a variable may be, each once: these words, and what their own unresolved parts may be."""
        found: dict[Word, None] = {}
        for word in words:
            self.script.budget.spend(len(word))
            found[tuple(replace(part, maybe=()) if part.maybe else part for part in word)] = None
            for inner in (inner for part in word for inner in part.maybe):
                self.script.budget.spend(len(inner))
                found[inner] = None
        return found

    def words(self, nodes: Iterable[Node]) -> Iterator[Word]:
        """The words that written words become."""
        for node in nodes:
            if node.type == "comment":
                continue
            for word in fields(self.text(node)):
                self.script.budget.spend(1 + len(word))
                yield word

    def name_in(self, node: Node) -> str:
        """The name of the variable that an expansion expands."""
        found = re.match(r"\$\{?!?#?(\w+|.)", self.source_of(node))
        return found[1] if found else ""

    def text(self, node: Node) -> Word:
        """One written word as parts, before it is cut at spaces."""
        kind = node.type
        if kind == "command_name":
            return self.text(node.named_children[0])
        if kind == "concatenation":
            return tuple(part for child in node.children for part in self.text(child))
        if kind == "string":
            return quoted(self.inside(node)) or (() if "[@]}" in self.source_of(node) else self.empty(node))
        if kind == "raw_string":
            return self.literal(self.start_of(node) + 1, node.end_byte - 1, None) or self.empty(node)
        if kind == "simple_expansion":
            return self.value(self.name_in(node), node)
        if kind == "expansion":
            return self.expansion(node)
        if kind == "arithmetic_expansion":
            return self.arithmetic(node)
        if kind in ("command_substitution", "process_substitution"):
            return self.open(node, f"{self.source_of(node)} is the output of a command, which is not run")
        return self.literal(node.start_byte, node.end_byte, _ESCAPE)

    def inside(self, node: Node) -> Word:
        """The parts between double quotes."""
        parts: list[Part] = []
        place = node.start_byte + 1
        for child in node.named_children:
            if child.type != "string_content":
                parts += self.literal(place, self.start_of(child), _ESCAPE_IN_QUOTES)
                parts += self.text(child)
                place = child.end_byte
        parts += self.literal(place, node.end_byte - 1, _ESCAPE_IN_QUOTES)
        return tuple(parts)

    def literal(self, start: int, end: int, escape: re.Pattern[str] | None) -> Word:
        """Literal text, one part for each of its lines, without the backslashes that quote."""
        parts = []
        for piece in self.source[start:end].splitlines(keepends=True):
            text = piece.decode(errors="replace")
            if escape is not None:
                text = escape.sub(lambda found: "" if found[1] == "\n" else found[1], text)
            self.script.budget.spend()
            parts.append(Part(text, self.lines(start)))
            start += len(piece)
        return tuple(parts)

    def empty(self, node: Node) -> Word:
        """A pair of quotes with nothing inside, which is a word all the same."""
        return (Part("", self.lines(self.start_of(node))),)

    def open(self, node: Node, why: str) -> Word:
        """A part that is unknown."""
        return (Part(None, self.lines(self.start_of(node)), True, self.source_of(node), why),)

    def value(self, name: str, node: Node) -> Word:
        """The value of a variable, spaces between the elements of an array."""
        self.script.asked.add(name)
        variable = self.script.variables.get(name)
        if variable is None:
            return self.open(node, _unset(name))
        whole = variable.array and self.source_of(node).endswith(("@]}", "*]}", "$@"))
        words = variable.words if whole else variable.words[:1]
        separator = " " if self.source_of(node).endswith("*]}") else BREAK
        # Variables of each other grow by doubling: each part that is copied counts, with its text.
        self.script.budget.spend(sum(1 + len(part.text or "") // 64 for word in words for part in word))
        return tuple(_split(part) for part in joined(words, separator))

    def expansion(self, node: Node) -> Word:
        """``${...}``: a name, alone, as an array, or with a default."""
        name, written = self.name_in(node), self.source_of(node)
        operator = next((child.type for child in node.children if not child.is_named and child.type not in "${}"), "")
        if _PLAIN.fullmatch(written):
            return self.value(name, node)
        if operator not in _DEFAULTS:
            return self.open(node, f"{written} is more than a variable, which is not followed")
        self.script.asked.add(name)
        variable = self.script.variables.get(name)
        if variable is None and self.script.unresolved and not name.startswith("SLURM_"):
            return self.open(node, f"{name} may be set by now: {self.script.unresolved}")
        first = variable.words[:1] if variable is not None else ()
        if first and (text_of(first[0]) != "" or ":" not in operator):
            return self.value(name, node)
        place = self.start_of(node) + written.index(operator) + len(operator)
        default = tuple(replace(part, default=True) for part in self.default(node, place))
        line = self.lines(self.start_of(node))[0]
        self.script.defaults[line] = f"{written} is read as its default; the environment may say otherwise"
        if "=" in operator:
            self.script.variables[name] = Variable((unbroken(quoted(default)),), False, self.lines(self.start_of(node)))
        return tuple(_split(part) for part in default)

    def default(self, node: Node, place: int) -> Word:
        """The default inside ``${NAME:-default}``, from a place in the source on."""
        children = [child for child in node.named_children if child.start_byte >= place]
        if len(children) == 1 and children[0].byte_range == (place, node.end_byte - 1):
            return self.text(children[0])
        if children and any("expansion" in child.type or child.type == "string" for child in children):
            return self.open(node, f"the default of {self.source_of(node)} is not followed")
        return self.literal(place, node.end_byte - 1, _ESCAPE)

    def arithmetic(self, node: Node) -> Word:
        """``$(( ))`` over whole numbers."""
        used: list[Part] = [Part("", self.lines(self.start_of(node)))]
        for found in SETS.findall(self.source_of(node)):
            self.leave_open(found[0] or found[1], node, f"{self.source_of(node)} sets it, which is not followed")
        children = node.named_children
        number = self.number(children[0], used) if len(children) == 1 else f"{self.source_of(node)} is not followed"
        if isinstance(number, str):
            return self.open(node, number)
        return (Part(str(number), lines_of(tuple(used)), True, default=any(part.default for part in used)),)

    def number(self, node: Node, used: list[Part]) -> int | str:
        """The value of an arithmetic expression, or why it has none; ``used`` gathers what it came from."""
        if node.type == "parenthesized_expression":
            return self.number(node.named_children[0], used)
        if node.type == "binary_expression" and len(node.named_children) == 2:
            left, right = (self.number(child, used) for child in node.named_children)
            sign = next((child.type for child in node.children if not child.is_named), "")
            if isinstance(left, str) or isinstance(right, str):
                return left if isinstance(left, str) else right
            if sign not in _SIGNS or (sign in "/%" and right == 0):
                return f"{self.source_of(node)} is not followed"
            result = _SIGNS[sign](left, right)
            return result if abs(result) < 2**63 else f"{self.source_of(node)} does not fit into 64 bits"
        word = self.value(self.source_of(node), node) if node.type == "variable_name" else self.text(node)
        text = text_of(word)
        if text is None:
            return next(part.why for part in word if part.text is None)
        used += word
        if re.fullmatch(r"0|[1-9]\d{0,17}", text.strip()):  # a leading zero is octal in shell
            return int(text)
        return f"{self.source_of(node)} is {cut(repr(text))}, which is no decimal number"


def _split(part: Part) -> Part:
    return part if part.split else replace(part, split=True)


def _assigned(before: Variable | None, made: Variable, *, appends: bool) -> Variable:
    """What a variable becomes; a plain value goes to the first element of an array."""
    if before is None or (made.array and not appends):
        return made
    if made.array:
        return Variable((*before.words, *made.words), True, before.lines)
    first = before.words[0] + made.words[0] if appends and before.words else made.words[0]
    if before.array and before.words and gap_of(before.words[0]):
        return before  # an unknown element may be no element, so which one is the first is unknown too
    if before.array:
        return Variable((first, *before.words[1:]), True, made.lines)
    return Variable((first,), False, before.lines if appends else made.lines)


def _unset(name: str) -> str:
    if name.isdecimal() or name in "@*#?":
        return "the arguments of the script are not known here"
    return f"the variable {name} has no value in this file"
