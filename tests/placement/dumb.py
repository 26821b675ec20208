"""The cost of a placement, counted hop by hop with loops: the dumb answer."""

from collections import Counter
from math import ceil, log2


def cost(groups, messages, cluster, backend):
    """Seconds of all messages of one kind; ``groups`` are lists of ranks."""
    return sum(message.times * _one(groups, message, cluster, backend) for message in messages if len(groups[0]) > 1)


def _units(cluster, rank):
    return [int(row[rank]) for row in cluster.units]


def _one(groups, message, cluster, backend):
    n, b = len(groups[0]), message.bytes
    if message.collective == "all-to-all":
        return _all_to_all(groups, b, cluster, 2 if backend == "gloo" else 1)
    rings = [_ring(group, cluster) if backend == "nccl" else list(group) for group in groups]
    ring = 2 * (n - 1), 2 * b * (n - 1) / n
    if message.collective == "all-reduce":
        found = _hops(rings, *ring, cluster)
        return min(found, _hops(rings, 2 * ceil(log2(n)), 2 * b, cluster)) if backend == "nccl" else found
    if message.collective == "all-gather":
        return _hops(rings, n - 1, b * (n - 1), cluster)
    if message.collective == "reduce-scatter":
        return _hops(rings, n - 1, b * (n - 1) / n, cluster) if backend == "nccl" else _hops(rings, *ring, cluster)
    if message.collective == "broadcast":
        return _hops(rings, n - 1, b, cluster) if backend == "nccl" else ceil(log2(n)) * _hops(rings, 1, b, cluster)
    return _hops([list(group) for group in groups], 1, b, cluster, closed=message.collective == "ring")


def _ring(group, cluster):
    """Members sorted by where they are, outermost level first: each unit is entered and left once."""
    return sorted(group, key=lambda rank: _units(cluster, rank)[::-1])


def _hops(rings, steps, volume, cluster, closed=True):
    slowest, leaving = 0, Counter()
    for ring in rings:
        for start, end in zip(ring, ring[1:] + ring[:1] if closed else ring[1:], strict=closed):
            ours, theirs = _units(cluster, start), _units(cluster, end)
            for level, (here, there) in enumerate(zip(ours, theirs, strict=True)):
                if here != there:
                    slowest = max(slowest, level + 1)
                    leaving[level, here] += 1
    times = [volume / min(level.bandwidth for level in cluster.levels[: slowest + 1])]
    for (level, _), count in leaving.items():
        if cluster.levels[level + 1].uplink is not None:
            times.append(volume * count / cluster.levels[level + 1].uplink)
    return steps * cluster.levels[slowest].latency + max(times)


def _all_to_all(groups, size, cluster, passes):
    """``passes``: gloo's last member sends all before it receives, over the links of its device and its host."""
    slowest, leaving, times = 0, Counter(), []
    part = size / len(groups[0])
    for group in groups:
        for rank in group:
            times.append(passes * part * (len(group) - 1) / cluster.levels[0].bandwidth)
            for level in range(len(cluster.levels) - 1):
                here = _units(cluster, rank)[level]
                away = sum(_units(cluster, peer)[level] != here for peer in group)
                if away:
                    slowest = max(slowest, level + 1)
                    times.append(passes * part * away / cluster.levels[level + 1].bandwidth)
                    leaving[level, here] += away
    for (level, _), pairs in leaving.items():
        if cluster.levels[level + 1].uplink is not None:
            times.append((passes if level == 0 else 1) * part * pairs / cluster.levels[level + 1].uplink)
    return cluster.levels[slowest].latency + max(times)
