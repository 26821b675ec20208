"""Data to stdout, words for people to stderr.

>>> print(json_text({"ranks": [0, 2], "axes": ["tp"], "more": [{"a": 1}]}))
{
  "ranks": [0, 2],
  "axes": ["tp"],
  "more": [
    {
      "a": 1
    }
  ]
}
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["error", "json_text", "note", "out", "write", "write_json"]

# Without a terminal there is no width to fit; lines stay readable in a log.
_LOG_WIDTH = 140
_PIECE = 2**15
_FLAT = re.compile(r"\[\n\s+([^\[\]{}]*?)\n\s+\]")
_BREAK = re.compile(r",\n\s+")


def out() -> Console:
    """The console of stdout: coloured on a terminal, plain text elsewhere."""
    return _console(sys.stdout)


def _console(stream: IO[str]) -> Console:
    from rich.console import Console

    class Pipe(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    width = None if stream.isatty() or os.environ.get("COLUMNS") else _LOG_WIDTH
    return Pipe(file=stream, width=width, markup=False, highlight=False, emoji=False)


def write(text: str) -> None:
    """Write text and a newline to stdout as it is, in pieces: a reader that leaves is noticed soon."""
    for start in range(0, len(text), _PIECE):
        sys.stdout.write(text[start : start + _PIECE])
    sys.stdout.write("\n")


def write_json(data: object) -> None:
    """Write data to stdout as JSON."""
    write(json_text(data))


def json_text(data: object) -> str:
    """Indented JSON with every list of plain values on one line."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return _FLAT.sub(lambda found: f"[{_BREAK.sub(', ', found[1])}]", text)


def note(text: str) -> None:
    """Tell a person something on stderr that is not data."""
    sys.stderr.write(text + "\n")


def error(message: str) -> None:
    """One line on stderr; ``error:`` is red on a terminal."""
    from rich.text import Text

    line = Text.assemble(("error:", "bold red"), " ", " ".join(message.split("\n")))
    _console(sys.stderr).print(line, soft_wrap=True)
