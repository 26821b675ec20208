"""One self-contained HTML page: the tables of the overview, and a picture of each kind of group.

>>> from rankmesh.readers.source import read
>>> from rankmesh.viz.overview import overview
>>> source = read("tp=2,dp=2")
>>> text = page(source, overview(source))
>>> text.startswith("<!doctype html>"), text.count("<table>"), text.count("<svg")
(True, 2, 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from rankmesh.readers.source import Source
from rankmesh.viz.overview import KindRow, LayoutRow, Overview, nodes_text
from rankmesh.viz.svg import picture, pictured_kinds

__all__ = ["page"]

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
    """The page of a plan; of a world of more than 512 ranks one part is pictured."""
    sections = [
        _header(facts),
        *(_section(f"View {layout.view}" if layout.view else "Mesh", _axes(layout)) for layout in facts.layouts),
        _section("Groups", _kinds(facts)),
        _section("Communicators", _communicators(facts)),
        _section("Pictures", _pictures(source, facts)),
    ]
    return TEMPLATE.substitute(title=escape(facts.origin.title or facts.origin.spec), body="\n".join(sections))


def _header(facts: Overview) -> str:
    words = [f"{facts.world_size:,} ranks", f"digest <code>{facts.digest[:12]}</code>"]
    if facts.nodes is not None:
        words.append(nodes_text(facts))
    lines = [f"<p><code>{escape(facts.origin.spec)}</code></p>", f"<p>{'; '.join(words)}</p>"]
    lines += [f'<p class="note">{escape(text)}</p>' for text in (facts.origin.source, facts.origin.note) if text]
    return "\n".join(lines)


def _section(heading: str, body: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{body}"


def _axes(layout: LayoutRow) -> str:
    rows = [(axis.name, axis.size, axis.stride, "shared" if axis.shared else "") for axis in layout.axes]
    return table(("axis", "size", "stride", ""), rows)


def _kinds(facts: Overview) -> str:
    heads = ["name", "axes", "view", "groups", "size", "stride", "communicator"]
    heads += ["crossing", "nodes", "hops"] if facts.nodes is not None else []
    return table([*heads, "members"], (_kind(kind) for kind in facts.kinds))


def _kind(kind: KindRow) -> tuple[object, ...]:
    axes = "-".join(kind.axes) + (f" ({kind.part})" if kind.part else "")
    examples = " ".join(_members(ranks, kind.size) for ranks in kind.examples[:2])
    row = (
        kind.name,
        axes,
        kind.view or "",
        kind.count,
        kind.size,
        kind.stride,
        str(kind.communicator),
    )
    if kind.crossings is None:
        return (*row, examples)
    return (*row, kind.crossings.crossing, kind.crossings.nodes, kind.crossings.hops, examples)


def _members(ranks: tuple[int, ...], size: int) -> str:
    return f"[{', '.join(map(str, ranks))}{', …' if len(ranks) < size else ''}]"


def _communicators(facts: Overview) -> str:
    least, most = facts.communicators_least, facts.communicators_most
    number = str(least) if least == most else f"{least} to {most}"
    lines = [f"<p>{number} per rank, {facts.communicators_total:,} in the job.</p>"]
    lines += [
        f"<p>{escape(pair.kind)} has the members of {escape(pair.other)} and a communicator of its own: "
        f"{escape(pair.why)}.</p>"
        for pair in facts.unshared
    ]
    return "\n".join(lines)


def _pictures(source: Source, facts: Overview) -> str:
    listed = [kind.name for kind in facts.kinds]
    names = [name for name in pictured_kinds(source.plan) if name in listed] or listed
    return picture(source.plan, names, cluster=facts.cluster)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of escaped cells, numbers to the right."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{escape(str(value))}</td>"
