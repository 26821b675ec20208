"""The words that bash hands to a completion: it cuts them at ``=`` and ``:`` too, and replaces only the last piece.

```
typed                  COMP_WORDS                      the word    its piece after the last = or :
rankmesh show tp=2,d   rankmesh show tp = 2,d          tp=2,d      2,d
rankmesh show tp=      rankmesh show tp =              tp=         (nothing yet)
```

>>> rejoined(["rankmesh", "show", "tp", "=", "2,d"], 4)
(['rankmesh', 'show', 'tp=2,d'], 2, 'tp=')
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO

__all__ = ["answered", "rejoined"]

_BREAKS = ("=", ":")


def rejoined(words: list[str], at: int) -> tuple[list[str], int, str]:
    """The words as they were typed, the place of the current one, and what of it bash keeps by itself."""
    typed: list[str] = []
    place, glue = at, False
    for number, word in enumerate(words):
        broken = word in _BREAKS
        if typed and (broken or glue):
            typed[-1] += word
        else:
            typed.append(word)
        glue = broken and len(typed) > 1
        if number == at:
            place = len(typed) - 1
    if at >= len(words):
        return typed, len(typed), ""
    return typed, place, typed[place][: max(map(typed[place].rfind, _BREAKS)) + 1]


def answered(run: Callable[[], None]) -> str:
    """What a completion of typer's answers to bash, without what bash keeps."""
    words, place, keeps = rejoined(_words(os.environ.get("COMP_WORDS", "")), int(os.environ.get("COMP_CWORD", "0")))
    os.environ.update(COMP_WORDS=shlex.join(words), COMP_CWORD=str(place))
    with redirect_stdout(StringIO()) as answer, suppress(SystemExit):
        run()
    return "".join(f"{line}\n" for line in _offers(answer.getvalue(), keeps))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is still open
        return text.split()


def _offers(answer: str, keeps: str) -> Iterator[str]:
    return (line.removeprefix(keeps) for line in answer.splitlines())
