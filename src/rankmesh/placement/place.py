"""Place: the rank order of a plan that costs least on a cluster, within constraints.

```
plan + cluster + traffic ── candidates ── cost of each ── the cheapest that meets the constraints
                            the order given; every order of the axes; where few devices allow it, every placement;
                            from the best, steps that move one factor of an axis elsewhere
```

A placement permutes ranks and nothing else. On small clusters the answer is the least of all permutations; on large
ones it is the least of those that were tried. The launcher's order stays unless another one saves half a percent.

>>> from rankmesh.core import recipes
>>> cluster = Cluster.parse("host=2,leaf=2", hosts="node10,node9")
>>> traffic = {"tp": [{"collective": "all-reduce", "bytes": 1e6}]}
>>> placed = place(recipes.axes(Mesh(dp=2, tp=2)), cluster, traffic=traffic)
>>> placed.order, placed.rank_map, placed.cost < placed.before
('tp-dp', (2, 0, 3, 1), True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from math import factorial
from typing import Any

import numpy as np

from rankmesh.core.mesh import Mesh
from rankmesh.core.plan import Plan
from rankmesh.core.strided import IntArray
from rankmesh.errors import PlacementError, quoted
from rankmesh.placement.cluster import Cluster
from rankmesh.placement.cost import DeviceUnits, FloatArray, HopCounts, seconds
from rankmesh.placement.orders import Factor, Filler, labelings, mesh_factors, primes, words
from rankmesh.placement.steps import default_traffic
from rankmesh.placement.traffic import Traffic
from rankmesh.placement.within import Bound, bounds, check_capacity, packing

__all__ = ["Costing", "KindCost", "Placed", "devices_of", "place"]

# The part of the cost that a placement must save to be proposed.
WORTH = 0.005
# Up to so many ways to deal positions to hosts, all of them are tried.
_EXACT = 50_000
# Up to so many orders of factors are tried; and how much work (positions looked at) goes into moving factors about.
_ORDERS, _WORK = 720, 5_000_000
_PIECE = 2_000_000
_SAME = 1 + 1e-9

Order = tuple[Factor, ...]


@dataclass(frozen=True, repr=False)
class KindCost:
    """One kind: the innermost level that holds each of its groups, and its seconds a step, after and before."""

    name: str
    level: str
    cost: float
    before: float
    level_before: str

    def __repr__(self) -> str:
        from rankmesh.placement.report import duration

        return (
            f"KindCost({self.name}: {duration(self.cost)} within {self.level}, "
            f"before {duration(self.before)} within {self.level_before})"
        )


@dataclass(frozen=True, repr=False)
class Placed:
    """A placement: ``plan`` with its ``rank_map``, seconds a step of communication after and before, and why."""

    plan: Plan
    order: str
    rank_map: tuple[int, ...]
    cost: float
    before: float
    kinds: tuple[KindCost, ...]
    within: Mapping[str, str]
    exact: bool
    tried: int
    cluster: Cluster
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what ``rankmesh place --json`` prints."""
        return {
            "order": self.order,
            "rank_map": list(self.rank_map),
            "cost": self.cost,
            "before": self.before,
            "kinds": [asdict(kind) for kind in self.kinds],
            "within": dict(self.within),
            "exact": self.exact,
            "tried": self.tried,
            "hosts": [{"name": name, "holds": holds} for name, holds in self.by_host().items()],
        }

    def by_host(self) -> dict[str, str]:
        """Return what each host holds, by axes: ``{"node2": "tp 0-7 of dp 0"}``; hosts in natural order."""
        from rankmesh.placement.report import by_host

        return by_host(self)

    def __repr__(self) -> str:
        from rankmesh.placement.report import duration

        cost = f"{duration(self.before)} before, {duration(self.cost)} after"
        return f"Placed({self.order}, {len(self.rank_map):,} ranks, {cost}, digest {self.plan.digest[:12]})"

    def report(self) -> str:
        """Before, after and why, in words."""
        from rankmesh.placement.report import report

        return report(self)


