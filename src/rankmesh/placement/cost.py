"""Cost: seconds that the collectives of a step take: how groups lie on the links, and what gloo's collectives take.

```
gloo: one collective of n ranks, b bytes a rank                  steps (each α)     bytes V over each hop (β)
all-reduce, reduce-scatter    a ring, twice around                2 (n − 1)          2 b (n − 1) / n
all-gather      ring                                              n − 1              b (n − 1)
broadcast       a binomial tree, one after another                ⌈log₂ n⌉           b ⌈log₂ n⌉
all-to-all      every member to every other at once               1                  b (n − 1) / n, by level
send/recv, ring member to next                                    1                  b

seconds = steps · α(l) + max( V / bandwidth(l),  over all units u:  V · edges(u) / uplink(u) )

where two members send to each other: V · (1 + w · E|S| / k) for k such pairs on one link
w               all-to-all 1,  ring of two members 1,  all-gather of two members 1/2,  others 0
S               a sum of k coins: 1 and −1 with p / 2 each, 0 with 1 − p;  p = 3/4
```

A member of gloo sends data once the receiver has reported that it is ready, which it reports on the connection on which
it sends, behind its own data. Of two members that send to each other, one that is more than a latency behind sends
everything before it receives (1 or −1); only members that start together use both directions at once (0). After a
call that aligns them, either is as likely. Members that took turns do so again, as one of them has its data later: of
four calls after that, 1/2, 3/4, 7/8, 15/16 on average, and p is 3/4. Groups that wait for each other in other kinds,
as on one pipeline stage, have one order and count as one. An all-gather sends its data in two halves, of which one
waits. An all-reduce receives before it sends.

``l`` is the slowest level that a hop of any group of the kind crosses. ``edges(u)`` counts the hops of *all* groups of
the kind that leave a unit (a host, a rack) at once, as in a step: its uplink is shared by them. NCCL orders a ring so
that each host is entered and left once; gloo takes the members in the order of the group. ``nccl`` has what NCCL takes.

Left out: kinds overlap neither with each other nor with computation; nothing is congested but ports and uplinks; all
devices of a level are alike. Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005); nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

import numpy as np
import numpy.typing as npt

from rankmesh.core.clusters.cluster import Cluster, Level
from rankmesh.core.clusters.hardware import DEVICES, Device
from rankmesh.core.clusters.levels import domain, reached
from rankmesh.core.plan import Plan
from rankmesh.core.strided import IntArray
from rankmesh.errors import PlacementError, quoted
from rankmesh.placement.crossings import hops
from rankmesh.placement.nccl import Cost, cost
from rankmesh.placement.traffic import Message

__all__ = [
    "BACKENDS",
    "BoolArray",
    "DeviceUnits",
    "FloatArray",
    "HopCounts",
    "bitwise",
    "devices_of",
    "seconds",
    "steps_and_volume",
]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True)
class DeviceUnits:
    """The units at each level of the devices that are placed on, in nested order: ``(levels, devices)``.

    ``device``: what they are, which decides how NCCL uses their links.
    """

    levels: tuple[Level, ...]
    units: IntArray
    device: Device = DEVICES["h100"]

    @cached_property
    def binary(self) -> bool:
        """Return whether each level has units of one power of two of consecutive devices, so that bits tell them."""
        devices = np.arange(self.units.shape[1])
        widths = [int(np.argmax(row != row[0])) or len(devices) for row in self.units]
        return all(
            width & (width - 1) == 0 and np.array_equal(row - row[0], devices // width)
            for row, width in zip(self.units, widths, strict=True)
        )

    @cached_property
    def domain(self) -> tuple[int, bool]:
        """The number of the outermost level before the network, -1 if there is none; and whether it is all NVLink."""
        return domain(self.levels)


def devices_of(plan: Plan, cluster: Cluster, device: Device) -> tuple[IntArray, DeviceUnits, IntArray]:
    """Return the plan's ranks in nested order of their devices, the machine of these, and the order given."""
    rank_range = plan.mesh.rank_range
    ranks = rank_range.ascending
    cluster.hosts_of(ranks)
    place_of = np.argsort(cluster.ranks)
    nested = ranks[np.lexsort((place_of[ranks], *cluster.units[:, ranks]))]
    device_of = np.empty(rank_range.size, dtype=np.int64)
    device_of[np.searchsorted(ranks, nested)] = np.arange(rank_range.size)
    given = device_of[np.searchsorted(ranks, rank_range.ranks(np.arange(rank_range.size)))]
    return (
        nested,
        DeviceUnits(reached(cluster.levels, device), cluster.units[:, nested].astype(np.int32), device),
        given,
    )


