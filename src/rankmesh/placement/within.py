"""Constraints: a kind of group within a level, whether a cluster can hold it, and which sizes it could.

```
within tp host       hosts of 8 8 6, tp=4      8 = 4 + 4    8 = 4 + 4    6 = 4 + 2 left over: refused, tp=2 would do
within ep nvlink     blocks of 72 72 72 40     2 + 2 + 2 + 1 of 8 groups of 32 fit: refused, 4 segments of 64 would do
```

Kinds that must stay within one level, and share ranks, stay there together: tp and cp within a host put tp x cp in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.plan import Plan
from rankmesh.core.strided import IntArray
from rankmesh.errors import PlacementError, quoted
from rankmesh.placement.cost import DeviceUnits

__all__ = ["SEGMENTS", "Bound", "bounds", "check_capacity", "check_kinds", "joined", "packing", "segments"]

# The level whose units Slurm calls blocks, and divides into segments.
SEGMENTS = "nvlink"


@dataclass(frozen=True)
class Bound:
    """One constraint: the groups of ``kind``, positions ``(groups, size)``, inside units of level number ``level``."""

    kind: str
    level: int
    groups: IntArray


def bounds(
    plan: Plan, cluster: Cluster, within: Mapping[str, str], positions: Callable[[str], IntArray]
) -> tuple[Bound, ...]:
    """Return the constraints by name of kind, checked against plan and cluster; innermost level first.

    ``positions(kind)`` returns the groups of a kind as positions.
    """
    if not isinstance(within, Mapping):
        raise PlacementError(f"within is {quoted(within)}; give the level of each kind, such as {{'tp': 'host'}}")
    check_kinds(within, plan.kinds, "within")
    found = [Bound(kind, cluster.level(level), positions(kind)) for kind, level in within.items()]
    return tuple(sorted(found, key=lambda bound: bound.level))


def check_kinds(named: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise ``PlacementError`` for a kind that a plan does not have; ``what`` names it."""
    for kind in named:
        if kind not in known:
            raise PlacementError(
                f"{what} names {quoted(kind)}, no kind of this plan; name one of {', '.join(known)}", kind=kind
            )


def joined(found: Sequence[Bound], level: int, size: int) -> IntArray:
    """Return the positions that must share a unit of a level, by number: the smallest position of each such set."""
    label = np.arange(size)
    lists = [bound.groups for bound in found if bound.level <= level and bound.groups.shape[1] > 1]
    while True:
        before = label.copy()
        for groups in lists:
            least = label[groups].min(axis=1)
            np.minimum.at(label, groups, np.broadcast_to(least[:, None], groups.shape))
        label = label[label]
        if np.array_equal(label, before):
            return label


def packing(found: Sequence[Bound], size: int) -> tuple[IntArray, tuple[int, ...]]:
    """Return the positions in an order that keeps joined ones next to each other, and the sizes of the joined sets."""
    keys = [joined(found, level, size) for level in sorted({bound.level for bound in found})]
    order = np.lexsort((np.arange(size), *keys))
    sizes = [int(np.bincount(key).max()) for key in keys]
    return order, tuple(sizes)


def check_capacity(plan: Plan, cluster: Cluster, found: Sequence[Bound], machine: DeviceUnits, given: IntArray) -> None:
    """Refuse a constraint that no placement can meet, with the group, the hosts, and what would do.

    ``given``: the device of each position in the order given.
    """
    size = machine.units.shape[1]
    for bound in found:
        label = joined(found, bound.level, size)
        counts = np.bincount(label, minlength=size)
        sets = counts[counts > 0]
        largest = int(sets.max())
        units = np.bincount(machine.units[bound.level])
        capacity = units[units > 0]
        if len(set(sets.tolist())) > 1 and largest <= int(capacity.max()):
            continue  # sets of several sizes: whether they fit together is tried, not computed
        spare = [unit for unit, devices in enumerate(units) if devices % largest or (0 < devices < largest)]
        if spare:
            here = machine.units[bound.level][given[bound.groups]]
            now = int((here == here[:, :1]).all(axis=1).sum())
            beside = [each for each in found if each.level <= bound.level and each.groups.shape[1] > 1]
            raise _refused(plan, cluster, bound, largest, spare, units, now, beside)


