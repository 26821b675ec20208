r"""A shell script read without running it: its variables, and the commands that it would start.

Assignments, arrays, ``$NAME``, ``${NAME}``, ``${NAME:-default}``, ``${NAME[@]}``, ``$(( ))``, functions, ``eval`` and
``bash -c`` are followed. What depends on anything else is a part without a text: it is refused only where a size needs
it. The grammar is tree-sitter's; nothing is ever executed.

>>> from rankmesh.readers.tokens import lines_of
>>> script = read_script("TP=4\nARGS=(--tp $TP)\ntorchrun ${ARGS[@]} a.py")
>>> [text_of(word) for word in script.commands[0].words]
['torchrun', '--tp', '4', 'a.py']
>>> [lines_of(word) for word in script.commands[0].words]
[(3,), (2,), (1,), (3,)]
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rankmesh.core.documents import Budget, Unreadable
from rankmesh.errors import extra
from rankmesh.errors import quoted as quoted_value
from rankmesh.readers.effects import assigned_by, assigned_in, chosen_branch, kept, may_set_any
from rankmesh.readers.expand import Expander, Variable
from rankmesh.readers.tokens import Part, Word, joined, lines_of, quoted, shown, text_of, unbroken

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["Command", "Script", "read_script"]

_DEPTH = 16
# Steps of one script, such as a part of a word that is copied; bytes, open brackets and here-documents of a text, which
# the grammar takes a time for that grows with their square.
_STEPS, SIZE, _OPEN, _HERE = 60_000, 128 << 10, 100, 500
_BRACKETS = re.compile(rb"[(){}]")
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
_LOOP_BODY = {"do_group", "compound_statement", "command", "list", "negated_command", "redirected_statement"}
_LOCAL = ("local", "declare", "typeset")
_DECLARATIONS = {"declaration_command", "variable_assignments"}


@dataclass(frozen=True)
class Command:
    """A command that the script would start, its words expanded, and the variables that stand before it."""

    words: tuple[Word, ...]
    line: int
    variables: Mapping[str, Variable] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(shown(word) for word in self.words)


@dataclass
class Script:
    """What was read: the commands in order, the variables at the end, what was not read, lines with defaults, and
    texts that are no shell.

    ``given`` is what --set says that the environment holds, ``asked`` the names that were looked up, ``unresolved`` why
    any variable may have been set by then.
    """

    budget: Budget = field(default_factory=lambda: Budget(_STEPS))
    commands: list[Command] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    defaults: dict[int, str] = field(default_factory=dict)
    broken: list[tuple[int, str]] = field(default_factory=list)
    given: Mapping[str, Variable] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    unresolved: str = ""


def read_script(
    text: str, known: Mapping[str, Variable] | None = None, given: Mapping[str, str] | None = None
) -> Script:
    """Read a script; ``known`` are variables that it finds set, ``given`` those that the user says are."""
    preset = {name: Variable(((Part(value, ()),),), False, ()) for name, value in (given or {}).items()}
    script = Script(variables={**(known or {}), **preset}, given=preset)
    source = text.encode()
    starts = [0, *(place + 1 for place, byte in enumerate(source) if byte == 10)]
    _Reader(script, source, lambda offset: (bisect_right(starts, offset),), {}, 0).run()
    for name, before in preset.items():
        after = script.variables.get(name, before)
        if after.lines and not after.same(before):
            script.notes.append((after.lines[0], f"sets {name} itself; --set {name} is what it had before this line"))
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

        self.check()
        root = Parser(Language(tree_sitter_bash.language())).parse(self.source).root_node
        self.block(root)
        self.script.broken += [(self.at(node), self.expander.source_of(node)) for node in _broken(root)]

    def check(self) -> None:
        """Refuse a text on which the grammar would spend too long."""
        self.script.budget.spend(len(self.source) // 8)
        depth = 0
        for sign in _BRACKETS.findall(self.source):
            depth = depth + 1 if sign in b"({" else max(0, depth - 1)
            if depth > _OPEN:
                raise Unreadable(f"opens more than {_OPEN} brackets, one inside the other")
        if len(self.source) > SIZE:
            raise Unreadable(f"is longer than {SIZE >> 10} KiB")
        if self.source.count(b"<<") > _HERE:
            raise Unreadable(f"has more than {_HERE} here-documents")

    def block(self, node: Node) -> None:
        for child in node.named_children:
            self.statement(child)

    def statement(self, node: Node) -> None:
        self.script.budget.spend()
        if node.type == "compound_statement" and self.expander.source_of(node).startswith("(("):
            for name in assigned_in(node, self.expander.source_of):
                self.expander.leave_open(name, node, "it is set by arithmetic, which is not followed")
        elif node.type in _BLOCKS:
            self.block(node)
        elif node.type in _SUBSHELLS:
            before = self.script.unresolved
            for child in node.named_children:
                self.outcome([child])
            self.script.unresolved = before
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
            elif child.type not in ("variable_name", "word", "number"):
                self.declare_text(child)

    def declare_text(self, node: Node) -> None:
        """``export "NAME=value"``, and ``export $TEXT``, of which the names may be unknown."""
        for word in self.expander.words([node]):
            name, equals, _ = "".join(part.text or "\0" for part in word).partition("=")
            if "\0" in name:
                self.unresolve(node, f"{self.expander.source_of(node)} in a declaration may name any variable")
            elif equals and name.isidentifier():
                value = _without(word, len(name) + 1)
                self.script.variables[name] = Variable((unbroken(quoted(value)),), False, lines_of(word))

    def unresolve(self, node: Node, why: str) -> None:
        """Another text may have set any variable: what was known is open, what is not yet set is no default."""
        self.script.unresolved = f"{why} (line {self.at(node)})"
        self.script.budget.spend(len(self.script.variables))
        for name, variable in list(self.script.variables.items()):
            if not kept(name):
                self.expander.leave_open(
                    name, node, f"{name} may be set anew: {self.script.unresolved}", variable.words
                )

    def unset(self, node: Node) -> None:
        for child in node.named_children:
            name = self.expander.source_of(child)
            if child.type not in ("variable_name", "word"):
                self.unresolve(node, f"unset {name} may name any variable")
            self.script.variables.pop(name, None)

    def define(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[self.expander.source_of(name)] = (self, body)

    def branches(self, node: Node) -> None:
        """Each branch starts from the same variables; what they leave different is open afterwards.

        Of a ``case`` whose word is known the one branch is taken.
        """
        if node.type == "case_statement" and (chosen := chosen_branch(node, self.expander.text)) is not None:
            for child in chosen:
                self.statement(child)
            return
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
        if node.type == "c_style_for_statement":
            for counter in assigned_in(node, self.expander.source_of):
                self.expander.leave_open(counter, node, "a loop sets it")
        body = [child for child in node.named_children if child.type in _LOOP_BODY]
        self.merge([self.outcome(body)], node, or_before=True)

    def chain(self, node: Node) -> None:
        """``left && right``: the right side may not run."""
        left, *right = node.named_children
        self.statement(left)
        for child in right:
            self.merge([self.outcome([child])], node, or_before=True)

    def outcome(self, body: Iterable[Node]) -> dict[str, Variable]:
        before = dict(self.script.variables)
        self.script.budget.spend(len(before) // 8)
        for child in body:
            self.statement(child)
        after = dict(self.script.variables)
        self.script.variables.clear()
        self.script.variables.update(before)
        return after

    def merge(self, outcomes: list[dict[str, Variable]], node: Node, *, or_before: bool) -> None:
        before = dict(self.script.variables)
        self.script.budget.spend(len(before) // 8 + sum(map(len, outcomes)) // 8)
        every = [*outcomes, before] if or_before else outcomes
        for name in dict.fromkeys(name for outcome in outcomes for name in outcome):
            values = [outcome[name] for outcome in every if name in outcome]
            if len(values) == len(every) and all(value.same(values[0]) for value in values):
                self.script.variables[name] = values[0]
            else:
                same = _shared(values) if len(values) == len(every) else ()
                changed = [value for value in values if name not in before or not value.same(before[name])]
                lines = [line for value in changed for line in _lines_after(value, same)[:1]]
                why = f"{name} is set in a branch (line {', '.join(map(str, lines))}), which may run or not"
                maybe = tuple(word for value in values for word in value.words[len(same) :])
                if name in self.script.given:
                    self.check_given(name, values, lines)
                self.expander.leave_open(name, node, why, maybe)
                if same and name not in self.script.given:
                    rest = self.script.variables[name]
                    self.script.variables[name] = Variable((*same, *rest.words), True, values[0].lines)

    def check_given(self, name: str, values: list[Variable], lines: list[int]) -> None:
        """What --set says that the environment holds must be a value that the script leaves to it."""
        texts = [[text_of(word) for word in value.words] for value in values]
        stated = [text_of(word) for word in self.script.given[name].words]
        if all(None not in text for text in texts) and stated not in texts:
            known = " or ".join(quoted_value(" ".join(filter(None, text))) for text in texts[:3])
            raise Unreadable(
                f"sets {name} itself, to {known} (line {', '.join(map(str, lines))} in a branch), so --set {name} does "
                "not reach the run; say one of these values"
            )

    def command(self, node: Node) -> None:
        words = tuple(self.expander.words(child for child in node.named_children if _is_word(child)))
        if len(words) > 1 and text_of(words[0]) in ("builtin", "command"):
            words = words[1:]
        names = [text_of(word) for word in words]
        if not words:
            self.declare(node)
        elif names[0] in self.functions and self.depth < _DEPTH:
            function = self.functions[names[0] or ""]
            self.among(node, lambda: self.call(*function, words[1:]), only=False)
        elif names[0] in ("source", "."):
            self.script.notes.append((self.at(node), f"{' '.join(map(shown, words))} is another file; not read"))
        elif assigned := assigned_by([name or "" for name in names]):
            for name in assigned:
                self.expander.leave_open(name, node, f"the script sets it by {names[0]} while it runs")
            if None in names:
                self.unresolve(node, f"{' '.join(map(shown, words))} may name any variable")
        elif nested := _nested(words):
            self.among(node, lambda: self.nested(*nested), only=names[0] != "eval")
        else:
            self.among(node, lambda: self.start(words, node), only=False)
        if words and (why := may_set_any(words)):
            self.unresolve(node, why)

    def start(self, words: tuple[Word, ...], node: Node) -> None:
        before = [child for child in node.named_children if child.type == "variable_assignment"]
        own = {name: self.script.variables[name] for name in map(self.named, before) if name in self.script.variables}
        self.script.commands.append(Command((*self.prefix, *words), self.at(node), own))

    def among(self, node: Node, run: Callable[[], None], *, only: bool) -> None:
        """Run with the assignments before a command, ``NAME=value f``, which end with it; ``only``: all it sets."""
        given = [child for child in node.named_children if child.type == "variable_assignment"]
        before = dict(self.script.variables)
        for child in given:
            self.expander.assign(child)
        run()
        for name in [*self.script.variables, *before] if only else map(self.named, given):
            self.script.variables.pop(name, None)
            if name in before:
                self.script.variables[name] = before[name]

    def named(self, assignment: Node) -> str:
        name = assignment.child_by_field_name("name")
        return "" if name is None else self.expander.source_of(name)

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


def _shared(values: list[Variable]) -> tuple[Word, ...]:
    """The words with which all arrays begin: what a branch appends leaves them as they are."""
    same: list[Word] = []
    if all(value.array for value in values):
        for words in zip(*(value.words for value in values), strict=False):
            if text_of(words[0]) is None or any(text_of(word) != text_of(words[0]) for word in words):
                break
            same.append(words[0])
    return tuple(same)


def _lines_after(value: Variable, same: tuple[Word, ...]) -> tuple[int, ...]:
    """Where a value was set, or what it has beyond these words."""
    return next((lines_of(word) for word in value.words[len(same) :]), value.lines) if same else value.lines


def _broken(node: Node) -> Iterator[Node]:
    """The parts that the grammar could not make sense of."""
    if node.is_error or node.is_missing:
        yield node
    elif node.has_error:
        for child in node.children:
            yield from _broken(child)


def _without(word: Word, count: int) -> Word:
    """A word without its first characters, all of which are known."""
    parts: list[Part] = []
    for part in word:
        text = part.text or ""
        cut = min(count, len(text))
        count -= cut
        parts.append(replace(part, text=text[cut:]) if part.text is not None else part)
    return tuple(parts)


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
