r"""A launch script, read without running it: the variables that plain lines set, and the commands.

Read are assignments, arrays and appends, ``$NAME``, ``${NAME:-default}``, ``${NAME[@]}`` and ``$(( ))``. A name that a
branch, a loop, a function, a pipeline or a command such as ``read`` sets anywhere in the script is unknown, and after
``source`` and ``eval`` so is every name. ``rankmesh show --run`` has the answer, because bash then runs the script.

>>> script = read_script("TP=4\nARGS=(--tp $TP)\nif x; then N=2; fi\ntorchrun ${ARGS[@]} $N a.py")
>>> print(script.commands[-1])
torchrun --tp 4 $N a.py
>>> script.commands[-1].words[3][0].why
'N is set in a branch, loop or function (line 3)'
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NoReturn

from rankmesh.core.documents import Budget, Unreadable
from rankmesh.errors import cut
from rankmesh.readers.tokens import BREAK, Part, Word, fields, gap_of, lines_of, number, shown, text_of

__all__ = ["TAKEN", "TEXT", "Command", "Script", "Variable", "read_script"]

# Parts that one script expands to, characters, brackets inside of each other.
_STEPS, _SIZE, _NESTED = 60_000, 128 << 10, 50
_SPACE = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_OPERATOR = re.compile(r"(?![<>]\()(?:\d+(?=[<>]))?(<<<|<<-?|<>|<&|>&|>>|>\||<|>|&>>?|;;&|;&|;;|&&|\|\||\|&|[;&|()\n])")
# What is not a sign in a word, between double quotes, in braces without and with quotes around them, in brackets.
_PLAIN = {
    end: re.compile(f"[^{signs}]+")
    for end, signs in {
        "": r" \t\n\\'\"`$|&;()<>",
        '"': r'"\\$`\n',
        "}": r"}'\"\\$`\n",
        '}"': r'}"\\$`\n',
        ")": r")('\"\\$`#\n",
    }.items()
}
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*|[0-9@*#?$!-])|\{(\w+)(?:\[([@*])\])?\}|\{([A-Za-z_]\w*)(:?-))")
# Texts in backquotes, and with escapes.
_OTHER = re.compile(r"`(?:[^`\\]|\\.)*`|\$'(?:[^'\\]|\\.)*'|\$\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^]\n]*\])?(\+?)=")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([\w.:-]+)[ \t]*\([ \t]*\)|function[ \t]+([\w.:-]+)")
_CONDITION_END = re.compile(r"\s\]\](?=[\s;&|)]|$)")
_HOME = re.compile(r"(^|:)~")
_UNBALANCED = re.compile(r"\bcase\b|(?<!<)<<(?!<)")
_NAMES, _SETS = re.compile(r"(?<![\w$])[A-Za-z_]\w*"), re.compile(r"(?<![=!<>])=(?!=)|(<<|>>)=|\+\+|--")
# What sets a variable in an expansion, and in a condition.
_DEFAULTED = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[^]\n]*\])?:?=")
_IN_CONDITION = re.compile(r"([A-Za-z_]\w*)(?:=(?![=~])|\+\+|--)")
# What a launcher takes from its environment; the last are of torchtitan's run_train.sh.
TAKEN = (
    "WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "NPROC_PER_NODE", "NNODES", "PET_NPROC_PER_NODE", "PET_NNODES",
    "NGPU", "NNODE", "CONFIG_FILE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip

_OPENS, _LOOPS = {"if", "case", "for", "select", "while", "until", "{"}, {"for", "select", "while", "until"}
_CLOSES = {"fi": {"if"}, "esac": {"case"}, "}": {"{"}, "done": _LOOPS}
_RESERVED = {*_OPENS, *_CLOSES, "then", "else", "elif", "do", "!", "time"}
_CONNECTS = {"&&", "||", "|", "|&"}
_DECLARES = {"export", "declare", "typeset", "readonly", "local", "unset"}
_SETTERS, _ANYTHING = {"read", "mapfile", "readarray", "getopts", "let", "printf"}, {"source", ".", "eval", "trap"}
# Files and texts that activate an environment, and traps of the end: they set no variable that a run takes a size from.
_ACTIVATES = re.compile(
    r"(source|\.) (\S*/activate|(\S*/)?conda\.sh|\S*/(modules|lmod)/init/\w+)( .*)?|trap .* (EXIT|INT|TERM|0|-)"
    r"|eval (\$\(\s*\S*(conda|mamba|micromamba|pyenv|modulecmd)\b.*\)|`\S*(conda|mamba|pyenv)\b.*`)",
    re.DOTALL,
)
_SHELL = re.compile(r"(?:.* )?(\S*/)?(bash|sh) -\w*c .*", re.DOTALL)
TEXT = "the text of"


@dataclass(frozen=True)
class Variable:
    """A variable: one word, or the words of an array; ``lines`` where it was set."""

    words: tuple[Word, ...]
    array: bool
    lines: tuple[int, ...]


@dataclass(frozen=True)
class Command:
    """A command that the script would start, its words expanded, and the variables that it finds.

    ``within``: the function or the text that it may be in, where it does not run as written.
    """

    words: tuple[Word, ...]
    line: int
    variables: Mapping[str, Variable] = field(default_factory=dict)
    within: str = ""

    def variable(self, name: str) -> tuple[Word, int]:
        """Return the value of a variable, its first word if it is an array, and its line; an empty word if unset."""
        found = self.variables.get(name) or Variable((), False, ())
        return found.words[0] if found.words else (), (*found.lines, self.line)[0]

    def __str__(self) -> str:
        return " ".join(map(shown, self.words))


@dataclass(frozen=True)
class _Assignment:
    """A variable with its value, which may be appended to what it has."""

    name: str
    appends: bool
    value: Variable


@dataclass
class Script:
    """The variables and the commands of a script.

    ``variables`` are what it ends with, ``asked`` the names that it uses, ``texts`` what it writes, by places, each
    with its line; ``given`` are the variables of --set, ``defaults`` are the lines with defaults.
    """

    given: Mapping[str, Variable]
    variables: dict[str, Variable]
    commands: list[Command] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    texts: dict[int, tuple[int, str]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    defaults: dict[int, str] = field(default_factory=dict)


def read_script(
    text: str,
    known: Mapping[str, Variable] | None = None,
    given: Mapping[str, str] | None = None,
    starts: Sequence[int] = (),
) -> Script:
    """Read a script; ``known`` are variables that it finds set, ``given`` are given with --set.

    ``starts`` are the places in the text at which the lines of its file begin, for a text inside of another file.
    """
    if len(text) > _SIZE:
        raise Unreadable(f"is longer than {_SIZE >> 10} KiB")
    preset = {name: Variable(((Part(value, ()),),), False, ()) for name, value in (given or {}).items()}
    unresolved: dict[str, str] = {}
    while True:  # until no further name turns out to be unknown
        reader = _Reader(text, Script(preset, {**(known or {}), **preset}), dict(unresolved), starts)
        reader.run()
        if reader.unresolved.keys() == unresolved.keys():
            return reader.script
        unresolved = reader.unresolved


class _Reader:
    """Go through a text once. ``unresolved``: why a name is unknown, by names; the empty name means all names."""

    def __init__(self, text: str, script: Script, unresolved: dict[str, str], starts: Sequence[int]) -> None:
        self.text, self.script, self.unresolved, self.at, self.depth = text, script, unresolved, 0, 0
        self.starts = starts or [0, *(found.end() for found in re.finditer("\n", text))]
        self.budget = Budget(_STEPS)
        self.open: list[str] = []
        self.functions: set[str] = set()
        self.fixed: set[str] = set()
        self.documents: list[tuple[str, bool]] = []
        self.after = self.anything = ""
        for found in _DEFAULTED.finditer(text):
            self.leave_open([found[1]], found.start(), "is set inside of an expansion")

    def line(self, at: int) -> int:
        return bisect_right(self.starts, at)

    def leave_open(self, names: Iterable[str], at: int, why: str = "is set in a branch, loop or function") -> None:
        for name in names:
            self.unresolved.setdefault(name, f"{name or 'any variable'} {why} (line {self.line(at)})")

    def lost(self, what: str, at: int) -> NoReturn:
        raise Unreadable(f"is not read as shell: {what} (line {self.line(at)})")

    # -- commands -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while self.skip() < len(self.text):
            start, operator = self.at, _OPERATOR.match(self.text, self.at)
            word = _PLAIN[""].match(self.text, start)
            if self.text.startswith("((", start):
                inside, self.after = self.text[start : self.closing(start)], ""
                self.leave_open(_NAMES.findall(inside) if _SETS.search(inside) else [], start)
            elif word and word[0] == "[[":
                end = _CONDITION_END.search(self.text, start) or self.lost("a condition does not end", start)
                self.at, self.after = end.end(), ""
                self.leave_open(_IN_CONDITION.findall(self.text[start : self.at]), start)
            elif operator:
                self.operator(operator)
            elif function := _FUNCTION.match(self.text, start):
                self.at = function.end()
                self.functions.add(function[1] or function[2])
            elif word and word[0] in _RESERVED:
                self.reserved(word[0], start)
            else:
                self.command()
        if self.open:
            self.lost(f"{self.open[-1]} does not end", self.at)

    def skip(self) -> int:
        """Pass blanks and comments; return the place after them."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        return self.at

    def operator(self, operator: re.Match[str]) -> None:
        """Pass an operator, with the word of a redirection."""
        start, sign, self.at = self.at, operator[1], operator.end()
        if sign.startswith(("<", ">", "&>")):
            self.skip()
            word = self.word()
            if not word:
                self.lost("a redirection has no file", start)
            if sign in ("<<", "<<-"):
                self.documents.append((shown(word), sign == "<<-"))
            return
        if sign == "(" or (sign == ")" and self.open[-1:] == ["("]):
            self.open = [*self.open, "("] if sign == "(" else self.open[:-1]
        elif sign == ")" and "case" not in self.open:
            self.lost("a bracket closes nothing", start)
        while sign == "\n" and self.documents:
            self.document(*self.documents.pop(0))
        if sign != "\n" or self.after not in _CONNECTS:
            self.after = sign

    def document(self, end: str, indented: bool) -> None:
        """Pass a here-document, up to the line that ends it."""
        pattern = ("^\t*" if indented else "^") + re.escape(end) + "$"
        found = re.compile(pattern, re.MULTILINE).search(self.text, self.at)
        start, self.at = self.at, found.end() if found else len(self.text)
        text = self.literal(self.text[start : self.at], start).text or ""
        self.leave_open(_IN_CONDITION.findall(text) if "$((" in text else [], start)

    def reserved(self, word: str, start: int) -> None:
        """Pass a word of a compound command; of ``for`` with the name, of ``case`` with all up to ``in``."""
        self.at, self.after = start + len(word), ""
        if word in _OPENS:
            self.open.append(word)
            if word in ("for", "select") and (name := _NAMES.match(self.text, self.skip())):
                self.leave_open([name[0]], start)
            while word == "case" and self.skip() < len(self.text) and (found := self.word()) and shown(found) != "in":
                pass
        elif word in _CLOSES and not {*self.open[-1:]} & _CLOSES[word]:
            self.lost(f"{word} closes nothing", start)
        elif word in _CLOSES:
            self.open.pop()

    def command(self) -> None:
        """Read one command without others inside: assignments, or words with assignments before them."""
        start, words, variables = self.at, list[Word](), self.script.variables
        given: list[_Assignment] = []
        declared: list[_Assignment] = []
        before: dict[str, Variable | None] = {}
        taken: dict[str, Variable] | None = None
        while self.skip() < len(self.text):
            operator = _OPERATOR.match(self.text, self.at)
            if operator and not operator[1].startswith(("<", ">", "&>")):
                break
            if operator:
                self.operator(operator)
            elif taken is None and (found := self.assignment()):
                given.append(found)
                before.setdefault(found.name, variables.get(found.name))
                self.set(found)
            elif words and text_of(words[0]) in _DECLARES and (found := self.assignment()):
                declared.append(found)
            else:
                if taken is None:  # what was assigned is for this command only, and its words do not have it
                    taken = {name: variables[name] for name in TAKEN if name in variables}
                    variables |= {name: value for name, value in before.items() if value is not None}
                    for name in [name for name, value in before.items() if value is None]:
                        variables.pop(name, None)
                words += fields(self.word())
        end = _OPERATOR.match(self.text, self.at)
        plain = not self.open and self.after not in _CONNECTS and (end is None or end[1] in (";", "\n"))
        self.after = ""
        if end and end[1] == "(":
            self.lost("a bracket opens after a word", self.at)
        if any(found.name == "IFS" for found in (*declared, *(() if words else given))):
            raise Unreadable(f"sets IFS, by which words end (line {self.line(start)})")
        if not words:
            self.leave_open([] if plain and taken is None else [found.name for found in given], start)
            return
        while len(words) > 1 and text_of(words[0]) in ("builtin", "command", "nohup"):
            del words[0]
        if text_of(words[0]) in _DECLARES:
            self.declare(words, declared, start, plain=plain)
        elif text_of(words[0]) not in self.functions:
            self.perform(words, taken or {}, start, plain=plain)

    def perform(self, words: list[Word], variables: Mapping[str, Variable], start: int, *, plain: bool) -> None:
        """Keep a command, and do what it does to variables."""
        name, text, within = text_of(words[0]), " ".join(map(shown, words)), ""
        if name in _SETTERS and (name != "printf" or "-v" in text):
            names = [""] if any(map(gap_of, words)) else _NAMES.findall(text.partition(" ")[2])
            self.leave_open(names, start, f"is set by {cut(text)}")
        elif name in _ANYTHING and not _ACTIVATES.fullmatch(text):
            if name in ("source", "."):
                self.script.notes.append((self.line(start), f"{cut(text)} is another file; not read"))
            self.forget(f"{cut(text)} is not read", start, plain=plain)
            within = f"{TEXT} {name}"
        elif _SHELL.fullmatch(text):
            within = f"{TEXT} bash -c"
        elif (gap := gap_of(words[0])) and gap.runs and gap.shown[:1] in "$`":
            self.forget(f"{cut(text)} may be any command", start, plain=plain)
        elif plain and (name in ("exit", "return") or (name == "exec" and len(words) > 1)):
            self.at = len(self.text)
        within = within or ("a function" if self.functions and self.open else "")
        self.script.commands.append(Command(tuple(words), self.line(start), variables, within))

    def declare(self, words: list[Word], declared: list[_Assignment], start: int, *, plain: bool) -> None:
        """Set what ``export NAME=value`` sets, drop what ``unset NAME`` drops; other options make all names unknown."""
        command, *names = (text_of(word) or "" for word in words)
        options = {letter for name in names for letter in name if name.startswith("-")}
        names = [name for name in names if not name.startswith("-")]
        changed = [found.name for found in declared] + (names if command == "unset" else [])
        if not options <= set("-xrgafpv") or not all(map(_NAMES.fullmatch, names)):
            self.leave_open(["", *changed], start, f"is set by {cut(' '.join(map(shown, words)))}")
        elif not plain or command == "local" or ("a" in options and not all(found.value.array for found in declared)):
            self.leave_open(changed, start)
        elif "f" not in options:
            for found in declared:
                self.set(found)
            for name in names if command == "unset" else ():
                self.script.variables.pop(name, None)
        if command == "readonly" or "r" in options:
            self.fixed |= {*changed, *names}

    def forget(self, why: str, start: int, *, plain: bool) -> None:
        """Drop all variables, since any may have been set: until the script sets them, or for good."""
        self.leave_open([] if plain else [""], start, f"may be set: {why}")
        self.anything = f"{why} (line {self.line(start)})"
        kept = {name: value for name, value in self.script.variables.items() if name.startswith("SLURM_")}
        self.script.variables = kept

    def assignment(self) -> _Assignment | None:
        """Read ``NAME=value`` or ``NAME=( ... )``, or return None; a name with an element that is set is unknown."""
        start, found = self.at, _ASSIGNED.match(self.text, self.at)
        if found is None:
            return None
        self.leave_open([found[1]] if found[2] else [], start, "is set by its elements")
        self.at, lines, words = found.end(), (self.line(start),), list[Word]()
        if not self.text.startswith("(", self.at):
            word = self.word() or (Part("", lines),)
            if any(part.bare and not part.split and _HOME.search(part.text or "") for part in word):
                word = self.gap(start, "~ is a folder of the user")
            word = tuple(
                part._replace(text=" " if part.text == BREAK else part.text, split=False)
                if part.split or part.text == BREAK
                else part
                for part in word
            )
            return _Assignment(found[1], bool(found[3]), Variable((word,), False, lines))
        self.at += 1
        while (sign := self.text[self.skip() : self.at + 1]) != ")":
            if not sign or (sign != "\n" and _OPERATOR.match(self.text, self.at)):
                self.lost("an array does not end", start)
            words += fields(self.word()) if sign != "\n" else ()
            self.at += sign == "\n"
        self.at += 1
        return _Assignment(found[1], bool(found[3]), Variable(tuple(words), True, lines))

    def set(self, given: _Assignment) -> None:
        """Give a variable its value; a plain value goes to the first element of an array."""
        made, before = given.value, self.script.variables.get(given.name)
        self.leave_open([given.name] if given.name in self.fixed else [], self.at, "is set again, but read-only")
        if before is None and given.appends and self.anything:
            what = self.gap(self.at, f"{given.name} may be set by now: {self.anything}", elsewhere=True)
            before = Variable((what,), made.array, made.lines)
        if before is not None and (given.appends or (before.array and not made.array)):
            self.budget.spend(len(before.words) + sum(map(len, before.words[:1])))
            first, lines = before.words[0] if before.words else (), before.lines if given.appends else made.lines
            if made.array:
                made = Variable((*before.words, *made.words), True, lines)
            elif before.array and gap_of(first):
                made = Variable((self.gap(self.at, f"{given.name} has an unknown first element"),), True, lines)
            else:
                word = (*first, *made.words[0]) if given.appends else made.words[0]
                made = Variable((word, *before.words[1:]), before.array, lines)
        self.script.variables[given.name] = made

    # -- words --------------------------------------------------------------------------------------------------------

    def word(self) -> Word:
        """Return one written word as parts, before it is cut at spaces."""
        parts = tuple(self.parts(""))
        self.budget.spend(1 + len(parts) + sum(len(part.text or "") for part in parts) // 64)
        return parts

    def parts(self, end: str, stop: int | None = None) -> list[Part]:
        """Return the parts up to the sign that ends a word, quotes, braces or brackets, or up to a place."""
        parts, quoted, opening = list[Part](), end.endswith('"'), self.at
        self.depth += 1
        if self.depth > _NESTED:
            raise Unreadable(f"opens more than {_NESTED} brackets, one inside the other")
        while self.at != stop:
            start, sign = self.at, self.text[self.at : self.at + 1]
            plain = _PLAIN[end].match(self.text, start, stop or len(self.text))
            if not sign and end:
                self.lost(f"a {end[0]} is missing", opening)
            if (end and sign == end[0] and stop is None) or not sign:
                break
            self.at += 1
            if plain:
                self.at = plain.end()
                parts.append(self.literal(plain[0], start, bare=not quoted))
            elif sign == "\\":
                self.at += 1
                escaped = self.text[start + 1 : start + 2]
                if escaped != "\n":
                    kept = quoted and escaped not in '$`"\\'
                    parts.append(self.literal(f"\\{escaped}" if kept or not escaped else escaped, start))
            elif sign == "'" and not quoted:
                self.at = self.text.find("'", self.at) + 1 or self.lost("a quote does not end", start)
                lines = self.text[start + 1 : self.at - 1].splitlines(keepends=True)
                parts += map(self.literal, lines or [""], accumulate(map(len, lines[:-1]), initial=start + 1))
            elif sign == '"' and stop is None:
                inside = self.parts('"')
                self.at += 1
                parts += inside or (() if "[@]}" in self.text[start : self.at] else (self.literal("", start),))
            elif sign in "$`":
                self.at = start
                parts += self.dollar(quoted=quoted)
            elif self.text.startswith(("<(", ">("), start) and not end:
                self.at = self.closing(start + 1)
                parts += self.gap(start, "is the output of a command", elsewhere=True)
            elif not end:
                self.at = start
                break
            elif sign == "(":
                self.parts(")")
                self.at += 1
            elif sign == "#" and self.text[start - 1].isspace():
                self.at = self.text.find("\n", start) % (len(self.text) + 1)
            else:
                parts.append(self.literal(sign, start, bare=not quoted))
        self.depth -= 1
        return parts

    def literal(self, text: str, start: int, *, bare: bool = False) -> Part:
        self.script.texts[start] = (self.line(start), text)
        return Part(text, (self.line(start),), start, bare)

    def gap(self, start: int, why: str, *, runs: bool = True, elsewhere: bool = False) -> Word:
        """Return an unknown part: the text from a place to here."""
        written = self.text[start : self.at]
        why = f"{cut(written)} {why}" if why.startswith("is ") else why
        return (Part(None, (self.line(start),), bare=True, shown=written, why=why, runs=runs, elsewhere=elsewhere),)

    def closing(self, opening: int) -> int:
        """Pass the brackets that open at a place; return the place after them."""
        self.at = opening + 1
        self.parts(")")
        self.at += 1
        if self.text[opening + 1] != "(" and _UNBALANCED.search(self.text, opening, self.at):
            raise Unreadable(f"has a case or a here-document inside of brackets (line {self.line(opening)})")
        return self.at

    def dollar(self, *, quoted: bool) -> Word:
        """Return the value of an expansion."""
        start, found, other = self.at, _NAME.match(self.text, self.at), _OTHER.match(self.text, self.at)
        if found:
            self.at, default = found.end(), list[Part]()
            if found[4]:
                default = self.parts('}"' if quoted else "}") or [Part("", (self.line(start),), bare=not quoted)]
                self.at += 1
            word = self.value(found[1] or found[2] or found[4], found[3] or found[5] or "", start, quoted=quoted)
            if word is None:
                unset = found[4] not in self.script.variables
                return tuple(
                    part._replace(default=part.default or unset, split=part.split or part.bare) for part in default
                )
        elif self.text.startswith("$(", start):
            self.closing(start + 1)
            summed = self.text.startswith("$((", start) and self.text.startswith("))", self.at - 2)
            word = self.sum(start, self.at) if summed else self.gap(start, "is the output of a command", elsewhere=True)
        elif self.text.startswith("${", start):
            self.at += 2
            self.parts('}"' if quoted else "}")
            self.at += 1
            word = self.gap(start, "is more than a variable")
        elif other and not (quoted and other[0].startswith(("$'", '$"'))):
            self.at = other.end()
            what = "is the output of a command" if other[0][0] == "`" else "is not read"
            word = self.gap(start, what, elsewhere=True)
        elif self.text.startswith(("`", "$["), start):
            self.lost("a ` has no end, or $[ stands for $((", start)
        else:
            self.at += 1
            word = (self.literal("$", start),) if quoted else self.gap(start, "is not read")
        bare = not quoted
        return tuple(part if part.bare == part.split == bare else part._replace(bare=bare, split=bare) for part in word)

    def value(self, name: str, operator: str, start: int, *, quoted: bool = True) -> Word | None:
        """Return the value of a variable, or its elements; None where the written default counts."""
        self.script.asked.add(name)
        found = self.script.variables.get(name)
        words = found.words if found else ()
        empty = not words or (operator == ":-" and all(part.text == "" for part in words[0]))
        if why := self.unresolved.get(name) or self.unresolved.get(""):
            return self.gap(start, why, elsewhere=name not in self.unresolved)
        if found is None and self.anything and name.isidentifier():
            return self.gap(start, f"{name} may be set by now: {self.anything}", elsewhere=True)
        if operator in (":-", "-") and empty:
            if found is None:
                text = f"{self.text[start : self.at]} is read as its default; the environment may say otherwise"
                self.script.defaults[self.line(start)] = text
            return None
        if found is None:
            why = f"the variable {name} has no value in this file"
            why = why if name.isidentifier() else "the arguments of the script are not known here"
            return self.gap(start, why, runs=False)
        if operator not in ("@", "*"):
            return words[0] if words else (Part("", ()),)
        if self.anything and not found.array:
            return self.gap(start, f"{name} may have more elements: {self.anything}")
        between = Part(BREAK if quoted and operator == "@" else " ", found.lines)
        parts = [part for word in words for part in (between, *word)][1:]
        return tuple(parts) or ((Part("", ()),) if operator == "*" else ())

    def sum(self, start: int, end: int) -> Word:
        """Return the value of ``$(( ))`` over whole numbers."""
        self.at = start + 3
        used = [Part("", (self.line(start),)), *self.parts('"', end - 2)]
        self.at, text = end, shown(tuple(used))
        self.leave_open(_NAMES.findall(text) if _SETS.search(text) else [], start, "is set inside of an expansion")
        words = {name: self.value(name, "", start) or () for name in _NAMES.findall(text)}
        used += (part for word in words.values() for part in word)
        gap = gap_of(tuple(used))
        made = None if gap else number(_NAMES.sub(lambda found: f"({shown(words[found[0]])})", text))
        if made is None:
            return (gap._replace(shown=self.text[start:end]),) if gap else self.gap(start, "is not read")
        return (Part(str(made), lines_of(tuple(used)), default=any(part.default for part in used)),)