def _refused(
    plan: Plan,
    cluster: Cluster,
    bound: Bound,
    largest: int,
    spare: Sequence[int],
    units: IntArray,
    now: int,
    beside: Sequence[Bound],
) -> PlacementError:
    level = cluster.levels[bound.level].name
    count, size = bound.groups.shape
    names = cluster.unit_names(bound.level)
    shown = ", ".join(f"{names[unit]} ({units[unit]})" for unit in spare[:4]) + (" ..." if len(spare) > 4 else "")
    common = gcd(*(int(devices) for devices in units if devices))
    others = largest // size
    sizes = tuple(each for each in range(1, common + 1) if common % (each * others) == 0)
    nearest = sizes[-3:] if size > sizes[-1] else sizes if sizes else ()
    together = f", in sets of {largest} with what must be there too," if others > 1 else ""
    group = tuple(int(rank) for rank in plan.mesh.rank_range.ascending[bound.groups[0]])
    fit = min(count, int((units // largest).sum()) * largest * count // plan.mesh.size)
    asked = segments(cluster, bound.level, largest, plan.mesh.size)
    remedies = [f"sizes of {bound.kind} that would fit: {', '.join(map(str, nearest))}"] if sizes else []
    if asked is not None:
        slurm = f" (sbatch --segment={asked[1]})" if level == SEGMENTS else ""
        remedies.insert(0, f"ask for {asked[0]} segments of {asked[1]} hosts, each within one {level}{slurm}")
    problem = (
        f"{bound.kind} does not fit within {level}: {fit} of {count} {bound.kind} groups fit, {now} in the order "
        f"given, as groups of {size} ranks such as {list(group[:8])}{together} cannot fill {level} {shown}, whose "
        f"devices {largest} does not divide"
    )
    single = next((each for each in beside if common % each.groups.shape[1] == 0), None)
    if others > 1 and len(beside) > 1 and single is not None:
        kinds, both = " and ".join(each.kind for each in beside), "both" if len(beside) == 2 else "all"
        has = f"a {level} has {common}" if len(set(units[units > 0].tolist())) == 1 else f"{level} {shown}"
        problem = f"{kinds} cannot {both} stay inside a {level}: together they have {largest} ranks, {has}"
        remedies = [f"keep {single.kind}={cluster.levels[single.level].name}"]
    return PlacementError(
        f"{problem}; {'; or '.join(remedies) or 'loosen a constraint'}",
        kind=bound.kind,
        level=level,
        group=group,
        hosts=tuple(names[unit] for unit in spare),
        sizes=sizes,
        fit=fit,
        now=now,
        groups=count,
        segments=asked,
    )


def segments(cluster: Cluster, level: int, together: int, size: int) -> tuple[int, int] | None:
    """Return the numbers of segments, and of hosts in each, for ``size`` ranks, sets of ``together`` whole in a level.

    None where whole hosts do not make a set, and where the largest unit of the level has too few of them.

    >>> blocks = Cluster.parse("host=4,nvlink=18,leaf=4")
    >>> segments(blocks, 1, 32, 256)  # 8 sets of 8 hosts, of which a block of 18 holds two
    (4, 16)
    """
    devices = cluster.host_sizes
    width = max(devices)
    if level <= cluster.host_level or len(devices) > 1 or together % width:
        return None
    hosts, sets = together // width, size // together
    most = int(np.bincount(cluster.units[level]).max()) // together
    if most == 0:
        return None
    each = max(number for number in range(1, most + 1) if sets % number == 0)
    return sets // each, each * hosts
