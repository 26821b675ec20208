"""What the pages of the documentation have to run: their fenced blocks, and what is said of each in the source.

```
`job.py`:                     the paragraph before a block that is a file: the commands of the page find it
<!-- exits: 3 -->             the commands of the block below end with this status, not with 0
<!-- run by: tests/a.py -->   that test runs the block below, from the page
<!-- not run: needs Slurm --> nothing runs the block below; the reason is for its readers too
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_MARK = re.compile(r"<!-- (exits|run by|not run): (.+?) -->")
_FILE = re.compile(r"`([\w.]+\.\w+)`[^`]*:$")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the line where the text begins, and what stands before it."""

    language: str
    text: str
    line: int
    file: str | None = None
    exits: int = 0
    run_by: str | None = None
    not_run: str | None = None

    @property
    def kind(self) -> str:
        """What is done with it; ``unknown`` is what a page must not have."""
        if self.not_run or self.run_by:
            return "marked"
        if self.language.startswith("{") or self.language == "text":
            return "shown"
        if self.file is not None:
            return "file"
        return {"python": "python", "console": "console"}.get(self.language, "unknown")

    @property
    def commands(self) -> list[tuple[str, str]]:
        """The commands of a console and what each prints."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0].strip(), f"line {self.line}: a console begins with a command"
        found = (re.match(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", part, re.DOTALL) for part in parts[1:])
        return [(command[1], command[2]) for command in found if command is not None]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    marks: dict[str, str] = {}
    for token in MarkdownIt().parse(text):
        if token.type == "html_block":
            marks |= dict(_MARK.findall(token.content))
        elif token.type == "inline":
            named = _FILE.search(token.content)
            marks = {"file": named[1]} if named else {}
        elif token.type == "fence":
            assert token.map is not None
            yield _block(token.info.strip(), token.content, token.map[0] + 1, marks)
            marks = {}


def _block(language: str, text: str, line: int, marks: dict[str, str]) -> Block:
    return Block(
        language,
        text,
        line,
        file=marks.get("file"),
        exits=int(marks.get("exits", 0)),
        run_by=marks.get("run by"),
        not_run=marks.get("not run"),
    )