class Costing:
    """What placements of one plan cost: devices ``(placements, positions)`` in, seconds out."""

    def __init__(
        self,
        groups: Mapping[str, IntArray],
        machine: DeviceUnits,
        traffic: Traffic,
        found: Sequence[Bound] = (),
        *,
        backend: str = "nccl",
    ) -> None:
        self.machine, self.backend = machine, backend
        self._groups, self._traffic, self._bounds = groups, traffic, found
        self._kinds = [name for name in traffic if groups[name].shape[1] > 1]
        self.tried = 0

    def dearest_first(self, devices: IntArray) -> None:
        """Count the kinds that cost most under a placement first, so that a bad one is known for it soon."""
        self._kinds.sort(key=lambda name: -float(self.kind(name, self.counts(name, devices[None]))[0]))

    def counts(self, name: str, devices: IntArray) -> HopCounts:
        """Return the hops of one kind under each placement."""
        return HopCounts(self._groups[name], self.machine, devices, backend=self.backend)

    def kind(self, name: str, counts: HopCounts) -> FloatArray:
        """Return the seconds of one kind under each placement."""
        return seconds(self._traffic.get(name, ()), counts)

    def costs(self, devices: IntArray, limit: float = np.inf) -> FloatArray:
        """Seconds of all kinds under each placement; infinite where a constraint is not met.

        Beyond the ``limit`` a cost need not be counted to its end.
        """
        step = max(1, _PIECE // devices.shape[1])
        pieces = [self._costs(devices[start : start + step], limit) for start in range(0, len(devices), step)]
        self.tried += len(devices)
        return np.concatenate(pieces)

    def _costs(self, devices: IntArray, limit: float) -> FloatArray:
        total = np.where(self._broken(devices), np.inf, 0.0)
        for name in self._kinds:
            if (total > limit * _SAME).all():
                break
            total += self.kind(name, self.counts(name, devices))
        return total

    def _broken(self, devices: IntArray) -> Any:
        broken = np.zeros(len(devices), dtype=np.bool_)
        for bound in self._bounds:
            units = self.machine.units[bound.level][devices[:, bound.groups]]
            broken |= (units != units[..., :1]).any(axis=(1, 2))
        return broken


def place(
    plan: Plan,
    cluster: Cluster,
    *,
    within: Mapping[str, str] | None = None,
    traffic: Traffic | Mapping[str, Any] | None = None,
    backend: str = "nccl",
    exact: bool = True,
) -> Placed:
    """Return the placement of a plan on a cluster that costs least; the plan's own rank map is the launcher's order.

    ``within``   the level that each group of a kind must stay inside, by name: ``{"tp": "host"}``
    ``traffic``  what a step sends in each kind; without, that of a usual transformer on the same axes
    ``backend``  nccl or gloo: how the collectives are done
    ``exact``    whether all placements are tried where the cluster is small enough

    Raises ``PlacementError`` for a constraint that cannot be met, with the group, the hosts, and sizes that would do,
    and for traffic of kinds that the plan has not; ``ClusterError`` for a cluster with fewer devices than ranks.
    """
    plain = plan.replace(rank_map=None)
    known = {name: plain.mesh.rank_range.positions(groups.array) for name, groups in plain.kinds.items()}
    sent, notes = _traffic(plan, known, traffic)
    found = bounds(plan, cluster, within or {}, known)
    ranks, machine, given = devices_of(plan, cluster)
    check_capacity(plan, cluster, found, machine)
    costing = Costing(known, machine, sent, found, backend=backend)
    best, whole = _search(plan.mesh, costing, Filler(machine), found, given, exact)
    tried = costing.tried
    now, least = costing.costs(np.stack([given, best])).tolist()
    if least > now * (1 - WORTH):  # the order given costs as much, within what a prediction can tell
        best = given
    rank_map = tuple(ranks[best].tolist())
    kinds = tuple(_kind(name, costing, best, given) for name in plan.kinds if name in {*sent, *(within or {})})
    defaults = ", ".join(cluster.default_levels)
    assumed = [f"the bandwidths of {defaults} are defaults, not measured (rankmesh measure --save)"] if defaults else []
    return Placed(
        plan=plan.replace(rank_map=rank_map),
        order=words(plan.mesh, best),
        rank_map=rank_map,
        cost=sum(kind.cost for kind in kinds),
        before=sum(kind.before for kind in kinds),
        kinds=kinds,
        within=dict(within or {}),
        exact=whole,
        tried=tried,
        cluster=cluster,
        notes=(*cluster.notes, *notes, *assumed),
    )


def _traffic(
    plan: Plan, known: Mapping[str, IntArray], traffic: Traffic | Mapping[str, Any] | None
) -> tuple[Traffic, tuple[str, ...]]:
    if traffic is None:
        return default_traffic(plan)
    sent = traffic if isinstance(traffic, Traffic) else Traffic(traffic)
    for name in sent:
        if name not in known:
            raise PlacementError(
                f"traffic of {quoted(name)} is of no kind of this plan; name one of {', '.join(known)}", kind=name
            )
    return sent, ()


def devices_of(plan: Plan, cluster: Cluster) -> tuple[IntArray, DeviceUnits, IntArray]:
    """Return the plan's ranks in nested order of their devices, the machine of these, and the order given."""
    rank_range = plan.mesh.rank_range
    ranks = rank_range.ascending
    cluster.hosts_of(ranks)
    place_of = np.empty(cluster.size, dtype=np.int64)
    place_of[cluster.ranks] = np.arange(cluster.size)
    nested = ranks[np.lexsort((place_of[ranks], *cluster.units[:, ranks]))]
    device_of = np.empty(rank_range.size, dtype=np.int64)
    device_of[np.searchsorted(ranks, nested)] = np.arange(rank_range.size)
    given = device_of[np.searchsorted(ranks, rank_range.ranks(np.arange(rank_range.size)))]
    return nested, DeviceUnits.of(cluster, nested), given


def _search(
    mesh: Mesh, costing: Costing, filler: Filler, found: Sequence[Bound], given: IntArray, exact: bool
) -> tuple[IntArray, bool]:
    """Return the cheapest devices, and whether they are the least of all placements."""
    costing.dearest_first(given)
    hosts = costing.machine.units[0]
    starts = np.flatnonzero(np.diff(hosts, prepend=-1))
    labels = labelings(np.diff(starts, append=len(hosts)).tolist(), _EXACT) if exact else None
    orders = _orders(mesh_factors(mesh))
    by_order = _evaluated(costing, filler, orders)
    steps = 0 if labels is not None or not exact else max(0, int(_WORK / mesh.size) - len(orders))
    best, cost = _moved(costing, filler, orders, by_order, steps)
    others = [given] + ([filler.place(*packing(found, costing.machine, mesh.size))] if found else [])
    other, less = _least(costing, np.stack(others))
    if not cost * _SAME < less:
        best, cost = other, less
    if labels is not None:
        # Devices of one host are alike: positions take them in order.
        other, less = _least(costing, np.argsort(np.argsort(labels, axis=1, kind="stable"), axis=1))
        best, cost = (other, less) if less * _SAME < cost else (best, cost)
    if not np.isfinite(cost):
        raise _unmet(costing, found)
    return best, labels is not None


def _unmet(costing: Costing, found: Sequence[Bound]) -> PlacementError:
    listed = ", ".join(f"{bound.kind} within {costing.machine.levels[bound.level].name}" for bound in found)
    return PlacementError(
        f"none of the {costing.tried:,} placements tried meets all constraints ({listed}); loosen one",
        kinds=tuple(bound.kind for bound in found),
    )


def _evaluated(costing: Costing, filler: Filler, orders: Sequence[Order], limit: float = np.inf) -> FloatArray:
    """Return the cost of each order; of one that is no better than the best so far, a part of its cost."""
    found: list[float] = []
    for order in orders:
        found.append(float(costing.costs(filler.of(order)[None], min(found, default=limit))[0]))
    return np.array(found)


def _least(costing: Costing, devices: IntArray) -> tuple[IntArray, float]:
    """Return the first of the placements that costs least: one that comes earlier is kept where nothing is gained."""
    costs = costing.costs(devices)
    least = float(costs.min())
    chosen = int(np.argmax(costs <= least * _SAME))
    return devices[chosen], float(costs[chosen])


def _orders(factors: Sequence[Factor]) -> list[Order]:
    """Return every order of the factors, the given one first; of too many, the given one and the reverse."""
    if factorial(len(factors)) <= _ORDERS:
        return list(permutations(factors))
    return [tuple(factors), tuple(reversed(factors))]


def _moved(
    costing: Costing, filler: Filler, orders: Sequence[Order], costs: FloatArray, steps: int
) -> tuple[IntArray, float]:
    """Move one prime part of an axis at a time from the best order, while that helps and steps are left."""
    chosen = int(np.argmax(costs <= float(costs.min()) * _SAME))
    order, cost = orders[chosen], float(costs[chosen])
    parts = primes(order)
    while steps > 0:
        moves = list(dict.fromkeys(_moves(parts)))[:steps]
        steps -= max(1, len(moves))
        after = _evaluated(costing, filler, moves, cost) if moves else costs
        if not moves or not float(after.min()) * _SAME < cost:
            break
        parts = order = moves[int(after.argmin())]
        cost = float(after.min())
    return filler.of(order), cost


def _moves(order: Sequence[Factor]) -> Iterator[Order]:
    for start in range(len(order)):
        rest = [*order[:start], *order[start + 1 :]]
        for end in range(len(order)):
            if end != start:
                yield (*rest[:end], order[start], *rest[end:])


def _kind(name: str, costing: Costing, best: IntArray, given: IntArray) -> KindCost:
    counts = costing.counts(name, np.stack([best, given]))
    after, before = costing.kind(name, counts).tolist()
    level, was = (costing.machine.levels[int(number)].name for number in counts.widest)
    return KindCost(name, level, after, before, was)
