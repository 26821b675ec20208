"""Discover: find the ranks that hold replicas, by the digests of their tensors; no torch, no communication.

```
step        0    2    3    5        a tensor's digest on two ranks, after these steps of the optimizer
rank 0      a    b    c    d
rank 1      a    b    c    d        equal and changed from check to check: replicas
rank 2      a    x    y    z        equal before the first step only: never replicas
```

A tensor that does not change between the checks of a window, as a frozen weight, is in no window and never compared: it
may be looked at in the next one. A window has steps without a common divisor, so values that are made equal every few
steps (local SGD) are not equal in all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain, pairwise

from rankmesh.core.grouped import grouped
from rankmesh.core.ranges import ranges, ranks_in

__all__ = [
    *("BEFORE", "Kind", "Merged", "combined", "differing", "discovered", "entry", "items", "merged", "of_rank"),
    *("parted", "windows"),
]

# The steps of the first windows; those that follow are multiples of the interval.
_EARLY = ((2, 3, 5), (10, 21, 40))
# Ranks up to which each tensor is an item of its own; of more, those that differ in a number in their names are one.
_SINGLE = 512
# At the end of an item: what it was before the first step.
BEFORE = "!"

# Ranks as ranges, by value, by item.
Merged = Mapping[str, Mapping[str, list[list[int]]]]
# Ranges of ranks, and the items that they hold alike.
Kind = tuple[list[list[int]], list[str]]


def windows(step: int, every: int) -> Iterator[tuple[int, int]]:
    """Yield the windows that have a check at this step, as the window's number and the check's place in it.

    >>> list(windows(3, 100)), list(windows(201, 100)), list(windows(4, 100))
    ([(0, 1)], [(2, 1)], [])
    """
    number, base = 0, every
    while number < len(_EARLY) or base <= step:
        if number < len(_EARLY):
            window = _EARLY[number]
        else:
            window, base = (base, 2 * base + 1, 3 * base + 1), base * 4
        if step in window:
            yield number, window.index(step)
        number += 1


def items(described: Mapping[str, str], world_size: int) -> dict[str, tuple[str, ...]]:
    """Return the names of each item, of tensors ``described`` by shape and dtype; its id is the same on every rank.

    >>> list(items({"layers.0.w": "[4]", "layers.1.w": "[4]"}, 1024).values())
    [('layers.0.w', 'layers.1.w')]
    """
    patterns = {name: re.sub(r"\d+", "#", name) if world_size > _SINGLE else name for name in described}
    same = grouped(((patterns[name], about), name) for name, about in sorted(described.items()))
    return {sha256(repr(key).encode()).hexdigest()[:8]: tuple(names) for key, names in same.items()}


def entry(
    window: Sequence[Mapping[str, int]],
    described: Mapping[str, Sequence[str]],
    owners: Mapping[str, str],
    before: Mapping[str, int],
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the values that a rank gives at the end of a window, by item, and the names in each of these items.

    ``window`` has the digests at its checks, ``before`` those before the first step, ``described`` the names of items,
    ``owners`` the parameter of each state of an optimizer. A parameter whose states do not change gets no gradient: it
    only decays, and its replicas do so wherever they began alike.
    """
    there = {name for name in window[0] if all(name in one for one in window)}
    changed = {name for name in there if all(one[name] != other[name] for one, other in pairwise(window))}
    changed -= {owners[name] for name in there - changed if name in owners}
    given, found = dict[str, str](), dict[str, list[str]]()
    for item, names in described.items():
        if moved := [name for name in names if name in changed]:
            found[item] = moved
            given[item] = combined(moved, [one[name] for one in window for name in moved])
            if all(name in before for name in moved):
                given[item + BEFORE] = combined(moved, [before[name] for name in moved])
    return given, found


def of_rank(rank: int, values: Mapping[str, str]) -> Merged:
    """Return the values of one rank in the form of merged ones.

    >>> merged([of_rank(0, {"w": "7"}), of_rank(1, {"w": "7"}), of_rank(2, {"w": "5"})])
    {'w': {'7': [[0, 2, 1]], '5': [[2, 3, 1]]}}
    """
    return {item: {value: [[rank, rank + 1, 1]]} for item, value in values.items()}


def merged(entries: Iterable[Merged]) -> Merged:
    """Return the ranks of each value that these have."""
    found = dict[str, dict[str, list[list[int]]]]()
    for item, several in grouped(pair for one in entries for pair in one.items()).items():
        values = grouped(pair for each in several for pair in each.items())
        found[item] = {value: ranges(sorted(ranks_in(chain.from_iterable(listed)))) for value, listed in values.items()}
    return found


def combined(names: Sequence[str], digests: Sequence[int]) -> str:
    """Return one value of the digests of tensors with these names."""
    return sha256(repr((names, digests)).encode()).hexdigest()[:16]


def discovered(given: Merged) -> list[Kind]:
    """Return the kinds of replicas that these values show: several ranks with one value of an item."""
    pairs = (
        (tuple(map(tuple, at)), item) for item, values in given.items() if BEFORE not in item for at in values.values()
    )
    return [([*map(list, at)], same) for at, same in sorted(grouped(pairs).items()) if len(ranks_in(at)) > 1]


def parted(given: Merged) -> tuple[tuple[int, ...], int]:
    """Return ranks that were equal before the first step and have all differed since, and in how many items."""
    found: list[list[int]] = []
    for item, values in given.items():
        now = given.get(item.removesuffix(BEFORE), {}) if item.endswith(BEFORE) else {}
        single = {rank for at in now.values() if len(ranks := ranks_in(at)) == 1 for rank in ranks}
        found += [ranks for at in values.values() if len(ranks := ranks_in(at)) > 1 and single.issuperset(ranks)]
    most = max(found, key=len, default=[])
    return tuple(most), found.count(most)


def differing(given: Merged) -> dict[str, dict[int, str]]:
    """Return each rank's value of the kinds in which the values differ."""
    several = ((kind, values.items()) for kind, values in given.items() if len(values) > 1)
    return {kind: dict(sorted((rank, one) for one, at in values for rank in ranks_in(at))) for kind, values in several}
