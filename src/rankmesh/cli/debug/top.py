"""``rankmesh top``: a running job in the terminal, by what its watch writes of its speed."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
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
    once: Annotated[bool, typer.Option("--once", help="Show the last report, and end.")] = False,
) -> Answer:
    """Show how fast a running job is, and what makes it slow. The job runs with RANKMESH=watch; Ctrl-C ends the view.

    $ rankmesh top rankmesh-watch
    $ rankmesh top /shared/hangs --once
    $ rankmesh top /shared/hangs --json
    """

    def show() -> None:
        if once:
            out().print(_screen(_newest(folder)))
        else:
            _follow(folder, every)

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


def _screen(report: SlowReport) -> Text:
    text = Text("\n".join(lines(report, time.time(), out().width)))
    for pattern, style in _STYLES.items():
        text.highlight_regex(pattern, style)
    return text


def _follow(folder: Path, every: float) -> None:
    """Show each report until Ctrl-C: on a terminal in place of the last one, else below it."""
    console, shown = out(), ""
    page = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext()
    with suppress(KeyboardInterrupt), page as live:
        while True:
            try:
                report = _newest(folder)
                text, about = _screen(report), str(report.time)
            except RecordingError as error:
                text, about = Text(str(error)), str(error)
            if live is not None:
                live.update(text, refresh=True)
            elif about != shown:
                console.print(text)
            shown = about
            time.sleep(every)
