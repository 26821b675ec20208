"""``rankmesh top``: a running job in the terminal, by what its watch writes of its speed."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from rankmesh.cli.console import out
from rankmesh.cli.shell import Answer
from rankmesh.debug.slow import FILE, SlowReport
from rankmesh.debug.speed import lines
from rankmesh.errors import RecordingError

__all__ = ["command"]

_STYLES = {r"(?m)^slow": "bold red", r"(?m)^(step|lost)": "bold", "▒+": "yellow", "▓+": "dark_orange", "█+": "red"}


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the watch, or the one that has it.")],
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds between two looks.", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the last report and end, as without a terminal.")] = False,
) -> Answer:
    """Show how fast a running job is, and what makes it slow. The job runs with RANKMESH=watch; Ctrl-C ends the view.

    $ rankmesh top rankmesh-watch
    $ rankmesh top /shared/hangs --once
    $ rankmesh top /shared/hangs --json
    """
    console = out()

    def show() -> None:
        if once or not console.is_terminal:
            console.print(_screen(_newest(folder), console.width))
            return
        with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    live.update(_screen(_newest(folder), console.width), refresh=True)
                except RecordingError as error:
                    live.update(Text(str(error)), refresh=True)
                time.sleep(every)

    return Answer(lambda: _newest(folder).to_dict(), show)


def _newest(folder: Path) -> SlowReport:
    """Return the newest report in a folder and the folders in it. Raises ``RecordingError`` if there is none."""
    file = folder / FILE
    if not file.is_file():
        file = max(folder.glob(f"*/{FILE}"), key=lambda found: found.stat().st_mtime, default=file)
    if report := SlowReport.read(file.parent):
        return report
    how = f"start the job with RANKMESH=watch:dir={folder.absolute()}, and it has one after some steps"
    raise RecordingError(f"{folder} has no {FILE}; {how}")


def _screen(report: SlowReport, width: int) -> Text:
    text = Text("\n".join(lines(report, time.time(), width)))
    for pattern, style in _STYLES.items():
        text.highlight_regex(pattern, style)
    return text
