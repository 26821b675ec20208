"""Place: the rank order of a plan that costs least on a cluster, within constraints.

```
plan + cluster + model ──── candidates ── cost of each ── the cheapest that meets the constraints
                            the order given; every order of the axes; where few devices allow it, every placement;
                            from the best, steps that move one factor of an axis elsewhere
```

The cost is what communication adds to the step that ``search`` predicts of the model: what hides behind computation
adds nothing. Of a traffic file, which has no computation, it is the seconds of all messages.

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

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from math import factorial

import numpy as np

from rankmesh.core.clusters.cluster import Cluster
from rankmesh.core.clusters.hardware import DEVICES, Device
from rankmesh.core.clusters.levels import in_words
from rankmesh.core.mesh import Mesh
from rankmesh.core.model import Training, Transformer, check_sizes
from rankmesh.core.plan import Plan
from rankmesh.core.strided import IntArray
from rankmesh.errors import PlacementError, at_caller, quoted
from rankmesh.placement import report
from rankmesh.placement.cost import BoolArray, FloatArray
from rankmesh.placement.orders import Factor, Filler, labelings, mesh_factors, primes, words
from rankmesh.placement.predict import Links, Prediction, Step
from rankmesh.placement.steps import Roles, step_traffic, usual_work
from rankmesh.placement.traffic import Message, Traffic
from rankmesh.placement.within import Bound, bounds, check_capacity, check_kinds, packing

__all__ = ["Costing", "KindCost", "Placed", "place"]

# The part of the cost that a placement must save to be proposed.
WORTH = 0.005
# Up to this many ways to give positions to hosts, all are tried.
_EXACT = 50_000
# Orders of factors that are tried at most; positions that are evaluated while factors are moved.
_ORDERS, _WORK = 720, 5_000_000
_PIECE = 2_000_000
_SAME = 1 + 1e-9

Order = tuple[Factor, ...]
# Seconds under each placement of the links; beyond the limit they need not be counted to their end.
Objective = Callable[[Links, float], FloatArray]


@dataclass(frozen=True, repr=False)
class KindCost:
    """One kind: the innermost level that holds each of its groups, and seconds a step on its links, after and before.

    Communication that hides behind computation counts in these seconds, too.
    """

    name: str
    level: str
    cost: float
    before: float
    level_before: str

    def __repr__(self) -> str:
        return (
            f"KindCost({self.name}: {report.duration(self.cost)} within {self.level}, "
            f"before {report.duration(self.before)} within {self.level_before})"
        )


@dataclass(frozen=True, repr=False)
class Placed:
    """A placement: ``plan`` with its ``rank_map``, seconds that communication adds to a step after and before, and why.

    ``links``  what NCCL is assumed to use between devices, in words
    ``step``  the predicted step, ``step_before`` that in the order given; None where traffic alone is known
    """

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
    step: Step | None = None
    step_before: Step | None = None
    links: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the data of ``rankmesh place --json``; ``devices``: of each host, in the order of its positions."""
        data = {
            "order": self.order,
            "rank_map": list(self.rank_map),
            "cost": self.cost,
            "before": self.before,
            "kinds": [asdict(kind) for kind in self.kinds],
            "within": dict(self.within),
            "exact": self.exact,
            "tried": self.tried,
            "links": self.links,
            "hosts": [{"name": name, "holds": holds} for name, holds in self.by_host().items()],
            "devices": {name: list(order) for name, order in report.device_order(self).items()},
        }
        if self.step is not None and self.step_before is not None:
            data["step"] = {
                "seconds": self.step.seconds,
                "before": self.step_before.seconds,
                "seconds_by_part": dict(self.step.parts),
                "hidden": dict(self.step.hidden),
            }
        return data

    @property
    def unchanged(self) -> bool:
        """Return whether the ranks ascend, so that the launcher's order is the placement."""
        return self.rank_map == tuple(sorted(self.rank_map))

    def to_json(self) -> str:
        """Return the plan as JSON text, with the hosts in the launcher's order, by which ``show`` finds its ranks."""
        data = json.loads(self.plan.to_json())
        return json.dumps(data if self.cluster.filled is None else data | {"hosts": self.cluster.filled}, indent=2)

    def hostfile(self) -> tuple[str, ...]:
        """Return the host of each position: a launcher that starts its ranks there needs no rank map.

        Raises ``PlacementError`` where the hosts alone do not decide it.
        """
        return report.hostfile(self)

    def by_host(self) -> dict[str, str]:
        """Return the coordinates on each host, by axes: ``{"node2": "tp 0-7 of dp 0"}``; hosts in natural order."""
        return report.by_host(self)

    def __repr__(self) -> str:
        cost = f"{report.duration(self.before)} before, {report.duration(self.cost)} after"
        return f"Placed({self.order}, {len(self.rank_map):,} ranks, {cost}, digest {self.plan.digest[:12]})"

    def report(self) -> str:
        """Return the cost before and after, and the reasons, as text."""
        return report.report(self)


