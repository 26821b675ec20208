"""Docstrings for Sphinx: they are Markdown, as people read them in the source, and Sphinx reads reStructuredText.

```
a fenced or an indented drawing      a literal block, with its language if it has one
``name``    what it means            a definition, with the lines that are indented under it
`name`                               code
>>> an example                       stays as it is
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

_FENCE = re.compile(r"^(\s*)```(\w*)$")
_DEFINITION = re.compile(r"^(\S.*?)(?: {2,})(\S.*)$")
_CODE = re.compile(r"(``.+?``)")
_SINGLE = re.compile(r"(?<!`)`([^`]+)`(?!`)(?!_)")


def to_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText."""
    return [line for block in _blocks(lines) for line in (*_translated(block), "")]


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Fenced drawings, and what blank lines separate."""
    block: list[str] = []
    fenced = False
    for line in lines:
        fence = _FENCE.match(line) is not None
        if fence and not fenced and block:
            yield block
            block = []
        if line.strip() or fenced:
            block.append(line)
        if (fence and fenced) or (not line.strip() and not fenced and block):
            yield block
            block = []
        fenced ^= fence
    if block:
        yield block


def _translated(block: list[str]) -> list[str]:
    fence = _FENCE.match(block[0])
    if fence:
        return _literal(block[1:-1], fence[2])
    if block[0].startswith(">>>"):
        return block
    if block[0].startswith("    "):
        return _literal(block, "")
    if _is_list_of_names(block):
        return _definitions(block)
    return [_prose(line) for line in block]


def _literal(lines: list[str], language: str) -> list[str]:
    return [f".. code-block:: {language or 'text'}", "", *(f"    {line}".rstrip() for line in lines)]


def _is_list_of_names(block: list[str]) -> bool:
    return block[0].startswith("``") and _DEFINITION.match(block[0]) is not None


def _definitions(block: list[str]) -> list[str]:
    """One definition for each line that begins at the margin; what is indented goes on with it."""
    found: list[str] = []
    for indented, group in groupby(block, lambda line: line.startswith(" ")):
        for line in group:
            parts = None if indented else _DEFINITION.match(line)
            if indented:
                found.append(f"    {_prose(line.strip())}")
            elif parts:
                found += [_prose(parts[1]), f"    {_prose(parts[2])}"]
            else:
                found += ["", _prose(line)]
    return found


def _prose(line: str) -> str:
    """Code in single ticks as code, and no underscore that reStructuredText would take for a link."""
    parts = _CODE.split(_SINGLE.sub(r"``\1``", line))
    parts[::2] = [re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", part) for part in parts[::2]]
    return "".join(parts)


def _process(app: object, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: object) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}
