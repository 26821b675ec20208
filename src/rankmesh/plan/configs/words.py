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

from rankmesh.plan.configs.reading import Missing

__all__ = ["Part", "Word", "fields", "gap_of", "joined", "lines_of", "quoted", "shown", "text_of", "value_of"]

_SPACE = re.compile(r"(\s+)")


@dataclass(frozen=True)
class Part:
    """Some characters of a word. ``split``: they come from an expansion outside quotes, so spaces end the word.

    ``lines``  where they were written, first the line that matters most
    ``shown``  how an unknown part is written, such as ``$TP``; ``why`` it is unknown, ``maybe`` what it could be
    """

    text: str | None
    lines: tuple[int, ...]
    split: bool = False
    shown: str = ""
    why: str = ""
    maybe: tuple[tuple[Part, ...], ...] = ()


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


def joined(words: Iterable[Word]) -> Word:
    """Words with a space between them, as one text."""
    parts: list[Part] = []
    for word in words:
        if parts:
            parts.append(replace(parts[-1], text=" ", split=True, shown="", why="", maybe=()))
        parts += word
    return tuple(parts)


def fields(word: Word) -> Iterator[Word]:
    """The words that one written word becomes: cut at the spaces of expansions outside quotes."""
    if not any(part.split for part in word):
        yield word
        return
    current: list[Part] = []
    for part in word:
        if not part.split or part.text is None:
            current.append(part)
            continue
        for number, piece in enumerate(_SPACE.split(part.text)):
            if number % 2 and current:
                yield tuple(current)
                current = []
            elif piece and number % 2 == 0:
                current.append(replace(part, text=piece))
    if current:
        yield tuple(current)
