"""Words of a shell script, each part with the line it was written on.

A word is a tuple of parts. A part with a text of None stands for what the script does not state: a variable that it
never sets, its arguments, the output of a command, or a variable that a branch may have set (``maybe``).

>>> word = (Part("--tp=", (3,)), Part("4", (1,)))
>>> text_of(word), lines_of(word)
('--tp=4', (3, 1))
>>> [text_of(field) for field in fields((Part("--tp 4", (1,), split=True),))]
['--tp', '4']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rankmesh.readers.reading import Missing

__all__ = [
    "BREAK",
    "Part",
    "Word",
    "fields",
    "gap_of",
    "joined",
    "lines_of",
    "quoted",
    "shown",
    "text_of",
    "unbroken",
    "value_of",
]

# Between the elements of an array; no text of a script holds it.
BREAK = "\0"
_SPACE = re.compile(r"([\s\0]+)")


@dataclass(frozen=True)
class Part:
    """Some characters of a word. ``split``: they come from an expansion outside quotes, so spaces end the word.

    ``lines``  where they were written, first the line that matters most
    ``shown``  how an unknown part is written, such as ``$TP``; ``why`` it is unknown, ``maybe`` what it could be
    ``default``  it is the default of a variable that the environment may set
    """

    text: str | None
    lines: tuple[int, ...]
    split: bool = False
    shown: str = ""
    why: str = ""
    maybe: tuple[tuple[Part, ...], ...] = ()
    default: bool = False


Word = tuple[Part, ...]


def text_of(word: Word) -> str | None:
    """The text of a word, None if a part of it is unknown."""
    return None if gap_of(word) else "".join(part.text or "" for part in word)


def gap_of(word: Word) -> Part | None:
    """The first unknown part of a word."""
    return next((part for part in word if part.text is None), None)


def shown(word: Word) -> str:
    """A word as a person would recognise it: known text, and unknown parts as written."""
    return "".join(part.shown if part.text is None else part.text for part in word)


def value_of(word: Word) -> str | Missing:
    """The text, or what is missing of it."""
    gap = gap_of(word)
    return Missing(shown(word), gap.why) if gap else "".join(part.text or "" for part in word)


def lines_of(word: Word) -> tuple[int, ...]:
    """The lines that a word comes from, each once."""
    return tuple(dict.fromkeys(line for part in word for line in part.lines))


def quoted(word: Word) -> Word:
    """The same characters inside double quotes: spaces no longer end the word."""
    return tuple(replace(part, split=False) for part in word)


def joined(words: Iterable[Word], separator: str = " ") -> Word:
    """Words as one text; the separator ``BREAK`` ends a word inside quotes too, as between the elements of ``"$@"``."""
    parts: list[Part] = []
    for number, word in enumerate(words):
        if number:
            parts.append(Part(separator, parts[-1].lines if parts else (), split=True))
        parts += word
    return tuple(parts)


def unbroken(word: Word) -> Word:
    """A word whose breaks became spaces, as in an assignment."""
    return tuple(replace(part, text=" ") if part.text == BREAK else part for part in word)


def fields(word: Word) -> Iterator[Word]:
    """The words that one written word becomes: cut at breaks, and at the spaces of expansions outside quotes."""
    current: list[Part] = []
    open_ended = False
    for part in word:
        if part.text == BREAK and not part.split:
            yield tuple(current)
            current, open_ended = [], True
            continue
        for cut, piece in _pieces(part):
            if cut and current:
                yield tuple(current)
                current, open_ended = [], False
            elif not cut:
                current.append(piece)
    if current or open_ended:
        yield tuple(current)


def _pieces(part: Part) -> Iterator[tuple[bool, Part]]:
    """The pieces of a part, and the cuts between them."""
    if part.text is None or not part.split:
        yield False, part
        return
    for number, piece in enumerate(_SPACE.split(part.text)):
        if number % 2 or piece:
            yield bool(number % 2), replace(part, text=piece)
