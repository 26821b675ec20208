r"""A shell script read without running it: its variables, and the commands that it would start.

Followed are assignments, arrays, ``$NAME``, ``${NAME:-default}``, ``${NAME[@]}``, ``$(( ))``, conditions over known
words, and the text of ``eval`` and ``bash -c``. What any other statement may set is unknown from there on, and
refused where a size needs it: ``rankmesh show --run`` has the answer. The grammar is tree-sitter's; nothing runs.

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankmesh.core.documents import Budget, Unreadable
from rankmesh.errors import cut, extra
from rankmesh.readers.conditions import chosen
from rankmesh.readers.expand import SETS, Expander, Variable
from rankmesh.readers.tokens import Part, Word, gap_of, joined, lines_of, shown, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["Command", "Script", "read_script"]

_DEPTH = 4
# Steps of one script, such as a part of a word that is copied; bytes, open brackets and here-documents of a text, which
# the grammar takes a time for that grows with their square.
_STEPS, SIZE, _OPEN, _HERE = 60_000, 128 << 10, 100, 500
_BRACKETS = re.compile(rb"[(){}]")
_BLOCKS = {"program", "compound_statement", "do_group", "redirected_statement", "negated_command"}
# What they set ends with them.
_SUBSHELLS = {"subshell", "pipeline"}
_LOOPS = {"for_statement", "while_statement", "c_style_for_statement"}
_DECLARATIONS = {"declaration_command", "variable_assignments", "unset_command"}
_REDIRECTS = {"variable_assignment", "file_redirect", "heredoc_redirect", "herestring_redirect", "comment"}
# Commands that set variables by other means than an assignment.
_SETTERS = {"read", "mapfile", "readarray", "getopts", "printf", "source", "."}
_NAME, _ASSIGNED = re.compile(r"[A-Za-z_]\w*"), re.compile(r"\b([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=")
_SETS_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=")
_READS_OTHERS = re.compile(r"(^|[;&|({\s])(source|\.|eval)\s|\b(export|declare|read|unset)\s+[^\n;]*\$")
# What a function has that starts the run.
_STARTS = re.compile(
    r"\b(torchrun|torch\.distributed|[sm]run|mpirun|deepspeed|accelerate|pretrain_)\b|parallel[-_]size"
)
# Files and texts that activate an environment: they are known to set no variable that a run would take a size from.
_ACTIVATES = re.compile(
    r"(source|\.) (\S*/activate|(\S*/)?conda\.sh|\S*/(modules|lmod)/init/\w+)( .*)?"
    r"|eval \"?(\$\(\s*\S*(conda|mamba|micromamba|pyenv|modulecmd)\b.*\)|`\S*(conda|mamba|pyenv)\b.*`)\"?"
)
# What no file sets: arguments, what Slurm sets, and names of our own.
_KEPT = re.compile(r"\d+|@|SLURM_\w+|__part_\w+")


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
    """What was read: the commands in order, the variables at the end, and what was not read.

    ``defaults`` are lines with defaults, ``broken`` texts that are no shell. ``given`` is what --set says that the
    environment holds, ``overruled`` where a branch sets it to other values; ``asked`` are the names that were looked
    up, ``unresolved`` is why any variable may have been set by now.
    """

    budget: Budget = field(default_factory=lambda: Budget(_STEPS))
    commands: list[Command] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    defaults: dict[int, str] = field(default_factory=dict)
    broken: list[tuple[int, str]] = field(default_factory=list)
    given: Mapping[str, Variable] = field(default_factory=dict)
    overruled: list[tuple[str, list[Variable], list[int]]] = field(default_factory=list)
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
    _Reader(script, source, lambda offset: (bisect_right(starts, offset),), 0).run()
    return script


@dataclass(eq=False)
class _Reader:
    """Walks one text; a nested text (``eval``) has a reader of its own over the same variables."""

    script: Script
    source: bytes
    lines: Callable[[int], tuple[int, ...]]
    depth: int
    prefix: tuple[Word, ...] = ()
    ended: bool = False

    def __post_init__(self) -> None:
        self.expander = Expander(self.source, self.lines, self.script)
        self.functions: dict[str, Node] = {}

    def run(self) -> None:
        with extra("configs"):
            import tree_sitter_bash
            from tree_sitter import Language, Parser

        self.check()
        root = Parser(Language(tree_sitter_bash.language())).parse(self.source).root_node
        self.block(root.named_children)
        self.script.broken += [(self.at(node), self.text(node)) for node in _broken(root)]

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

    def block(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if not self.ended:
                self.statement(node)

    def statement(self, node: Node) -> None:
        self.script.budget.spend()
        if node.type == "compound_statement" and self.text(node).startswith("(("):
            self.arithmetic(node)
        elif node.type in _BLOCKS:
            self.block(node.named_children)
        elif node.type in _SUBSHELLS:
            before = self.script.unresolved
            for child in node.named_children:
                self.outcome([child])
            self.script.unresolved = before
        elif node.type in ("if_statement", "case_statement"):
            self.branches(node)
        elif node.type in _LOOPS:
            self.loop(node)
        elif node.type == "list":
            self.chain(node)
        elif node.type == "variable_assignment":
            self.expander.assign(node)
        elif node.type in _DECLARATIONS:
            self.declare(node)
        elif node.type == "function_definition" and (name := node.child_by_field_name("name")) is not None:
            self.functions[self.text(name)] = node
        elif node.type == "command":
            self.command(node)
        elif node.type == "test_command":
            # Whether each of its words is read depends on those before it.
            self.opaque(node, " ".join(_SETS_DEFAULT.findall(self.text(node))), "a condition gives it a default")

    def declare(self, node: Node) -> None:
        """``export NAME=value`` and ``unset NAME``; of other words the names may be unknown."""
        for child in node.named_children:
            if child.type == "variable_assignment":
                self.expander.assign(child)
            elif node.type == "unset_command" and child.type in ("variable_name", "word"):
                self.script.variables.pop(self.text(child), None)
            elif named := re.match(r"[\"']?(\w+)=", self.text(child)):
                self.leave_open(named[1], child, f"{cut(self.text(node))} is not followed")
            elif child.type not in ("variable_name", "word", "number"):
                self.unresolve(node, f"{cut(self.text(node))} may name any variable")

    def unresolve(self, node: Node, why: str) -> None:
        """Another text may have set any variable: what was known is open, what is not yet set is no default."""
        self.script.unresolved = f"{why} (line {self.at(node)})"
        self.script.budget.spend(len(self.script.variables))
        for name in [name for name in self.script.variables if _KEPT.fullmatch(name) is None]:
            self.leave_open(name, node, f"{name} may be set anew: {self.script.unresolved}")

    def leave_open(self, name: str, node: Node, why: str, maybe: tuple[Word, ...] = ()) -> None:
        before = self.script.variables.get(name)
        self.expander.leave_open(name, node, why, (*(before.words if before else ()), *maybe))

    def opaque(self, node: Node, text: str, why: str) -> None:
        """What a statement may set that is not followed: each variable that its text names, any if it reads others."""
        if _READS_OTHERS.search(text):
            self.unresolve(node, why)
        line = self.at(node)
        for name in dict.fromkeys(_NAME.findall(text)):
            self.leave_open(name, node, f"{name} may be set anew: {why} (line {line})", ((Part(text, (line,)),),))

    def arithmetic(self, node: Node) -> None:
        names = " ".join(first or second for first, second in SETS.findall(self.text(node)))
        self.opaque(node, names, "arithmetic is not followed")

    def branches(self, node: Node) -> None:
        """Each branch that may run starts from the same variables; what they leave different is open afterwards."""
        bodies, certain, decided_by = chosen(node, self.expander, self.block)
        self.script.notes += [(line, text) for line, text in decided_by if (line, text) not in self.script.notes]
        if certain and len(bodies) == 1:
            self.block(bodies[0])
        elif bodies:
            self.merge([self.outcome(body) for body in bodies], node, or_before=not certain)

    def loop(self, node: Node) -> None:
        """A body that runs any number of times: what it sets is open in it, and after it."""
        variable = node.child_by_field_name("variable")
        names = [self.text(variable)] if variable is not None else []
        self.opaque(node, " ".join([*names, *_ASSIGNED.findall(self.text(node))]), "a loop sets it")
        if node.type == "c_style_for_statement":
            self.arithmetic(node)
        self.merge([self.outcome(node.named_children)], node, or_before=True)

    def chain(self, node: Node) -> None:
        """``left && right``: the right side may not run."""
        bodies, certain, _ = chosen(node, self.expander, self.block)
        if certain:
            self.block(bodies[0] if bodies else [])
        else:
            self.merge([self.outcome(body) for body in bodies], node, or_before=True)

    def outcome(self, body: Iterable[Node]) -> dict[str, Variable] | None:
        """The variables after these statements; None where they end the script."""
        before = dict(self.script.variables)
        self.script.budget.spend(len(before) // 8)
        self.block(body)
        after, ended = dict(self.script.variables), self.ended
        self.ended = False
        self.script.variables.clear()
        self.script.variables.update(before)
        return None if ended else after

    def merge(self, outcomes: list[dict[str, Variable] | None], node: Node, *, or_before: bool) -> None:
        before = dict(self.script.variables)
        every = [outcome for outcome in (*outcomes, before if or_before else None) if outcome is not None]
        self.ended = not every
        self.script.budget.spend(len(before) // 8 + sum(map(len, every)) // 8)
        for name in dict.fromkeys(name for outcome in every for name in outcome):
            values = [outcome[name] for outcome in every if name in outcome]
            if len(values) == len(every) and all(value.same(values[0]) for value in values):
                self.script.variables[name] = values[0]
            else:
                self.differ(name, values, before.get(name), node, complete=len(values) == len(every))

    def differ(self, name: str, values: list[Variable], before: Variable | None, node: Node, *, complete: bool) -> None:
        """A variable of several values: what all begin with is known, the rest is open."""
        shared, rests = _shared(values) if complete else ((), [value.words for value in values])
        changed = [place for place, value in enumerate(values) if before is None or not value.same(before)]
        lines = [_first(rests[place]) or values[place].lines[0] for place in changed if values[place].lines]
        why = f"{name} is set in a branch (line {', '.join(map(str, lines))}), which may run or not"
        if name in self.script.given:
            self.script.overruled.append((name, values, lines))
        self.expander.leave_open(name, node, why, tuple(word for rest in rests for word in rest))
        if shared and name not in self.script.given:
            (rest,) = self.script.variables[name].words
            array = values[0].array
            words = (*shared, rest) if array else ((*shared[0], *rest),)
            self.script.variables[name] = Variable(words, array, values[0].lines)

    def command(self, node: Node) -> None:
        words = tuple(self.expander.words(child for child in node.named_children if child.type not in _REDIRECTS))
        if len(words) > 1 and text_of(words[0]) in ("builtin", "command"):
            words = words[1:]
        name, text = text_of(words[0]) if words else None, self.text(node)
        if not words:
            self.declare(node)
        elif name in ("exit", "return") and not self.depth:
            self.ended = True
        elif name in self.functions:
            self.call(node, name or "", self.text(self.functions[name or ""]))
        elif nested := _nested(words):
            self.among(node, lambda: self.nested(*nested), only=name != "eval")
        elif name == "let":
            self.arithmetic(node)
        elif name in _SETTERS and not _ACTIVATES.fullmatch(text) and (name != "printf" or "-v" in text):
            self.opaque(node, text, f"{cut(text)} is not followed")
            if any(map(gap_of, words)):
                self.unresolve(node, f"{cut(text)} may name any variable")
        else:
            self.among(node, lambda: self.start(node, words), only=True)
        if name == "eval" and any(map(gap_of, words)) and not _ACTIVATES.fullmatch(text):
            self.unresolve(node, f"{cut(text)} runs a text that is not in this file")
        if name in ("source", "."):
            self.script.notes.append((self.at(node), f"{cut(text)} is another file; not read"))

    def call(self, node: Node, name: str, body: str) -> None:
        """A function is not followed: what its text names may be set anew, and a run that it starts is refused."""
        if _STARTS.search(body):
            raise Unreadable(f"starts the run in the function {name}, which is not followed (line {self.at(node)})")
        self.opaque(node, body, f"the function {name} is called, which is not followed")

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

    def start(self, node: Node, words: tuple[Word, ...]) -> None:
        names = [self.named(child) for child in node.named_children if child.type == "variable_assignment"]
        assigned = {name: self.script.variables[name] for name in names if name in self.script.variables}
        self.script.commands.append(Command((*self.prefix, *words), self.at(node), assigned))

    def named(self, assignment: Node) -> str:
        name = assignment.child_by_field_name("name")
        return "" if name is None else self.text(name)

    def nested(self, prefix: tuple[Word, ...], text: Word) -> None:
        """Read the text that ``eval`` or ``bash -c`` would run; unknown parts get names of their own."""
        source, starts, parts = b"", [], []
        for number, part in enumerate(text):
            starts.append(len(source))
            parts.append(part)
            name = f"__part_{self.depth}_{number}"
            if part.text is None:
                self.script.variables[name] = Variable(((part,),), False, part.lines)
            source += (f"${{{name}}}" if part.text is None else part.text).encode()
        if self.depth < _DEPTH:
            lines = lambda offset: parts[bisect_right(starts, offset) - 1].lines  # noqa: E731
            _Reader(self.script, source, lines, self.depth + 1, (*self.prefix, *prefix)).run()

    def text(self, node: Node) -> str:
        return self.expander.source_of(node)

    def at(self, node: Node) -> int:
        return self.lines(node.start_byte)[0]


def _shared(values: list[Variable]) -> tuple[tuple[Word, ...], list[tuple[Word, ...]]]:
    """What all values begin with, the words of arrays or the parts of texts, and what each has beyond it."""
    if len({value.array for value in values}) > 1 or any(not value.words for value in values):
        return (), [value.words for value in values]
    array = values[0].array
    pieces = [value.words if array else tuple((part,) for part in value.words[0]) for value in values]
    count = 0
    for each in zip(*pieces, strict=False):
        if text_of(each[0]) is None or any(text_of(word) != text_of(each[0]) for word in each):
            break
        count += 1
    rests = [piece[count:] for piece in pieces]
    same = pieces[0][:count]
    if array or not same:
        return same, rests
    # A text is shared up to a space, so that what follows is no part of its last word.
    text = tuple(part for word in same for part in word)
    after = ["".join(part.text or "?" for word in rest for part in word) for rest in rests]
    if not (text[-1].text or "").endswith((" ", "\n", "\t")) and any(rest[:1].strip() for rest in after):
        return (), [value.words for value in values]
    return ((*text, Part(" ", text[-1].lines)),), rests


def _first(words: Iterable[Word]) -> int:
    return next((line for word in words for line in lines_of(word)), 0)


def _broken(node: Node) -> Iterator[Node]:
    """The parts that the grammar could not make sense of."""
    if node.is_error or node.is_missing:
        yield node
    elif node.has_error:
        for child in node.children:
            yield from _broken(child)


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
