"""Files that a command writes beside what it prints.

```
--svg a.svg --html b.html     two files; the table goes to stdout
--svg -                       the picture goes to stdout, and nothing else does
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from rankmesh.cli.console import write
from rankmesh.cli.shell import ExitCode, Failed, save

__all__ = ["check_outputs", "write_output"]

_ENDINGS = {"--svg": ".svg", "--html": ".html", "--save": ".json"}


def check_outputs(paths: Mapping[str, str | None], *, json: bool) -> bool:
    """Refuse a name of another kind of file, and two texts for stdout; return whether a file's text takes it."""
    for option, path in paths.items():
        if path not in (None, "-") and Path(str(path)).suffix.lower() not in ("", _ENDINGS[option], ".htm"):
            named = Path(str(path)).with_suffix(_ENDINGS[option])
            raise Failed(
                f"{option} writes {_ENDINGS[option][1:].upper()}, but {path} does not end in {_ENDINGS[option]}; name "
                f"the file {named}",
                ExitCode.USAGE,
            )
    taken = [option for option, path in paths.items() if path == "-"] + (["--json"] if json else [])
    if len(taken) > 1:
        raise typer.BadParameter(f"{' and '.join(taken)} would both go to stdout; name a file for one of them")
    return bool(taken) and not json


def write_output(path: str, text: str) -> None:
    """Write a text to a file, or to stdout for ``-``."""
    if path == "-":
        write(text)
    else:
        save(Path(path), text)
