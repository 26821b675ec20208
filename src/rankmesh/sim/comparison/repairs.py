"""Repairs: changes to a run that may make it right. Each is tried, and only one that worked is reported.

```
Repair("group", "dp_cp", node)        these collectives are made on dp_cp instead
Repair("scale", "1/tp", node)         their results are divided by the size of tp
Repair("all-reduce", "tp")            what is seen and differs is summed over tp first
Repair("scale", "tp")                 what is seen and differs is multiplied by the size of tp
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from rankmesh.sim.calls import Site
from rankmesh.sim.comparison.layouts import Layout
from rankmesh.sim.comparison.stacks import Node

__all__ = ["Repair", "reductions", "regroupings", "scalings"]

_INVERSE = "1/"


@dataclass(frozen=True)
class Repair:
    """One change: of the calls of a node and of ``others``, or without one of what is seen."""

    form: str
    what: str
    node: Node | None = None
    others: tuple[Node, ...] = ()

    def changes(self, stack: Sequence[Site], kind: str) -> bool:
        """Return whether it is a change of this call."""
        return self.node is not None and any(node.matches(stack, kind) for node in (self.node, *self.others))

    def factor(self, layout: Layout) -> float:
        """Return what a scale multiplies by under a layout."""
        kind = self.what.removeprefix(_INVERSE)
        size = layout.kinds[kind].size
        return 1.0 / size if self.what.startswith(_INVERSE) else float(size)

    def described(self, layout: Layout) -> tuple[str, str | float]:
        """Return how the user gets it: a scale as its number under the layout."""
        if self.form == "scale":
            return self.form, self.factor(layout)
        return self.form, self.what


def _common(layouts: Sequence[Layout]) -> list[str]:
    """Return the kinds that every layout has, those along the fewest axes first."""
    first = layouts[0].kinds
    known = [kind for kind in first if all(kind in layout.kinds for layout in layouts)]
    return sorted(known, key=lambda kind: len(first[kind].axes))


def _distinct(layouts: Sequence[Layout], kinds: Sequence[str]) -> Iterator[str]:
    """Yield the kinds that have more than one rank somewhere; of those with equal groups everywhere, the first."""
    seen: set[tuple[object, ...]] = set()
    for kind in kinds:
        groups = [layout.kinds[kind] for layout in layouts]
        key = tuple(one.partition for one in groups)
        if key not in seen and any(one.size > 1 for one in groups):
            seen.add(key)
            yield kind


def regroupings(node: Node, layouts: Sequence[Layout]) -> list[Repair]:
    """Return the changes of these collectives to every other kind of the plan."""
    kinds = sorted(_common(layouts), key=lambda kind: kind != node.kind)
    return [Repair("group", kind, node) for kind in _distinct(layouts, kinds) if kind != node.kind]


def reductions(layouts: Sequence[Layout]) -> list[Repair]:
    """Return the sums of what is seen over each kind of group."""
    return [Repair("all-reduce", kind) for kind in _distinct(layouts, _common(layouts))]


def scalings(layouts: Sequence[Layout], node: Node | None = None) -> list[Repair]:
    """Return the factors of a kind's size, and one over it; of equal factors everywhere, the first."""
    found, seen = [], set()
    for kind in _common(layouts):
        sizes = tuple(layout.kinds[kind].size for layout in layouts)
        if sizes not in seen and prod(sizes) > 1:
            seen.add(sizes)
            found += [Repair("scale", f"{_INVERSE}{kind}", node), Repair("scale", kind, node)]
    return found
