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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import fill
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

__all__ = ["error", "harmless", "json_text", "note", "out", "progress_bar", "write", "write_filled", "write_json"]

# The width without a terminal; lines stay readable in a log.
_LOG_WIDTH = 140
_PIECE = 2**15
_FLAT = re.compile(r"\[\n\s+([^\[\]{}]*?)\n\s+\]")
_BREAK = re.compile(r",\n\s+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    r"""Return a text with its control characters written out, but for ends of lines and tabs: a terminal obeys them.

    >>> harmless("\x1b]0;title\x07\n\x9b2J")
    '\\u001b]0;title\\u0007\n\\u009b2J'
    """
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def out() -> Console:
    """Return the console of stdout: coloured on a terminal, plain text elsewhere."""
    return _console(sys.stdout)


def _console(stream: IO[str]) -> Console:
    from rich.console import Console, RenderableType
    from rich.segment import Segment

    class Pipe(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else harmless(text), style, control)

    width = None if stream.isatty() or os.environ.get("COLUMNS") else _LOG_WIDTH
    return Pipe(file=stream, width=width, markup=False, highlight=False, emoji=False)


def write(text: str) -> None:
    """Write text and a newline to stdout as it is, in pieces: a reader that leaves is noticed soon."""
    for start in range(0, len(text), _PIECE):
        sys.stdout.write(harmless(text[start : start + _PIECE]))
    sys.stdout.write("\n")


def write_filled(text: str) -> None:
    """Write text to stdout in lines of at most the width of the terminal."""
    write(fill(text, out().width))


def write_json(data: object) -> None:
    """Write data to stdout as JSON."""
    write(json_text(data))


def json_text(data: object) -> str:
    """Indented JSON with every list of plain values on one line."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return _FLAT.sub(lambda found: f"[{_BREAK.sub(', ', found[1])}]", text)


def note(text: str) -> None:
    """Tell a person something on stderr that is not data."""
    sys.stderr.write(harmless(text) + "\n")


def error(message: str) -> None:
    """Print one line to stderr; ``error:`` is red on a terminal."""
    from rich.text import Text

    line = Text.assemble(("error:", "bold red"), " ", " ".join(message.split("\n")))
    _console(sys.stderr).print(line, soft_wrap=True)


@contextmanager
def progress_bar(title: str, unit: str) -> Iterator[tuple[Callable[[int, int], None], Callable[[], None]]]:
    """Show a progress bar on stderr, if that is a terminal; the first value updates it, the second ends it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        *(TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn()),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
        # No thread of its own: ranks are forked from this process, and a fork must not meet a held lock.
        auto_refresh=False,
        transient=True,
    )
    task = bar.add_task(title, total=None)

    def update(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, refresh=True)

    try:
        yield update, bar.stop
    finally:
        bar.stop()
