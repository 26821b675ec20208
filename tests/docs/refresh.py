"""Write what the commands of a page print now into the page: `python -m tests.docs.refresh docs/tutorial.md`.

Outputs that a page shortens with a line of dots stay as they are. Read the difference before you commit it.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.docs.pages import ROOT, Block, blocks
from tests.docs.running import Reader, run, same


def refreshed(page: Path, folder: Path) -> str:
    """The text of a page with the outputs of today; files and examples are followed as in the test."""
    text, reader = page.read_text(encoding="utf-8"), Reader(folder)
    for block in list(blocks(text)):
        if block.kind == "console":
            text = text.replace(f"```console\n{block.text}", f"```console\n{_console(block, folder)}", 1)
        else:
            reader.follow(block)
    return text


def _console(block: Block, folder: Path) -> str:
    lines = []
    for command, shown in block.commands:
        status, printed = run(command, folder)
        if status != block.exits:
            sys.stderr.write(f"line {block.line}: {command} ended with {status}\n")
        kept = same(shown, printed) or "\n...\n" in f"\n{shown}"
        today = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
        lines.append(f"$ {command}\n{shown if kept else today}")
    return "".join(lines)


def main() -> None:
    """Refresh the pages that are named, and the drawings that they draw."""
    for name in sys.argv[1:]:
        page = (ROOT / name).resolve()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            page.write_text(refreshed(page, Path(folder)), encoding="utf-8")
            for drawing in Path(folder).glob("*.svg"):
                (ROOT / "docs" / "images" / drawing.name).write_bytes(drawing.read_bytes())
            os.chdir(ROOT)


if __name__ == "__main__":
    main()
