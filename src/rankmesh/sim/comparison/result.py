"""The result of a comparison: whether all layouts have the same numbers, and what differs first.

>>> Difference("loss", "dp=2", (0, 1), 2.0, 4.0, "train.py:41", "all-reduce", "dp", ("scale", "1/dp")).fix
'divide its result by the size of dp'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rankmesh.errors import in_words

__all__ = ["Comparison", "Difference"]

_LINES = 12
# Differences that are equal but for rounding.
_EQUALLY = 1e-6


@dataclass(frozen=True)
class Difference:
    """The first thing seen that differs, in the order of the program.

    ``name``, ``layout``    what, and under which layout; ``ranks`` saw it differ, or did not see a part of it
    ``why``                 ``"value"``, ``"shape"``, ``"unseen"`` (by some rank), ``"extra"`` (one process does not
                            see it) or ``"failed"`` (the program did before); ``error``: the most that an element is off
    ``expected``, ``got``   a number, or the tensor of the first of these ranks; None where nobody saw it
    ``site``                ``"train.py:41"``: the collective that made it differ; ``sim.see`` where no line is known
                            to be wrong
    ``operation, group``    ``"all-reduce"``, ``"dp"``; None where no collective is known to be wrong
    ``repair``              ``("group", "dp_cp")``; ``("scale", "1/dp")``, or with other factors that the layouts do not
                            tell apart; ``("all-reduce", "tp")`` of what is seen; None
    ``settles``             whether with the repair everything seen is right, under every layout but the ``untried``
    ``lines``               from the collective to ``site``, as ``file:line in function``, innermost first
    ``others``              the lines of the calls that the repair changes as well
    ``failure``             the message of the error with which the program fails, where it does
    ``before``              the first collective that gets other numbers than on one process, where no line is known
    """

    name: str
    layout: str
    ranks: tuple[int, ...]
    expected: float | torch.Tensor | None
    got: float | torch.Tensor | None
    site: str | None
    operation: str | None = None
    group: str | None = None
    repair: tuple[str, ...] | None = None
    settles: bool = False
    lines: tuple[str, ...] = ()
    number: int = 0
    why: str = "value"
    error: float = 0.0
    untried: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    failure: str = ""
    before: str | None = None

    @property
    def fix(self) -> str | None:
        """The repair in words."""
        if self.repair is None:
            return None
        form, what, *more = self.repair
        if form == "scale":
            ways = [_scaled(self.name if self.operation is None else "its result", one) for one in (what, *more)]
            return " or ".join(ways) + (", which these layouts do not tell apart" if more else "")
        if form == "all-reduce":
            return f"sum {self.name} over {what}"
        others = "".join(f", and {line} with it" for line in dict.fromkeys(self.others) if line != self.site)
        return f"make it on {what}{others}"

    def __str__(self) -> str:
        nth = f" (its value {self.number})" if self.number else ""
        if self.why == "failed":
            return f"the program fails under {self.layout}, on {in_words(self.ranks)}, before {self.name}{nth} is right"
        return f"{self.name}{nth} differs under {self.layout}, on {in_words(self.ranks)}: {self._values()}"

    def _values(self) -> str:
        if self.why == "unseen":
            return "a part of it was seen by no rank"
        if self.why == "extra":
            return "one process does not see it"
        if self.why == "shape":
            return f"shape {_shape(self.got)} where its cut gives {_shape(self.expected)}"
        if isinstance(self.expected, float) and isinstance(self.got, float):
            return f"{self.got:.6g} where one process has {self.expected:.6g}"
        worst = self.worst
        if worst is None:
            return f"by up to {self.error:.2g}"
        where, expected, got = worst
        return f"by up to {self.error:.2g}, element {where} is {got:.6g} where one process has {expected:.6g}"

    @property
    def worst(self) -> tuple[list[int], float, float] | None:
        """The element that differs most: where it is, what one process has there, what the rank got.

        It is the first of those that differ equally: rounding, which depends on the machine, does not choose. None
        where the shapes differ, a side is missing, or the values are complex.
        """
        expected, got = (
            torch.tensor(one, dtype=torch.float64) if isinstance(one, float) else one
            for one in (self.expected, self.got)
        )
        if expected is None or got is None or expected.shape != got.shape:
            return None
        if not expected.numel() or expected.is_complex():
            return None
        left, right = expected.double().flatten(), got.double().flatten()
        apart = (left - right).abs().nan_to_num(nan=torch.inf)
        index = int((apart >= apart.max() * (1 - _EQUALLY)).to(torch.uint8).argmax())
        where = [int(place) for place in np.unravel_index(index, expected.shape)]
        return where, float(left[index]), float(right[index])

    def _plain(self) -> dict[str, object]:
        """Plain data; ``element`` is where the value differs most."""
        names = ("site", "operation", "group", "repair", "settles", "untried", "others", "lines", "before")
        given = {name: getattr(self, name) for name in names}
        element, expected, got = self.worst or (None, None, None)
        return {
            "name": self.name,
            "layout": self.layout,
            "ranks": list(self.ranks),
            "element": element,
            "expected": _finite(expected),
            "got": _finite(got),
            **{name: list(value) if isinstance(value, tuple) else value for name, value in given.items()},
        }


def _known(first: Difference) -> str:
    """Return the facts that are known of the line that is named."""
    form, what, *_ = first.repair or ("", "")
    if first.operation is not None:
        made = "made it fail" if first.why == "failed" else "made it differ"
        done = {"": "gets the right numbers; its result differs", "scale": "has a result that is off by a factor"}
        return f"the {first.operation} over {first.group} {done.get(form, made)}"
    if form == "all-reduce":
        return f"a sum over {what} is missing before this line"
    if first.before:
        return "the first collective that gets other numbers than on one process; the mistake is before it"
    return f"it {'is off by a factor' if form else 'differs'} here, and no line is known to be wrong"


def _scaled(subject: str, factor: str) -> str:
    """Return a factor in words.

    >>> _scaled("loss", "1/dp"), _scaled("loss", "tp")
    ('divide loss by the size of dp', 'multiply loss by the size of tp')
    """
    over, _, under = factor.partition("/")
    return f"divide {subject} by the size of {under}" if under else f"multiply {subject} by the size of {over}"


def _values(count: int) -> str:
    return f"{count} values differ" if count > 1 else "1 value differs"


def _finite(value: float | None) -> float | None:
    """Return a number that JSON has, else None."""
    return value if value is not None and math.isfinite(value) else None


def _shape(value: object) -> list[int]:
    return list(value.shape) if isinstance(value, torch.Tensor) else []


@dataclass(frozen=True)
class Comparison:
    """The values that one program sees under several layouts.

    ``layouts``     their names; ``first`` is what differs first, None where nothing does
    ``errors``      for each layout by name of what was seen its largest difference, in units of its largest element
    ``differing``   for each layout the names that differ
    ``tolerance``   what was asked for; ``raised`` names the values that are noisier, with what they may differ by
    ``dtype``       torch's default in the program; ``refused`` is the error that it raised in float64
    """

    layouts: tuple[str, ...]
    first: Difference | None
    tolerance: float
    dtype: str
    errors: Mapping[str, Mapping[str, float]]
    differing: Mapping[str, Sequence[str]]
    spread: float = 0.0
    raised: Mapping[str, float] = field(default_factory=dict)
    others: int = 0
    refused: str = ""

    @property
    def same(self) -> bool:
        """Return whether every layout has the numbers of one process."""
        return self.first is None

    def __bool__(self) -> bool:
        return self.same

    def report(self) -> str:
        """Return the result in words."""
        count = len({name for names in self.errors.values() for name in names})
        of = f"{count} value{'s' * (count != 1)} under {len(self.layouts)} layout{'s' * (len(self.layouts) != 1)}"
        if self.first is None:
            lines = [f"same: {of}"]
        else:
            unrepaired = "could not be repaired: " if self.first.repair is None else ""
            lines = [f"{unrepaired}{self.first}", *self._cause(self.first)]
            lines += (
                [f"  {layout}: {_values(len(names))}" for layout, names in self.differing.items() if names]
                if self.others
                else []
            )
        return "\n".join([*lines, self._noise()])

    def _cause(self, first: Difference) -> list[str]:
        lines = [f"  {first.before or first.site}: {_known(first)}"]
        lines += [f"    reached by {line}" for line in first.lines[:_LINES]] if len(first.lines) > 1 else []
        if first.fix is not None:
            rest = "then everything is the same" if first.settles else "then it is right, and other values differ still"
            untried = f"; under {', '.join(first.untried)} it could not be tried" if first.untried else ""
            lines.append(f"  fix: {first.fix}; tried, and {rest}{untried}")
        lines += [f"  {line}" for line in first.failure.splitlines()]
        return lines

    def _noise(self) -> str:
        # A power of ten, as the digits depend on the machine.
        spread = 10.0 ** math.ceil(math.log10(max(self.spread, torch.finfo(getattr(torch, self.dtype)).eps)))
        text = (
            f"tolerance {self.tolerance:g} of a value's largest element; in {self.dtype} one process moves by "
            f"less than {spread:.0e} when it sums in another order"
        )
        text += f"; with float64 as default dtype the program fails ({self.refused})" if self.refused else ""
        noisy = [f"{name} {most:.1g}" for name, most in list(self.raised.items())[:_LINES]]
        return f"{text}; noisier than the tolerance, and allowed more: {', '.join(noisy)}" if noisy else text

    def to_dict(self) -> dict[str, object]:
        """Plain data, as ``rankmesh compare --json`` prints it."""
        return {
            "same": self.same,
            "layouts": list(self.layouts),
            "first": None if self.first is None else self.first._plain(),
            "errors": {
                layout: {name: _finite(error) for name, error in errors.items()}
                for layout, errors in self.errors.items()
            },
            "differing": {layout: list(names) for layout, names in self.differing.items()},
            "tolerance": self.tolerance,
            "spread": self.spread,
            "dtype": self.dtype,
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return a heading and a row for each value: its difference under each layout, ``!`` where too large."""
        names = list(
            dict.fromkeys(
                name for by_layout in (self.errors, self.differing) for names in by_layout.values() for name in names
            )
        )
        rows = [[name, *(self._cell(layout, name) for layout in self.layouts)] for name in names]
        return ["value", *self.layouts], rows

    def _cell(self, layout: str, name: str) -> str:
        wrong = name in self.differing[layout]
        error = self.errors[layout].get(name)
        shown = "unseen" if error is None else f"{error:.0e}" if error else "0"
        return f"{shown} !" if wrong else shown
