"""The cost of a placement, counted hop by hop with loops: the dumb answer."""

from collections import Counter
from math import ceil, log2, pi, sqrt


def cost(groups, messages, cluster, backend):
    """Seconds of all messages of one kind; ``groups`` are lists of ranks."""
    return sum(message.times * _one(groups, message, cluster, backend) for message in messages if len(groups[0]) > 1)


def _units(cluster, rank):
    return [int(row[rank]) for row in cluster.units]


def _one(groups, message, cluster, backend):
    n, b = len(groups[0]), message.bytes
    if message.collective == "all-to-all":
        return _all_to_all(groups, b, cluster, 1 if backend == "gloo" else 0)
    rings = [_ring(group, cluster) if backend == "nccl" else list(group) for group in groups]
    ring = 2 * (n - 1), 2 * b * (n - 1) / n
    if message.collective == "all-reduce":
        found = _hops(rings, *ring, cluster)
        return min(found, _hops(rings, 2 * ceil(log2(n)), 2 * b, cluster)) if backend == "nccl" else found
    if message.collective == "all-gather":
        return _hops(rings, n - 1, b * (n - 1), cluster, behind=0.5 if backend == "gloo" and n == 2 else 0)
    if message.collective == "reduce-scatter":
        return _hops(rings, n - 1, b * (n - 1) / n, cluster) if backend == "nccl" else _hops(rings, *ring, cluster)
    if message.collective == "broadcast":
        return _hops(rings, n - 1, b, cluster) if backend == "nccl" else ceil(log2(n)) * _hops(rings, 1, b, cluster)
    behind = 1 if message.collective == "ring" and backend == "gloo" and n == 2 else 0
    return _hops([list(group) for group in groups], 1, b, cluster, message.collective == "ring", behind)


def _ring(group, cluster):
    """Members sorted by where they are, outermost level first: each unit is entered and left once."""
    return sorted(group, key=lambda rank: _units(cluster, rank)[::-1])


def turns(pairs, behind):
    """How many times as long a link takes if the part ``behind`` of what pairs send waits; exact for one pair."""
    return 1 + behind / sqrt(2 * pi / 3 * (max(pairs, 1) - 1) + 16 / 9)


def _hops(rings, steps, volume, cluster, closed=True, behind=0):
    slowest, leaving = 0, Counter()
    for ring in rings:
        for start, end in zip(ring, ring[1:] + ring[:1] if closed else ring[1:], strict=closed):
            ours, theirs = _units(cluster, start), _units(cluster, end)
            for level, (here, there) in enumerate(zip(ours, theirs, strict=True)):
                if here != there:
                    slowest = max(slowest, level + 1)
                    leaving[level, here] += 1
    times = [volume * turns(1, behind) / min(level.bandwidth for level in cluster.levels[: slowest + 1])]
    for (level, _), count in leaving.items():
        if cluster.levels[level + 1].uplink is not None:
            times.append(volume * count * turns(1, behind) / cluster.levels[level + 1].uplink)
    return steps * cluster.levels[slowest].latency + max(times)


def _all_to_all(groups, size, cluster, behind):
    """Groups come to their calls in one order, so that the pairs of one count, whatever the number of groups."""
    slowest, times = 0, []
    leaving, most = Counter(), Counter()
    part = size / len(groups[0])
    for group in groups:
        of_group = Counter()
        for rank in group:
            times.append(part * (len(group) - 1) * turns(len(group) - 1, behind) / cluster.levels[0].bandwidth)
            for level in range(len(cluster.levels) - 1):
                here = _units(cluster, rank)[level]
                away = sum(_units(cluster, peer)[level] != here for peer in group)
                if away:
                    slowest = max(slowest, level + 1)
                    times.append(part * away * turns(away, behind) / cluster.levels[level + 1].bandwidth)
                    of_group[level, here] += away
        for unit, pairs in of_group.items():
            leaving[unit] += pairs
            most[unit] = max(most[unit], pairs)
    for (level, unit), pairs in leaving.items():
        if cluster.levels[level + 1].uplink is not None:
            times.append(part * pairs * turns(most[level, unit], behind) / cluster.levels[level + 1].uplink)
    return cluster.levels[slowest].latency + max(times)