def bitwise(devices: IntArray) -> bool:
    """Return whether each bit of a position changes the same bits of its device, under each of several placements.

    >>> bitwise(np.array([[0, 2, 1, 3], [3, 2, 1, 0]])), bitwise(np.array([[0, 1, 2, 3, 4, 5, 7, 6]]))
    (True, False)
    """
    size, bit = devices.shape[1], 1
    while bit < size:
        changed = devices[:, :bit] ^ (devices[:, :1] ^ devices[:, bit, None])
        if not np.array_equal(changed, devices[:, bit : 2 * bit]):
            return False
        bit *= 2
    return True


class HopCounts:
    """The groups of one kind on a machine, under each of several placements.

    ``groups`` are positions ``(groups, size)``, ``devices`` the device of each position ``(placements, positions)``.
    Each method returns a value for each placement. ``stages``: the pipeline stage of each group, whose members come to
    their calls in one order; all groups have one where it is not given.
    """

    def __init__(
        self, groups: IntArray, machine: DeviceUnits, devices: IntArray, *, backend: str, stages: IntArray | None = None
    ) -> None:
        if backend not in BACKENDS:
            raise PlacementError(
                f"unknown backend {quoted(backend)}; costs are known for nccl and gloo", received=backend
            )
        self.size, self.many, self.machine, self.backend = groups.shape[1], len(devices), machine, backend
        self._placed = devices.astype(np.int32, copy=False)[:, groups]
        self._stages = np.zeros(len(groups), dtype=np.int64) if stages is None else stages
        self._units: dict[int, IntArray] = {}
        self._counted: dict[tuple[str, int], IntArray] = {}
        self._waiting: dict[int, FloatArray] = {}
        self._seconds: dict[tuple[str, float], FloatArray] = {}

    def one(self, collective: str, size: float) -> FloatArray:
        """Return the seconds of one collective of ``size`` bytes under each placement."""
        if (collective, size) not in self._seconds:
            nccl = self.backend == "nccl"
            found = self.nccl(collective, size).seconds if nccl else _gloo(collective, size, self)
            self._seconds[collective, size] = found
        return self._seconds[collective, size]

    def nccl(self, collective: str, size: float) -> Cost:
        """Return the seconds of one collective by NCCL, part by part."""
        return cost(collective, size, self)

    def units(self, level: int) -> IntArray:
        """Return the unit of each member at a level, ``(placements, groups, size)``."""
        if level not in self._units:
            self._units[level] = self.machine.units[level][self._placed]
        return self._units[level]

    @cached_property
    def widest(self) -> IntArray:
        """The outermost level that a group needs, which is also the slowest that a hop of its ring crosses."""
        found = np.zeros(self.many, dtype=np.int64)
        for level in range(len(self.machine.levels) - 1 if self.size > 1 else 0):
            units = self.units(level)
            apart = (units[..., 1:] != units[..., :-1]).any(axis=(1, 2))
            if not apart.any():
                break
            found += apart
        return found

    def _rows(self, level: int) -> tuple[IntArray, IntArray]:
        """Return the placement of each group, and the units of its members."""
        units = self.units(level)
        return np.repeat(np.arange(self.many), units.shape[1]), units.reshape(-1, self.size)

    @cached_property
    def spread(self) -> tuple[FloatArray, FloatArray]:
        """The fewest members of a group on one of its hosts (NVLink domains), and the most hosts of a group."""
        last, _ = self.machine.domain
        members, hosts = np.full(self.many, float(self.size)), np.ones(self.many)
        if last < 0:
            return hosts, members
        if (self.widest > last).any():
            owner, units = self._rows(last)
            row, _, each = _runs(units)
            every = np.arange(self.many)
            members = np.minimum.reduceat(each, np.searchsorted(owner[row], every)).astype(np.float64)
            hosts = np.maximum.reduceat(np.bincount(row), np.searchsorted(owner, every)).astype(np.float64)
        return members, hosts

    def edges(self, collective: str, level: int) -> IntArray:
        """Return the most hops of all groups that leave one unit of a level; of an all-to-all (member, peer) pairs."""
        return self.most(_HOPS.get(collective, "around" if self.backend == "nccl" else "loop"), level)

    def waiting(self, level: int) -> FloatArray:
        """Return the most pairs of one unit, each weighted by how much longer its data take because members wait."""
        if not (self.widest > level).any():
            return np.zeros(self.many)
        if level not in self._waiting:
            units, count = self.units(level), int(self.machine.units[level].max()) + 1
            pairs, independent = np.zeros(self.many * count), np.zeros(self.many * count)
            for stage in np.unique(self._stages):
                here = units[:, self._stages == stage]
                row, unit, members = _runs(here.reshape(-1, self.size))
                owner = row // here.shape[1] * count + unit
                each, most = members * (self.size - members), np.zeros(len(pairs))
                np.maximum.at(most, owner, each)
                pairs += np.bincount(owner, weights=each, minlength=len(pairs))
                independent += most
            self._waiting[level] = (pairs * _turns(independent, 1.0)).reshape(self.many, count).max(axis=1)
        return self._waiting[level]

    def most(self, what: str, level: int) -> IntArray:
        """Return the largest count at a level, by ``what`` is counted.

        ``around``, ``loop``, ``chain``  hops that leave one unit: of sorted members; from member to next, and last to
                                         first; not closed
        ``pairs``   of member and peer that leave one unit
        ``beyond``  peers that one member has outside of its unit
        """
        if not (self.widest > level).any():
            return np.zeros(self.many, dtype=np.int64)
        if (what, level) not in self._counted:
            if what in ("loop", "chain"):
                found = _leaving(self.units(level), what, int(self.machine.units[level].max()) + 1)
            else:
                found = self._in_runs(what, level)
            self._counted[what, level] = found
        return self._counted[what, level]

    def _in_runs(self, what: str, level: int) -> IntArray:
        """Return the largest count of sorted members: each unit is entered and left once."""
        owner, units = self._rows(level)
        row, unit, members = _runs(units)
        placed, outside = owner[row], self.size - members
        if what == "beyond":
            most: IntArray = np.maximum.reduceat(outside, np.searchsorted(placed, np.arange(self.many)))
            return most
        count, weight = int(self.machine.units[level].max()) + 1, members * outside if what == "pairs" else outside > 0
        return _busiest(placed * count + unit, weight, self.many, count)


