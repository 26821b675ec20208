"""Repairs: changes to a run that may make it right. Each is tried, and only one that worked is reported.

```
Repair("group", "dp_cp", node)                  these collectives are made on dp_cp instead
Repair("group", "dp_cp", node, dp/dp_cp)        and what they sum is divided by the size of dp_cp instead of dp
Repair("scale", "", node, 1/tp)                 their results are divided by the size of tp
Repair("scale", "", None, 1/tp)                 what is seen and differs is divided by it
Repair("all-reduce", "tp")                      what is seen and differs is summed over tp first
Repair("all-reduce", "ep", gradient=Gradient)   a gradient is summed over ep in the backward pass of a function
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement, permutations
from math import isclose, prod

from rankmesh.sim.calls import Site
from rankmesh.sim.comparison.layouts import Layout
from rankmesh.sim.comparison.stacks import Gradient, Node

__all__ = ["Formula", "Repair", "equally_large", "formula_of", "reductions", "regroupings", "scalings"]

# How near a measured factor must be to a formula, which a trial then verifies.
_CLOSE = 1e-3


@dataclass(frozen=True)
class Formula:
    """Sizes of kinds of group, multiplied, over others.

    >>> str(Formula(("dp",), ("dp_cp",))), str(Formula((), ("dp", "tp"))), str(Formula(("tp",)))
    ('dp/dp_cp', '1/(dp*tp)', 'tp')
    """

    over: tuple[str, ...] = ()
    under: tuple[str, ...] = ()

    def __str__(self) -> str:
        under = "*".join(self.under)
        return ("*".join(self.over) or "1") + (f"/{under}" if len(self.under) == 1 else f"/({under})" if under else "")

    def value(self, layout: Layout) -> float:
        """Return the number under a layout."""
        kinds = layout.kinds
        return prod(kinds[kind].size for kind in self.over) / prod(kinds[kind].size for kind in self.under)


@dataclass(frozen=True)
class Repair:
    """One change: of the calls of a node and of ``others``, of a gradient, or without them of what is seen.

    ``others_fit`` are other formulas for the factor, which the layouts do not tell apart.
    """

    form: str
    kind: str = ""
    node: Node | None = None
    factor: Formula | None = None
    others: tuple[Node, ...] = ()
    gradient: Gradient | None = None
    others_fit: tuple[Formula, ...] = ()

    def changes(self, stack: Sequence[Site], kind: str) -> bool:
        """Return whether it is a change of this call."""
        return self.node is not None and any(node.matches(stack, kind) for node in (self.node, *self.others))

    def described(self) -> tuple[str, ...]:
        """Return how the user gets it."""
        details = (self.kind, self.factor, self.gradient, *self.others_fit)
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


def reductions(layouts: Sequence[Layout], gradient: Gradient | None = None) -> list[Repair]:
    """Return the sums of what is seen, or of a gradient, over each kind of group."""
    return [Repair("all-reduce", kind, gradient=gradient) for kind in _distinct(layouts)]


def equally_large(kind: str, layouts: Sequence[Layout]) -> list[str]:
    """Return kinds along other axes that have as many ranks as this one under every layout."""
    sizes = [layout.kinds[kind] for layout in layouts]
    return [
        other
        for other in _distinct(layouts)
        if not set(sizes[0].axes) & set(layouts[0].kinds[other].axes)
        and all(layout.kinds[other].size == one.size for layout, one in zip(layouts, sizes, strict=True))
    ]


def formula_of(factors: Mapping[Layout, float], likely: Formula | None = None) -> Formula | None:
    """Return the formula that has these values under these layouts: a likely one, else the shortest."""
    kinds = list(_distinct(list(factors)))
    for formula in chain([likely] if likely else [], _formulas(kinds)):
        if all(isclose(formula.value(layout), factor, rel_tol=_CLOSE) for layout, factor in factors.items()):
            return formula
    return None


def scalings(factors: Mapping[Layout, float]) -> list[Repair]:
    """Return the factor of what is seen that has these values, with others that these layouts do not tell apart."""
    formula = formula_of(factors)
    if formula is None:
        return []
    sizes = (*formula.over, *formula.under)
    others = equally_large(sizes[0], list(factors)) if len(sizes) == 1 else []
    forms = [Formula((kind,)) if formula.over else Formula((), (kind,)) for kind in others]
    return [Repair("scale", factor=formula, others_fit=tuple(forms))]


def _formulas(kinds: Sequence[str]) -> Iterator[Formula]:
    for kind in kinds:
        yield from (Formula((), (kind,)), Formula((kind,)))
    for first, second in permutations(kinds, 2):
        yield Formula((first,), (second,))
    for pair in combinations_with_replacement(kinds, 2):
        yield from (Formula((), pair), Formula(pair))
