"""Names of equal tensors as one pattern: what layers and experts have in common, on one line.

>>> list(patterns(f"layers.{layer}.{name}" for layer in range(32) for name in ("up", "down")))
['layers.{0..31}.up', 'layers.{0..31}.down']
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

from rankmesh.core.grouped import grouped

__all__ = ["patterns", "reasons"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def patterns(names: Iterable[str]) -> dict[str, list[str]]:
    """Return patterns that stand for exactly these names, each with its names.

    >>> list(patterns(["a.0.b.1", "a.0.b.2", "a.1.b.1", "a.1.b.2", "a.3.b.1", "norm"]))
    ['a.{0,1}.b.{1,2}', 'a.3.b.1', 'norm']
    """
    equal: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
    for name in names:
        equal.setdefault(tuple(_NUMBER.split(name)), {})[tuple(map(int, _NUMBER.findall(name)))] = name
    made = {}
    for texts, by_numbers in equal.items():
        for sets in _products(by_numbers):
            shown = [*map(_shown, sets), ""]
            made["".join(map("".join, zip(texts, shown, strict=True)))] = [by_numbers[one] for one in product(*sets)]
    return made


def reasons(by_name: Mapping[str, str]) -> list[str]:
    """Return lines of names with a reason, those with the same one as patterns.

    >>> reasons({"a.0": "it is not a tensor", "a.1": "it is not a tensor"})
    ['a.{0,1}: it is not a tensor']
    """
    names = grouped((why, name) for name, why in by_name.items())
    return [f"{pattern}: {why}" for why, found in names.items() for pattern in patterns(found)]


def _products(tuples: Collection[tuple[int, ...]]) -> Iterator[list[Sequence[int]]]:
    """Yield products of sets that make up a set of tuples: equal rests share a set of first numbers."""
    if () in tuples:
        yield []
        return
    rests = grouped((one[0], one[1:]) for one in sorted(tuples))
    firsts = grouped((tuple(rest), first) for first, rest in rests.items())
    for rest_of, values in firsts.items():
        for others in _products(rest_of):
            yield [values, *others]


def _shown(values: Sequence[int]) -> str:
    """Format numbers that ascend: ``7``, ``{0..31}``, ``{0..2,5}``; a run is at least three."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] + 1 == value:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return parts[0] if len(values) == 1 else f"{{{','.join(parts)}}}"