def _leaving(units: IntArray, what: str, count: int) -> IntArray:
    """Return the most hops, in the order of the members, that leave one unit."""
    start, end = hops(units) if what == "loop" else (units[..., :-1], units[..., 1:])
    left = np.nonzero(start != end)
    return _busiest(left[0] * count + start[left], None, len(units), count)


def _runs(units: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Sorted members of each group ``(groups, size)``: of each unit its group, its number, and members."""
    size = units.shape[1]
    ordered = np.sort(units, axis=-1)
    first = np.ones(ordered.shape, dtype=np.bool_)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = np.flatnonzero(first)
    return starts // size, ordered.reshape(-1)[starts], np.diff(starts, append=ordered.size)


def _busiest(owner: IntArray, weight: IntArray | BoolArray | None, many: int, count: int) -> IntArray:
    """Return for each placement the largest sum of weights of one unit."""
    sums = np.bincount(owner, weights=weight, minlength=many * count).reshape(many, count)
    most: IntArray = sums.max(axis=1).astype(np.int64)
    return most


def seconds(messages: Iterable[Message], counts: HopCounts) -> FloatArray:
    """Return the seconds of a step that a kind takes under each placement; 0 for groups of one rank."""
    total = np.zeros(counts.many)
    if counts.size > 1:
        for message in messages:
            total += message.times * counts.one(message.collective, message.bytes)
    return total


def steps_and_volume(collective: str, ranks: int, size: float) -> tuple[float, float]:
    """Return the latencies, and the bytes over each hop, or each pair of an all-to-all: a row of the table.

    >>> steps_and_volume("all-reduce", 4, 8.0)
    (6, 12.0)
    """
    n = ranks
    if collective in ("all-reduce", "reduce-scatter"):
        return 2 * (n - 1), 2 * size * (n - 1) / n
    if collective == "all-gather":
        return n - 1, size * (n - 1)
    if collective == "broadcast":
        rounds = ceil(log2(n))
        return rounds, rounds * size
    return 1, size / n if collective == "all-to-all" else size


# Which hops of a collective share the uplink of a unit; default: those of the backend's ring.
_HOPS = {"send/recv": "chain", "ring": "loop", "all-to-all": "pairs"}
# gloo: the part of what two members send to each other that can wait for the other direction.
_BEHIND = {"all-to-all": 1.0, "ring": 1.0, "all-gather": 0.5}
# gloo: the part of its calls in which a pair uses its connection one way after the other.
_IN_TURN = 0.75


def _gloo(collective: str, size: float, counts: HopCounts) -> FloatArray:
    steps, volume = steps_and_volume(collective, counts.size, size)
    mutual = collective == "all-to-all" or counts.size == 2
    behind = _BEHIND.get(collective, 0.0) if mutual else 0.0
    if collective == "all-to-all":
        return _all_to_all(volume, counts, behind)
    return _over(counts, steps, volume, collective, behind)


def _over(counts: HopCounts, steps: float, volume: float, collective: str, behind: float) -> FloatArray:
    """Return the time of ``steps`` latencies and ``volume`` bytes over each hop, uplinks shared by all groups."""
    levels = counts.machine.levels
    latency = np.array([level.latency for level in levels])[counts.widest]
    each = volume * _turns(1, behind)
    time = each / np.minimum.accumulate([level.bandwidth for level in levels])[counts.widest]
    for number, level in enumerate(levels[1:]):
        if level.uplink is not None:
            time = np.maximum(time, each * counts.edges(collective, number) / level.uplink)
    whole: FloatArray = steps * latency + time
    return whole


def _all_to_all(part: float, counts: HopCounts, behind: float) -> FloatArray:
    """Return the time in which each member sends a part to each other one: by its own links, and by shared uplinks."""
    levels = counts.machine.levels
    latency = np.array([level.latency for level in levels])[counts.widest]
    peers = counts.size - 1
    time: FloatArray = np.full(counts.many, part * peers * _turns(peers, behind) / levels[0].bandwidth)
    for number, level in enumerate(levels[1:]):
        beyond = counts.most("beyond", number)
        time = np.maximum(time, part * beyond * _turns(beyond, behind) / level.bandwidth)
        if level.uplink is not None:
            time = np.maximum(time, part * counts.waiting(number) / level.uplink)
    return latency + time


def _turns(pairs: npt.ArrayLike, behind: float) -> float | FloatArray:
    """Return the factor by which a link takes longer for these pairs if a part of their data waits; see the table.

    E|S| / k by a root that is exact for one pair and for many, and within 3 % between.

    >>> [round(float(_turns(pairs, 1.0)), 2) for pairs in (1, 2, 4, 64)]
    [1.75, 1.51, 1.35, 1.09]
    """
    if not behind:
        return 1.0
    slope = np.pi / 2 / _IN_TURN
    return 1 + behind / np.sqrt(slope * (np.maximum(pairs, 1) - 1) + _IN_TURN**-2)
