"""Words of a shell script, each part with the line it was written on.

A word is a tuple of parts. A part with a text of None is unknown: a variable that the script never sets, its arguments,
or what only bash finds out.

>>> [text_of(field) for field in fields((Part("--tp 4", (1,), bare=True, split=True),))]
['--tp', '4']
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rankmesh.errors import cut

__all__ = [
    "BREAK",
    "Missing",
    "Part",
    "Word",
    "fields",
    "gap_of",
    "line_of",
    "lines_of",
    "number",
    "shown",
    "text_of",
    "value_of",
]

# Between the elements of an array; no text of a script holds it.
BREAK = "\0"
_SPACES = re.compile(r"([ \t\n]+)")
# What bash makes other words of, outside of quotes.
_MATCHES = re.compile(r"[*?]|^\{\w+\}$|(^|[=:])~")
_SIGNS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    ast.Mod: lambda left, right: left - right * _SIGNS[ast.Div](left, right),
}


@dataclass(frozen=True)
class Missing:
    """A value that the file leaves open: ``text`` as written, ``why`` it is unknown; ``runs``: only a run gives it."""

    text: str
    why: str
    runs: bool = False

    def __str__(self) -> str:
        return self.text


class Part(NamedTuple):
    """Some characters of a word.

    ``lines``      where they were written, first the line that matters most; ``at``: the place of a text
    ``bare``       no quotes are around them; ``split``: they are of an expansion, so spaces end the word
    ``shown``      how an unknown part is written, such as ``$TP``; ``why`` it is unknown; ``runs``: only bash knows it
    ``elsewhere``  it is from another file or command
    ``default``    it is the default of a variable that the environment may set
    """

    text: str | None
    lines: tuple[int, ...]
    at: int = -1
    bare: bool = False
    split: bool = False
    shown: str = ""
    why: str = ""
    runs: bool = False
    elsewhere: bool = False
    default: bool = False


Word = tuple[Part, ...]


def text_of(word: Word) -> str | None:
    """Return the text of a word, None if a part of it is unknown."""
    return None if gap_of(word) else "".join(part.text or "" for part in word)


def gap_of(word: Word) -> Part | None:
    """Return the first unknown part of a word."""
    return next((part for part in word if part.text is None), None)


def shown(word: Word) -> str:
    """Return a word as a person would recognise it: known text, and unknown parts as written."""
    return "".join(part.shown if part.text is None else part.text for part in word)


def value_of(word: Word) -> str | Missing:
    """Return the text, or what is missing of it."""
    gap = gap_of(word)
    return Missing(shown(word), gap.why, gap.runs) if gap else shown(word)


def lines_of(word: Word) -> tuple[int, ...]:
    """Return the lines of a word, each once."""
    return tuple(dict.fromkeys(line for part in word for line in part.lines))


def line_of(word: Word) -> int:
    """Return the first line of a word; 0 for one that a recorded run was given."""
    return next(iter(lines_of(word)), 0)


def fields(word: Word) -> Iterator[Word]:
    """Yield the words that one written word becomes: cut between elements, and at bare spaces of expansions."""
    current: list[Part] = []
    for part in word:
        if part.text == BREAK:
            yield _matched(tuple(current))
            current = []
        elif part.text is None or not part.split or not _SPACES.search(part.text):
            current += [part] if part.text != "" or not part.split else []
        else:
            for place, piece in enumerate(_SPACES.split(part.text)):
                if place % 2 == 0 and piece:
                    current.append(part._replace(text=piece))
                elif place % 2 and current:
                    yield _matched(tuple(current))
                    current = []
    if current:
        yield _matched(tuple(current))


def _matched(word: Word) -> Word:
    """Return the word, unknown where bash may make other words of it: names of files, braces."""
    bare = "".join((part.text or "") if part.bare else "x" for part in word)
    braces = 0 <= bare.find("{") < bare.rfind("}") and ("," in bare or ".." in bare)
    if gap_of(word) or not (braces or 0 <= bare.find("[") < bare.rfind("]") or _MATCHES.search(bare)):
        return word
    why = f"bash may make other words of {cut(shown(word))}"
    return (Part(None, lines_of(word), shown=shown(word), why=why, runs=True),)


def number(text: str) -> int | None:
    """Return the value of an expression of whole numbers as bash computes it, None for another expression.

    >>> number("(2 - 9) / 2"), number("(2 - 9) % 4"), number("010"), number("2 ** 3")
    (-3, -3, None, None)
    """
    if len(text) > 200 or re.search(r"[^\s\d+\-*/%()]|\+\+|--|\d{19}", text):
        return None
    try:
        return _value(ast.parse(" ".join(text.split()), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        result = _SIGNS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        result = -_value(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        result = node.value
    else:
        raise ValueError(node)
    if abs(result) >= 2**63:
        raise ValueError(node)
    return result
