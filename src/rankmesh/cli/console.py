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

import codecs
import json
import os
import re
import sys
from io import TextIOWrapper
from typing import IO, TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["error", "json_text", "note", "out", "plain", "write", "write_json"]

# The width without a terminal; lines stay readable in a log.
_LOG_WIDTH = 140
_PIECE = 2**15
# What is printed where an encoding has no such sign.
_PLAIN = "rankmesh"
_LIKE = {**dict.fromkeys("─━╌–−", "-"), **dict.fromkeys("│┃", "|"), "·": "*", "…": "...", "×": "x", "→": "->"}
_FLAT = re.compile(r"\[\n\s+([^\[\]{}]*?)\n\s+\]")
_BREAK = re.compile(r",\n\s+")


def plain(stream: TextIO) -> None:
    """Let a stream that cannot print lines and dots print something like them: ``LC_ALL=C``, an old terminal."""
    try:
        "─·…".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)


def _plain(problem: UnicodeError) -> tuple[str, int]:
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    text = problem.object[problem.start : problem.end]
    return "".join(_LIKE.get(letter, "?") for letter in text), problem.end


codecs.register_error(_PLAIN, _plain)


def out() -> Console:
    """Return the console of stdout: coloured on a terminal, plain text elsewhere."""
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
    """Print one line to stderr; ``error:`` is red on a terminal."""
    from rich.text import Text

    line = Text.assemble(("error:", "bold red"), " ", " ".join(message.split("\n")))
    _console(sys.stderr).print(line, soft_wrap=True)
