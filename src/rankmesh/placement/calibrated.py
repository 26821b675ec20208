"""A cluster whose latencies, bandwidths and uplinks are those that live groups were measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from rankmesh.core.clusters.cluster import Cluster, Level
from rankmesh.core.measured import Measured, Measurement
from rankmesh.core.plan import Plan
from rankmesh.placement.cost import steps_and_volume
from rankmesh.placement.predict import Links

__all__ = ["calibrated"]

# Links count as shared when all devices at once get less than this part of what each gets alone.
_FREE = 0.8


def calibrated(cluster: Cluster, plan: Plan, measured: Measurement) -> Cluster:
    """Set the latency, bandwidth and uplink of each level that was measured; others stay as they were.

    Of each level: ``latency`` by the smallest messages of groups that end there, ``bandwidth`` the most that one
    device sent, ``uplink`` the most that all groups at once sent through one unit below, where that is less than their
    devices could send.
    """
    links = Links(plan, cluster, measured.backend)
    seen = [_Seen.of(links, row) for row in measured.rows if row.size > 1]
    return cluster.with_levels(
        _level(level, number, [each for each in seen if each.widest == number])
        for number, level in enumerate(cluster.levels)
    )


@dataclass(frozen=True)
class _Seen:
    """One row on the cluster: steps, bytes over each hop, and the hops that share one unit's uplink at each level.

    ``hop``: latencies that one more chunk of NCCL's pipeline takes.
    """

    widest: int
    steps: float
    volume: float
    hop: float
    together: float
    isolated: float
    edges: tuple[int, ...]

    @classmethod
    def of(cls, links: Links, row: Measured) -> _Seen:
        counts, levels = links.counts(row.name), links.machine.levels
        widest, hop = int(counts.widest[0]), 0.0
        if links.backend == "nccl":
            # What NCCL takes over the levels as they are known, as if each step had the latency of the widest one.
            model = counts.nccl(row.collective, row.bytes)
            latency, volume = levels[widest].latency, float(model.transfer[0]) * levels[widest].bandwidth
            steps, hop = (float(part[0]) / latency for part in (model.start, model.hop))
        else:
            steps, volume = steps_and_volume(row.collective, row.size, row.bytes)
        edges = tuple(int(counts.edges(row.collective, level)[0]) for level in range(len(levels) - 1))
        return cls(widest, steps, volume, hop, row.seconds, row.isolated, edges)

    def rate(self, seconds: float, latency: float) -> float:
        """Bytes/s over one hop, with the latencies taken off: at most half of the time."""
        left = max(seconds - self.steps * latency, seconds / 2)
        chunk = self.hop * latency
        return self.volume / (sqrt(chunk + left) - sqrt(chunk)) ** 2


def _level(level: Level, number: int, seen: Sequence[_Seen]) -> Level:
    if not seen:
        return level
    least = min(each.volume for each in seen)
    latency = min(each.isolated / each.steps for each in seen if each.volume <= 2 * least)
    large = [each for each in seen if 4 * each.volume >= max(other.volume for other in seen)]
    bandwidth = max(each.rate(each.isolated, latency) for each in large)
    found = replace(level, latency=latency, bandwidth=bandwidth, uplink=None, assumed=False)
    shared = [(each.edges[number - 1], each.rate(each.together, latency)) for each in large if number]
    most = max((edges * rate for edges, rate in shared), default=0.0)
    crowd = max((edges for edges, _ in shared), default=0)
    return replace(found, uplink=most) if crowd > 1 and most < _FREE * crowd * found.bandwidth else found
