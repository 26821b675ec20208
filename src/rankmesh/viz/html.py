"""One self-contained HTML page: the tables of the overview, and a picture of each kind of group.

>>> from rankmesh.readers.source import read
>>> from rankmesh.viz.overview import overview
>>> source = read("tp=2,dp=2")
>>> text = page(source, overview(source))
>>> text.startswith("<!doctype html>"), text.count("<table>"), text.count("<svg")
(True, 2, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

from rankmesh.readers.source import Source
from rankmesh.viz.overview import Overview
from rankmesh.viz.svg import picture, pictured_kinds
from rankmesh.viz.tables import Column, axes, communicators, header, kinds

__all__ = ["page"]

_NUMBER = ' class="number"'

TEMPLATE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; white-space: nowrap; }
th, td { border-bottom: 1px solid #d0d7de; }
th { color: #57606a; font-weight: 600; }
.number { text-align: right; }
code, .mono { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .9em; }
.note { color: #57606a; }
svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def page(source: Source, facts: Overview) -> str:
    """Return the page of a plan; of a world of more than 512 ranks one part is pictured."""
    origin = facts.origin
    listed = [kind.name for kind in facts.kinds]
    names = [name for name in pictured_kinds(source.plan) if name in listed] or listed
    sections = [
        f"<p><code>{escape(origin.spec)}</code></p>\n<p>{escape(header(facts))}</p>",
        *(f'<p class="note">{escape(text)}</p>' for text in (origin.source, origin.note) if text),
        f"<h2>Axes</h2>\n{_table(axes(facts))}",
        f"<h2>Groups</h2>\n{_table(kinds(facts))}",
        "<h2>Communicators</h2>",
        *(f"<p>{escape(line)}</p>" for line in communicators(facts)),
        f"<h2>Pictures</h2>\n{picture(source.plan, names, cluster=facts.cluster)}",
    ]
    return TEMPLATE.substitute(title=escape(origin.title or origin.spec), body="\n".join(sections))


def _table(columns: Sequence[Column]) -> str:
    """Return a table of escaped cells."""
    head = "".join(f"<th>{escape(column.head)}</th>" for column in columns)
    rows = [
        "".join(f"<td{_NUMBER * column.right}>{escape(column.cells[row])}</td>" for column in columns)
        for row in range(len(columns[0].cells))
    ]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
