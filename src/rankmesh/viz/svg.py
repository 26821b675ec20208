"""A mesh as an SVG picture: one panel a kind of group, each group in a colour, nodes outlined.

```
tp: 4 groups of 2, stride 2x1
┏━━━━┯━━━━┳━━━━┯━━━━┓
┃ 0  │ 1  ┃ 2  │ 3  ┃      a cell: the rank, and the number of its group; white: in no group of this kind
┃ g0 │ g0 ┃ g1 │ g1 ┃      a heavy line: the edge of a node
┗━━━━┷━━━━┻━━━━┷━━━━┛
```

>>> from rankmesh.readers.source import read
>>> text = picture(read("tp=2,dp=2").plan, ["tp"], gpus_per_node=2)
>>> text.startswith("<svg"), text.count('class="cell"'), "2 groups of 2" in text
(True, 4, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, tostring

from rankmesh.core.plan import Plan
from rankmesh.viz.panel import GAP, Panel, document, panel, put
from rankmesh.viz.sheet import Part, part_of

if TYPE_CHECKING:
    from rankmesh.placement import Cluster

__all__ = ["LIMIT", "picture", "pictured_kinds"]

LIMIT = 512
_TARGET_WIDTH = 1000


def picture(
    plan: Plan, names: Sequence[str] | None = None, *, cluster: Cluster | None = None, gpus_per_node: int | None = None
) -> str:
    """SVG text with one panel for each kind in ``names``; by default each that leads a communicator.

    Hosts are those of the ``cluster``, or have ``gpus_per_node`` consecutive ranks each.

    Of a mesh of more than 512 ranks one part is drawn, such as one replica: the rest repeats it.
    """
    part = part_of(plan.mesh, LIMIT)
    if cluster is None and gpus_per_node is not None:
        from rankmesh.placement import Cluster

        cluster = Cluster.of_nodes(gpus_per_node, plan.mesh.rank_range.stop)
    panels = [panel(plan, name, cluster, part) for name in names or pictured_kinds(plan)]
    return tostring(_sheet_of(plan, panels, cluster, part), encoding="unicode")


def pictured_kinds(plan: Plan) -> list[str]:
    """Return the kinds worth a panel: the first of each class that shares, without groups of one rank."""
    canonical = [names[0] for names in plan.sharing if plan.groups(names[0]).size > 1]
    return canonical or [spec.name for spec in plan.specs[:1]]


def _sheet_of(plan: Plan, panels: list[Panel], cluster: Cluster | None, part: Part) -> Element:
    """Return the panels in rows, as many side by side as fit the target width."""
    places, width, height = _flow(panels)
    title = f"{plan.mesh}: {plan.mesh.size} ranks"
    if part.left_out:
        title += f", of which {len(part.ranks)} are drawn ({part.left_out})"
    if cluster is not None:
        title += f", heavy lines are nodes of {max(host.devices for host in cluster.hosts)}"
    root = document(width, height, title)
    put(root, "text", title, x=GAP, y=GAP + 8, **{"class": "title"})
    for drawn, (x, y) in zip(panels, places, strict=True):
        drawn.drawing.set("transform", f"translate({x} {y})")
        root.append(drawn.drawing)
    return root


def _flow(panels: list[Panel]) -> tuple[list[tuple[int, int]], int, int]:
    places: list[tuple[int, int]] = []
    x, y, tallest, width = GAP, 3 * GAP, 0, 420
    for part in panels:
        if x > GAP and x + part.width > _TARGET_WIDTH:
            x, y, tallest = GAP, y + tallest + GAP, 0
        places.append((x, y))
        x += part.width + 2 * GAP
        width, tallest = max(width, x - GAP), max(tallest, part.height)
    return places, width, y + tallest + GAP
