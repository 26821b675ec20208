"""Repairs: changes to a run that may make it right. Each is tried, and only one that worked is reported.

```
Repair("group", "dp_cp", node)                  these collectives are made on dp_cp instead
Repair("scale", "", node, 1/tp)                 their results are divided by the size of tp
Repair("scale", "", None, 1/tp)                 what is seen and differs is divided by it
Repair("all-reduce", "tp")                      what is seen and differs is summed over tp first
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import NamedTuple

from rankmesh.sim.calls import Site
from rankmesh.sim.comparison.layouts import Layout
from rankmesh.sim.comparison.stacks import Node

__all__ = ["Factor", "Repair", "equally_large", "factor_of", "reductions", "regroupings", "scalings"]

# How near a measured factor must be to the size of a group, which a trial then verifies.
_CLOSE = 1e-3


class Factor(NamedTuple):
    """The size of one kind of group, or one over it.

    >>> str(Factor("tp")), str(Factor("dp", divides=True))
    ('tp', '1/dp')
    """

    kind: str
    divides: bool = False

    def __str__(self) -> str:
        return f"1/{self.kind}" if self.divides else self.kind

    def value(self, layout: Layout) -> float:
        """Return the number under a layout."""
        size = layout.kinds[self.kind].size
        return 1 / size if self.divides else size


@dataclass(frozen=True)
class Repair:
    """One change: of the calls of a node and of ``others``, or without them of what is seen.

    ``others_fit`` are other factors that the layouts do not tell apart.
    """

    form: str
    kind: str = ""
    node: Node | None = None
    factor: Factor | None = None
    others: tuple[Node, ...] = ()
    others_fit: tuple[Factor, ...] = ()

    def changes(self, stack: Sequence[Site], kind: str) -> bool:
        """Return whether it is a change of this call."""
        return self.node is not None and any(node.matches(stack, kind) for node in (self.node, *self.others))

    def described(self) -> tuple[str, ...]:
        """Return how the user gets it."""
        details = (self.kind, self.factor, *self.others_fit)
        return (self.form, *(str(detail) for detail in details if detail))


def _distinct(layouts: Sequence[Layout], first: str = "") -> Iterator[str]:
    """Yield the kinds that have more than one rank somewhere; of those with equal groups everywhere, the first.

    One may be first; the others are in the order of how many axes they are along.
    """
    kinds, seen = layouts[0].kinds, set[tuple[object, ...]]()
    for kind in sorted(kinds, key=lambda kind: (kind != first, len(kinds[kind].axes))):
        groups = [layout.kinds[kind] for layout in layouts]
        key = tuple(one.partition for one in groups)
        if key not in seen and any(one.size > 1 for one in groups):
            seen.add(key)
            yield kind


def regroupings(node: Node, layouts: Sequence[Layout]) -> list[Repair]:
    """Return the changes of these collectives to every other kind of the plan."""
    return [Repair("group", kind, node) for kind in _distinct(layouts, node.kind) if kind != node.kind]


def reductions(layouts: Sequence[Layout]) -> list[Repair]:
    """Return the sums of what is seen over each kind of group."""
    return [Repair("all-reduce", kind) for kind in _distinct(layouts)]


def equally_large(kind: str, layouts: Sequence[Layout]) -> list[str]:
    """Return kinds along other axes that have as many ranks as this one under every layout."""
    sizes = [layout.kinds[kind] for layout in layouts]
    return [
        other
        for other in _distinct(layouts)
        if not set(sizes[0].axes) & set(layouts[0].kinds[other].axes)
        and all(layout.kinds[other].size == one.size for layout, one in zip(layouts, sizes, strict=True))
    ]


def factor_of(factors: Mapping[Layout, float]) -> Factor | None:
    """Return the size of a kind of group, or one over it, that has these values under these layouts."""
    for kind in _distinct(list(factors)):
        for one in (Factor(kind, divides=True), Factor(kind)):
            if all(isclose(one.value(layout), factor, rel_tol=_CLOSE) for layout, factor in factors.items()):
                return one
    return None


def scalings(factors: Mapping[Layout, float]) -> list[Repair]:
    """Return the factor of what is seen that has these values, with others that these layouts do not tell apart."""
    found = factor_of(factors)
    if found is None:
        return []
    fit = (found._replace(kind=other) for other in equally_large(found.kind, list(factors)))
    return [Repair("scale", factor=found, others_fit=tuple(fit))]
