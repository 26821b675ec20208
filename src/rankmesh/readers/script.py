r"""A shell script read without running it: its variables, and the commands that it would start.

Assignments, arrays, ``$NAME``, ``${NAME}``, ``${NAME:-default}``, ``${NAME[@]}``, ``$(( ))``, functions, ``eval`` and
``bash -c`` are followed. What depends on anything else is a part without a text: it is refused only where a size needs
it. The grammar is tree-sitter's; nothing is ever executed.

>>> from rankmesh.readers.words import lines_of
>>> script = read_script("TP=4\nARGS=(--tp $TP)\ntorchrun ${ARGS[@]} a.py")
>>> [text_of(word) for word in script.commands[0].words]
['torchrun', '--tp', '4', 'a.py']
>>> [lines_of(word) for word in script.commands[0].words]
[(3,), (2,), (1,), (3,)]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankmesh.extras import extra
from rankmesh.readers.assigns import assigned_by, assigned_in
from rankmesh.readers.expand import Expander, Variable
from rankmesh.readers.words import Word, joined, shown, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["Command", "Script", "read_script"]

_DEPTH = 16
_BLOCKS = {
    "program",
    "compound_statement",
    "do_group",
    "redirected_statement",
    "negated_command",
}
# What they set ends with them.
_SUBSHELLS = {"subshell", "pipeline"}
_BRANCHES = {"if_statement", "case_statement"}
_LOOPS = {"for_statement", "while_statement", "c_style_for_statement"}
_LOCAL = ("local", "declare", "typeset")
_DECLARATIONS = {"declaration_command", "variable_assignments"}


@dataclass(frozen=True)
class Command:
    """A command that the script would start, its words expanded."""

    words: tuple[Word, ...]
    line: int

    def __str__(self) -> str:
        return " ".join(shown(word) for word in self.words)


@dataclass
class Script:
    """What was read: the commands in order, the variables at the end, what was not read, lines with defaults, and
    texts that are no shell.
    """

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    defaults: dict[int, str] = field(default_factory=dict)
    broken: list[tuple[int, str]] = field(default_factory=list)


def read_script(text: str, known: Mapping[str, Variable] | None = None) -> Script:
    """Read a script; ``known`` are variables that it finds set."""
    script = Script(variables=dict(known or {}))
    source = text.encode()
    starts = [0, *(place + 1 for place, byte in enumerate(source) if byte == 10)]
    _Reader(script, source, lambda offset: (bisect_right(starts, offset),), {}, 0).run()
    return script


class _Reader:
    """Walks one text; a nested text (``eval``) has a reader of its own over the same variables."""

    def __init__(
        self,
        script: Script,
        source: bytes,
        lines: Callable[[int], tuple[int, ...]],
        functions: dict[str, tuple[_Reader, Node]],
        depth: int,
        prefix: tuple[Word, ...] = (),
    ) -> None:
        self.script = script
        self.source = source
        self.lines = lines
        self.functions = functions
        self.depth = depth
        self.prefix = prefix
        self.expander = Expander(source, lines, script)
        # In a function: what its local variables were outside.
        self.scope: dict[str, Variable | None] | None = None

    def run(self) -> None:
        with extra("configs"):
            import tree_sitter_bash
            from tree_sitter import Language, Parser

        root = Parser(Language(tree_sitter_bash.language())).parse(self.source).root_node
        self.block(root)
        self.script.broken += [(self.at(node), self.expander.source_of(node)) for node in _broken(root)]

    def block(self, node: Node) -> None:
        for child in node.named_children:
            self.statement(child)

    def statement(self, node: Node) -> None:
        if node.type == "compound_statement" and self.expander.source_of(node).startswith("(("):
            for name in assigned_in(node, self.expander.source_of):
                self.expander.leave_open(name, node, "it is set by arithmetic, which is not followed")
        elif node.type in _BLOCKS:
            self.block(node)
        elif node.type in _SUBSHELLS:
            for child in node.named_children:
                self.outcome([child])
        elif node.type in _BRANCHES:
            self.branches(node)
        elif node.type in _LOOPS:
            self.loop(node)
        elif node.type == "list":
            self.chain(node)
        elif node.type == "variable_assignment":
            self.expander.assign(node)
        elif node.type in _DECLARATIONS:
            self.declare(node)
        elif node.type == "unset_command":
            self.unset(node)
        elif node.type == "function_definition":
            self.define(node)
        elif node.type == "command":
            self.command(node)

    def declare(self, node: Node) -> None:
        keyword, *options = self.expander.source_of(node).split() or [""]
        scope = self.scope if keyword in _LOCAL and "-g" not in options[:1] else None
        for child in node.named_children:
            name = child.child_by_field_name("name") if child.type == "variable_assignment" else child
            if scope is not None and name is not None and name.type == "variable_name":
                key = self.expander.source_of(name)
                scope.setdefault(key, self.script.variables.get(key))
            if child.type == "variable_assignment":
                self.expander.assign(child)

    def unset(self, node: Node) -> None:
        for child in node.named_children:
            self.script.variables.pop(self.expander.source_of(child), None)

    def define(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[self.expander.source_of(name)] = (self, body)

    def branches(self, node: Node) -> None:
        """Each branch starts from the same variables; what they leave different is open afterwards."""
        bodies: list[list[Node]] = [[]]
        otherwise = False
        for child in node.named_children:
            if child.type in ("elif_clause", "else_clause", "case_item"):
                bodies.append(list(child.named_children))
                otherwise |= child.type == "else_clause" or self.expander.source_of(child).lstrip().startswith("*)")
            else:
                bodies[0].append(child)
        if node.type == "case_statement":
            bodies = bodies[1:]
        self.merge([self.outcome(body) for body in bodies], node, or_before=not otherwise)

    def loop(self, node: Node) -> None:
        name = node.child_by_field_name("variable")
        if name is not None:
            self.expander.leave_open(self.expander.source_of(name), node, "a loop sets it")
        body = [child for child in node.named_children if child.type in ("do_group", "compound_statement")]
        self.merge([self.outcome(body)], node, or_before=True)

    def chain(self, node: Node) -> None:
        """``left && right``: the right side may not run."""
        left, *right = node.named_children
        self.statement(left)
        for child in right:
            self.merge([self.outcome([child])], node, or_before=True)

    def outcome(self, body: Iterable[Node]) -> dict[str, Variable]:
        before = dict(self.script.variables)
        for child in body:
            self.statement(child)
        after = dict(self.script.variables)
        self.script.variables.clear()
        self.script.variables.update(before)
        return after

    def merge(self, outcomes: list[dict[str, Variable]], node: Node, *, or_before: bool) -> None:
        before = dict(self.script.variables)
        every = [*outcomes, before] if or_before else outcomes
        for name in dict.fromkeys(name for outcome in outcomes for name in outcome):
            values = [outcome[name] for outcome in every if name in outcome]
            if len(values) == len(every) and all(value.same(values[0]) for value in values):
                self.script.variables[name] = values[0]
            else:
                changed = [value for value in values if name not in before or not value.same(before[name])]
                where = ", ".join(str(line) for value in changed for line in value.lines[:1])
                why = f"{name} is set in a branch (line {where}), which may run or not"
                maybe = tuple(word for value in values for word in value.words)
                self.expander.leave_open(name, node, why, maybe)

    def command(self, node: Node) -> None:
        words = tuple(self.expander.words(child for child in node.named_children if _is_word(child)))
        names = [text_of(word) for word in words]
        if not words:
            self.declare(node)
        elif names[0] in self.functions and self.depth < _DEPTH:
            self.call(*self.functions[names[0] or ""], words[1:])
        elif names[0] in ("source", "."):
            self.script.notes.append((self.at(node), f"{' '.join(map(shown, words))} is another file; not read"))
        elif assigned := assigned_by([name or "" for name in names]):
            for name in assigned:
                self.expander.leave_open(name, node, f"the script sets it by {names[0]} while it runs")
        elif nested := _nested(words):
            self.nested(*nested)
        else:
            self.script.commands.append(Command((*self.prefix, *words), self.at(node)))

    def call(self, reader: _Reader, body: Node, arguments: tuple[Word, ...]) -> None:
        """A function's body, with its arguments as ``$1``, ``$2`` and ``$@``."""
        variables = self.script.variables
        before: dict[str, Variable | None] = {
            name: variables.pop(name) for name in list(variables) if name.isdecimal() or name == "@"
        }
        given = {"@": Variable(arguments, True, ())}
        given.update({str(place): Variable((word,), False, ()) for place, word in enumerate(arguments, 1)})
        variables.update(given)
        outer, reader.scope = reader.scope, {}
        reader.depth += 1
        reader.statement(body)
        reader.depth -= 1
        before = {**dict.fromkeys(given), **before, **reader.scope}
        reader.scope = outer
        for name, value in before.items():
            variables.pop(name, None)
            if value is not None:
                variables[name] = value

    def nested(self, prefix: tuple[Word, ...], text: Word) -> None:
        """Read the text that ``eval`` or ``bash -c`` would run; unknown parts get names of their own."""
        source, starts, parts = b"", [], []
        for number, part in enumerate(text):
            starts.append(len(source))
            parts.append(part)
            name = f"__part_{self.depth}_{number}"
            if part.text is None:
                self.script.variables[name] = Variable((((part),),), False, part.lines)
            source += (f"${{{name}}}" if part.text is None else part.text).encode()
        if self.depth >= _DEPTH:
            return
        lines = lambda offset: parts[bisect_right(starts, offset) - 1].lines  # noqa: E731
        _Reader(self.script, source, lines, self.functions, self.depth + 1, (*self.prefix, *prefix)).run()

    def at(self, node: Node) -> int:
        return self.lines(node.start_byte)[0]


def _broken(node: Node) -> Iterator[Node]:
    """The parts that the grammar could not make sense of."""
    if node.is_error or node.is_missing:
        yield node
    elif node.has_error:
        for child in node.children:
            yield from _broken(child)


def _is_word(node: Node) -> bool:
    return node.type not in (
        "variable_assignment",
        "file_redirect",
        "heredoc_redirect",
        "herestring_redirect",
        "comment",
    )


def _nested(words: tuple[Word, ...]) -> tuple[tuple[Word, ...], Word] | None:
    """The script inside a command, the words after ``eval`` or the word after ``bash -c``, and the words before it."""
    names = [(text_of(word) or "").rpartition("/")[2] for word in words]
    if names[0] == "eval":
        return (), joined(words[1:])
    for number in range(len(words) - 2):
        option = names[number + 1]
        if names[number] in ("bash", "sh") and option.startswith("-") and option.endswith("c") and "=" not in option:
            return words[:number], words[number + 2]
    return None
