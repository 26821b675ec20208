"""Errors and exit codes: each error is one line on stderr and a named exit status.

```
typer's usage errors     error: No such option: --gpu (see: rankmesh show --help)           2
RankmeshError            error: unknown axis 'dpp': this mesh has the axes tp, dp; ...     3
Ctrl-C                   error: interrupted                                               130
rankmesh ... | head                                                                       141
```

A subcommand that ends in another way raises ``Failed`` with its exit code.

>>> ExitCode(3).name, EXIT_CODES.splitlines()[0]
('BAD_SPEC', '  0  ok')
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import typer
from typer.core import TyperGroup

from rankmesh.cli.console import error, note, write_json
from rankmesh.errors import AgreementError, ConnectError, MissingExtra, RankmeshError, quoted

__all__ = ["DEBUG", "EXIT_CODES", "Answer", "ExitCode", "Failed", "Shell", "outcome", "save"]

DEBUG = "RANKMESH_DEBUG"

# Errors of a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# typer re-exports one of its usage errors; their common base carries exit_code and format_message().
_CommandError: type[Exception] = typer.BadParameter.__mro__[2]


class ExitCode(IntEnum):
    """Exit statuses of ``rankmesh``; ``meaning`` is the line in its help."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """Return an integer with its meaning."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    OK = 0, "ok"
    DIFFERENT = 1, "diff: the layouts differ, or by `compare` the numbers under them; or `lint` has findings"
    USAGE = 2, "wrong usage, or a file that cannot be written"
    BAD_SPEC = 3, "a spec, layout or plan that is refused"
    UNPROVED = 4, "check: a group failed its proof"
    LOST_RANKS = 5, "check: ranks died or never arrived, or by `compare` the program failed"
    NO_JOB = 6, "what the launcher says contradicts itself, or lacks something"
    HUNG = 7, "doctor: ranks hang"
    INTERNAL = 70, "a defect of rankmesh itself; --debug shows where"
    INTERRUPTED = 130, "interrupted from the keyboard"
    BROKEN_PIPE = 141, "the reader of the output went away"


EXIT_CODES = "\n".join(f"{code.value:>3}  {code.meaning}" for code in ExitCode)


class Answer(NamedTuple):
    """The result of a subcommand: ``data`` returns the document of --json, ``show`` prints the text for people.

    Then ``notes`` go to stderr, and the command exits with ``code`` and, of another than 0, the line ``problem``.
    """

    data: Callable[[], object]
    show: Callable[[], None]
    code: ExitCode = ExitCode.OK
    problem: str = ""
    notes: Sequence[str] = ()

    def print(self, *, json: bool) -> None:
        """Print the answer, and raise ``Failed`` for another status than 0."""
        if json:
            write_json(self.data())
        else:
            self.show()
        for text in self.notes:
            note(text)
        if self.code:
            raise Failed(self.problem, self.code)


class Failed(Exception):
    """A subcommand that did not succeed, with its exit code."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


def save(path: Path, text: str) -> None:
    """Write a file that the user asked for, and say so."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise Failed(
            f"cannot write {path}: {problem.strerror}; name a file in a folder that exists", ExitCode.USAGE
        ) from problem
    note(f"wrote {path}")


class Shell(TyperGroup):
    """The root command: runs typer's parser and the subcommand, and exits."""

    def main(self, *args: Any, **how: Any) -> Any:
        """Run, report and exit; with ``standalone_mode=False`` errors are raised, as typer does."""
        run = super().main

        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # an old terminal may not have every sign
                stream.reconfigure(errors="replace")

        def command() -> Any:
            return run(*args, **{**how, "standalone_mode": False})

        return sys.exit(outcome(command)) if how.get("standalone_mode", True) else command()

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; a reader that went away is kept apart from other input and output errors."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _silence(sys.stdout)
            raise typer.Exit(ExitCode.BROKEN_PIPE) from None
        except KeyboardInterrupt:
            error("interrupted")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        return result


def outcome(command: Callable[[], object]) -> int:
    """Run a command to its end: its exit status, and for what went wrong one line on stderr."""
    try:
        result = command()
        return int(result) if isinstance(result, int) else ExitCode.OK
    except Exception as problem:  # noqa: BLE001  - the last line of defence: a user never sees a traceback
        return _reported(problem)


def _reported(problem: Exception) -> int:
    if os.environ.get(DEBUG, "") not in ("", "0"):
        traceback.print_exception(problem)
    message, code = _message_and_code(problem)
    if isinstance(problem, OSError):
        _silence(sys.stdout)
    if message:
        error(message)
    return code


def _message_and_code(problem: Exception) -> tuple[str, int]:
    if isinstance(problem, MissingExtra):
        return str(problem), ExitCode.USAGE
    if isinstance(problem, RankmeshError):
        if "evidence" in problem.values:  # of the launcher's variables, which are refused
            return str(problem), ExitCode.NO_JOB
        of_ranks = isinstance(problem, AgreementError | ConnectError)
        return str(problem), ExitCode.LOST_RANKS if of_ranks else ExitCode.BAD_SPEC
    if isinstance(problem, Failed):
        return str(problem), problem.code
    if isinstance(problem, _CommandError):
        return _usage(problem), ExitCode.USAGE
    if isinstance(problem, typer.Abort):
        return "interrupted", ExitCode.INTERRUPTED
    if isinstance(problem, OSError) and problem.errno in _FULL:
        return f"cannot write: {problem.strerror}; free some space, or write elsewhere", ExitCode.USAGE
    if isinstance(problem, MemoryError):
        return "this layout does not fit in memory; ask for a smaller world", ExitCode.BAD_SPEC
    return (
        f"a defect in rankmesh: {type(problem).__name__}: {problem}; --debug shows where",
        ExitCode.INTERNAL,
    )


def _usage(problem: Any) -> str:
    """Return typer's message with the refused value, which it leaves out, and where the help is."""
    ctx = getattr(problem, "ctx", None)
    path = ctx.command_path if ctx is not None else "rankmesh"
    refused: list[Any] = getattr(problem.__cause__ or problem.__context__, "errors", list)()
    found = f", but it is {quoted(refused[0]['input'])}" if refused else ""
    message = problem.format_message().rstrip(".")
    return f"{message}{found} (see: {path} --help)" if message else ""


def _silence(stream: TextIO) -> None:
    """Point a closed pipe at nothing, so that the interpreter's last flush has nothing to complain of."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return
