"""Files that a command writes beside what it prints: one that cannot be written does not stop the others.

```
--svg a.svg --html b.html     two files; the table goes to stdout
--svg -                       the picture goes to stdout, and nothing else does
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from rankmesh.cli.console import error, write
from rankmesh.cli.shell import ExitCode, Failed, save
from rankmesh.errors import RankmeshError

__all__ = ["Output", "check_stdout", "deliver"]


@dataclass(frozen=True)
class Output:
    """One file: the option that asks for it, where it goes (``-``: stdout), how its name may end, and its text."""

    option: str
    path: str
    endings: tuple[str, ...]
    text: Callable[[], str]

    def write(self) -> None:
        """Make the text and write it; a name of another kind of file is refused."""
        if self.path == "-":
            write(self.text())
            return
        if Path(self.path).suffix.lower() not in ("", *self.endings):
            kind = self.endings[0].removeprefix(".").upper()
            raise Failed(
                f"{self.option} writes {kind}, but {self.path} does not end in {self.endings[0]}; name the file "
                f"{Path(self.path).with_suffix(self.endings[0])}",
                ExitCode.USAGE,
            )
        save(Path(self.path), self.text())


def check_stdout(outputs: Sequence[Output], *, json: bool) -> bool:
    """Return whether stdout is taken by a file's text; it can hold one."""
    taken = [output.option for output in outputs if output.path == "-"] + (["--json"] if json else [])
    if len(taken) > 1:
        raise typer.BadParameter(f"{' and '.join(taken)} would both go to stdout; name a file for one of them")
    return bool(taken) and not json


def deliver(outputs: Sequence[Output], printed: Callable[[], None]) -> None:
    """Write each output and print the rest; what cannot be written is reported at the end and is the exit status."""
    problems: list[RankmeshError | Failed] = []
    for output in outputs:
        try:
            output.write()
        except (RankmeshError, Failed) as problem:  # noqa: PERF203  - the others are written all the same
            problems.append(problem)
    printed()
    for earlier in problems[:-1]:
        error(str(earlier))
    if problems:
        raise problems[-1]