class Costing:
    """The cost of placements of one plan: devices ``(placements, positions)`` in, seconds out.

    ``bounds`` are the constraints; ``filler`` has the devices of an order of factors.
    """

    def __init__(self, links: Links, objective: Objective, found: Sequence[Bound]) -> None:
        self.machine, self.bounds, self.filler = links.machine, found, Filler(links.machine)
        self._links, self._objective = links, objective
        self.tried = 0

    def costs(self, devices: IntArray, limit: float = np.inf) -> FloatArray:
        """Return the seconds under each placement; infinite where a constraint is not met.

        Beyond the ``limit`` a cost need not be counted to its end.
        """
        step = max(1, _PIECE // devices.shape[1])
        pieces = [self._costs(devices[start : start + step], limit) for start in range(0, len(devices), step)]
        self.tried += len(devices)
        return np.concatenate(pieces)

    def _costs(self, devices: IntArray, limit: float) -> FloatArray:
        broken = self._broken(devices)
        found: FloatArray = np.full(len(devices), np.inf)
        if not broken.all():
            found[~broken] = self._objective(self._links.under(devices[~broken]), limit)
        return found

    def _broken(self, devices: IntArray) -> BoolArray:
        broken = np.zeros(len(devices), dtype=np.bool_)
        for bound in self.bounds:
            units = self.machine.units[bound.level][devices[:, bound.groups]]
            broken |= (units != units[..., :1]).any(axis=(1, 2))
        return broken


@at_caller
def place(
    plan: Plan,
    cluster: Cluster,
    *,
    within: Mapping[str, str] | None = None,
    traffic: Traffic | Mapping[str, Iterable[Message | Mapping[str, object]]] | None = None,
    model: Transformer | None = None,
    training: Training | None = None,
    device: Device = DEVICES["h100"],
    speed: float | None = None,
    backend: str = "nccl",
    exact: bool = True,
) -> Placed:
    """Return the placement of a plan on a cluster that costs least; the plan's own rank map is the launcher's order.

    Args:
        plan: the groups to place.
        cluster: the hosts and links.
        within: the level that each group of a kind must stay inside, by name: ``{"tp": "host"}``. Default: none.
        traffic: bytes that a step sends in each kind, in place of a model: all of it costs time, since it is not known
            what hides it.
        model: the placement with the least predicted step of this model is found, as ``search`` predicts it:
            communication that computation hides costs nothing. Default: a usual transformer on the same axes.
        training: how ``model`` is trained.
        device: the accelerator that computes (default h100).
        speed: FLOP/s that the device reaches, in place of the model of its kernels.
        backend: the library that runs the collectives: nccl (default) or gloo.
        exact: whether all placements are tried if the cluster is small enough (default True).

    Raises ``PlacementError`` for a constraint that cannot be met, with the group, the hosts, how many groups fit and
    what would do, for traffic of kinds that the plan has not, and for a batch that its replicas do not divide;
    ``ClusterError`` for a cluster with fewer devices than ranks.
    """
    if not isinstance(cluster, Cluster):
        raise PlacementError(f"expected a Cluster, got {quoted(cluster)}; pass Cluster.parse('host=8')")
    links = Links(plan, cluster, backend, device)
    work, notes = _work(plan, links.roles, model, training, traffic)
    found = bounds(plan, cluster, within or {}, links.positions)
    given, prediction = links.given, None
    check_capacity(plan, cluster, found, links.machine, given)
    if isinstance(work, Traffic):
        check_kinds(work, plan.kinds, "traffic")
        sent, objective = work, _communication(work, links)
    else:
        sent = step_traffic(plan, *work)
        prediction = Prediction(*work, device if speed is None else replace(device, speed=speed), links.roles)
        objective = _added(prediction, links)
    costing = Costing(links, objective, found)
    best, whole = _search(plan.mesh, costing, given, exact)
    tried = costing.tried
    now, least = costing.costs(np.stack([given, best])).tolist()
    if least > now * (1 - WORTH):  # the order given costs as much, within what a prediction can tell
        best = given
    rank_map = tuple(links.ranks[best].tolist())
    both = links.under(np.stack([best, given]))
    cost, cost_before = objective(both, np.inf).tolist()  # of the order given, too, if it breaks a constraint
    step, before = (
        None if prediction is None else prediction.step(links.under(devices[None])) for devices in (best, given)
    )
    links_in_words = in_words(cluster.levels, max(cluster.host_sizes), device)
    defaults = ", ".join(cluster.default_levels)
    assumed = [f"{links_in_words}; {defaults} by default, not measured (rankmesh measure --save)"] if defaults else []
    return Placed(
        plan=plan.replace(rank_map=rank_map),
        order=words(plan.mesh, best),
        rank_map=rank_map,
        cost=cost,
        before=cost_before,
        kinds=tuple(_kind(name, sent, both, cluster) for name in plan.kinds if name in {*sent, *(within or {})}),
        within=dict(within or {}),
        exact=whole,
        tried=tried,
        cluster=cluster,
        notes=(*cluster.notes, *notes, *assumed),
        step=step,
        step_before=before,
        links=links_in_words,
    )


Work = tuple[Transformer, Training]


def _work(
    plan: Plan,
    roles: Roles,
    model: Transformer | None,
    training: Training | None,
    traffic: Traffic | Mapping[str, Iterable[Message | Mapping[str, object]]] | None,
) -> tuple[Work | Traffic, tuple[str, ...]]:
    """Return model and training, or the traffic alone; and a note if it is assumed."""
    if (model is None) != (training is None) or (model is not None and traffic is not None):
        raise PlacementError("a placement is by a model and its training, or by traffic alone; give one of the two")
    if model is not None and training is not None:
        check_sizes(model, training, roles.layout)
        return (model, training), ()
    if traffic is not None:
        return traffic if isinstance(traffic, Traffic) else Traffic(traffic), ()
    usual = usual_work(roles)
    if step_traffic(plan, *usual):
        note = "the model is a usual transformer; say yours with a model, a batch and a sequence, or a traffic file"
        return usual, (note,)
    known = {name: [Message("all-reduce", 2**20)] for name, groups in plan.kinds.items() if groups.size > 1}
    return Traffic(known), ("the traffic is an all-reduce of 1 MiB for each kind; say yours with a traffic file",)


def _communication(traffic: Traffic, given: Links) -> Objective:
    """Return the seconds of all messages as an objective; the costliest kind first."""
    kinds = sorted(traffic, key=lambda name: -given.seconds(name, traffic[name]))

    def cost(links: Links, limit: float) -> FloatArray:
        total = np.zeros(links.many)
        for name in kinds:
            if (total > limit * _SAME).all():
                break
            total += links.seconds(name, traffic[name])
        return total

    return cost


def _added(prediction: Prediction, given: Links) -> Objective:
    """Return the seconds that communication adds to a predicted step as an objective.

    The kind that adds most is evaluated alone first, so that a bad placement is rejected early.
    """
    without = prediction.step(given.only(())).seconds
    dearest = max(given.roles.names.values(), key=lambda name: prediction.step(given.only((name,))).seconds)

    def cost(links: Links, limit: float) -> FloatArray:
        if limit < np.inf:
            least = prediction.seconds(links.only((dearest,))) - without
            if (least > limit * _SAME).all():
                return least
        return prediction.seconds(links) - without

    return cost


def _search(mesh: Mesh, costing: Costing, given: IntArray, exact: bool) -> tuple[IntArray, bool]:
    """Return the cheapest devices, and whether they are the least of all placements."""
    hosts = costing.machine.units[0]
    starts = np.flatnonzero(np.diff(hosts, prepend=-1))
    labels = labelings(np.diff(starts, append=len(hosts)).tolist(), _EXACT) if exact else None
    orders = _orders(mesh_factors(mesh))
    by_order = _evaluated(costing, orders)
    steps = 0 if labels is not None or not exact else max(0, int(_WORK / mesh.size) - len(orders))
    best, cost = _moved(costing, orders, by_order, steps)
    others = [given]
    if costing.bounds:
        others.append(costing.filler.place(*packing(costing.bounds, mesh.size)))
    other, less = _least(costing, np.stack(others))
    if not cost * _SAME < less:
        best, cost = other, less
    if labels is not None:
        # Devices of one host are alike: positions take them in order.
        other, less = _least(costing, np.argsort(np.argsort(labels, axis=1, kind="stable"), axis=1))
        best, cost = (other, less) if less * _SAME < cost else (best, cost)
    if not np.isfinite(cost):
        raise _unmet(costing)
    return best, labels is not None


def _unmet(costing: Costing) -> PlacementError:
    listed = ", ".join(f"{bound.kind} within {costing.machine.levels[bound.level].name}" for bound in costing.bounds)
    return PlacementError(
        f"none of the {costing.tried:,} placements tried meets all constraints ({listed}); loosen one",
        kinds=tuple(bound.kind for bound in costing.bounds),
    )


def _evaluated(costing: Costing, orders: Sequence[Order], limit: float = np.inf) -> FloatArray:
    """Return the cost of each order; of an order worse than the best so far, a lower bound."""
    found: list[float] = []
    for order in orders:
        found.append(float(costing.costs(costing.filler.of(order)[None], min(found, default=limit))[0]))
    return np.array(found)


def _least(costing: Costing, devices: IntArray) -> tuple[IntArray, float]:
    """Return the first of the placements that cost least."""
    costs = costing.costs(devices)
    least = float(costs.min())
    chosen = int(np.argmax(costs <= least * _SAME))
    return devices[chosen], float(costs[chosen])


def _orders(factors: Sequence[Factor]) -> list[Order]:
    """Return every order of the factors, the given one first; of too many, the given one and the reverse."""
    if factorial(len(factors)) <= _ORDERS:
        return list(permutations(factors))
    return [tuple(factors), tuple(reversed(factors))]


def _moved(costing: Costing, orders: Sequence[Order], costs: FloatArray, steps: int) -> tuple[IntArray, float]:
    """Move one prime part of an axis at a time from the best order, while that helps and steps are left."""
    chosen = int(np.argmax(costs <= float(costs.min()) * _SAME))
    order, cost = orders[chosen], float(costs[chosen])
    parts = primes(order)
    while steps > 0:
        moves = list(dict.fromkeys(_moves(parts)))[:steps]
        steps -= max(1, len(moves))
        after = _evaluated(costing, moves, cost) if moves else costs
        if not moves or not float(after.min()) * _SAME < cost:
            break
        parts = order = moves[int(after.argmin())]
        cost = float(after.min())
    return costing.filler.of(order), cost


def _moves(order: Sequence[Factor]) -> Iterator[Order]:
    for start in range(len(order)):
        rest = [*order[:start], *order[start + 1 :]]
        for end in range(len(order)):
            if end != start:
                yield (*rest[:end], order[start], *rest[end:])


def _kind(name: str, traffic: Traffic, links: Links, cluster: Cluster) -> KindCost:
    """Return a kind's seconds on its links, hidden or not; ``links``: after, before."""
    after, before = (np.zeros(2) + links.seconds(name, traffic.get(name, ()))).tolist()
    level, was = (cluster.levels[int(number)].name for number in links.costs(name).widest)
    return KindCost(name, level, after, before, was)
