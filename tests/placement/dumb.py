"""The cost of a placement, counted hop by hop with loops: the dumb answer."""

from collections import Counter
from math import ceil, floor, inf, log2, pi, sqrt

from rankmesh.core.clusters.hardware import DEVICES

OUTSIDE = ("leaf", "spine", "core", "rack", "network", "cluster", "everything")
H100 = DEVICES["h100"]


def cost(groups, messages, cluster, backend):
    """Seconds of all messages of one kind; ``groups`` are lists of ranks."""
    return sum(message.times * _one(groups, message, cluster, backend) for message in messages if len(groups[0]) > 1)


def _units(cluster, rank):
    return [int(row[rank]) for row in cluster.units]


def _one(groups, message, cluster, backend):
    n, b = len(groups[0]), message.bytes
    if backend == "nccl":
        return min(_nccl(groups, message.collective, b, cluster))
    if message.collective == "all-to-all":
        return _all_to_all(groups, b, cluster, 1)
    rings = [list(group) for group in groups]
    if message.collective in ("all-reduce", "reduce-scatter"):
        return _hops(rings, 2 * (n - 1), 2 * b * (n - 1) / n, cluster)
    if message.collective == "all-gather":
        return _hops(rings, n - 1, b * (n - 1), cluster, behind=0.5 if n == 2 else 0)
    if message.collective == "broadcast":
        return ceil(log2(n)) * _hops(rings, 1, b, cluster)
    behind = 1 if message.collective == "ring" and n == 2 else 0
    return _hops(rings, 1, b, cluster, message.collective == "ring", behind)


def _nccl(groups, collective, b, cluster):
    """Seconds of each algorithm and protocol of NCCL, hosts, ports and crossings counted one by one."""
    n, levels = len(groups[0]), cluster.levels
    first = next((number for number, level in enumerate(levels) if level.name in OUTSIDE), len(levels))
    widest = max(_widest(group, cluster) for group in groups)
    outside = widest >= first
    hosts = [Counter(_units(cluster, rank)[first - 1] for rank in group) for group in groups]
    ports, count = min(min(each.values()) for each in hosts), max(map(len, hosts))
    inner, outer = levels[min(widest, first - 1)], levels[widest]
    speed = min(level.bandwidth for level in levels[: levels.index(inner) + 1])
    port = min((level.bandwidth for level in levels[first : widest + 1]), default=inf)

    def near(us):
        return us * 1e-6 * min(1, inner.latency / 3.4e-6) + max(0, inner.latency - 3.4e-6)

    def far(us):
        return us * 1e-6 * min(1, outer.latency / 14e-6) + max(0, outer.latency - 14e-6)

    def over(inside, beyond, through, what):
        times = [inside / speed] + [beyond / (through * port)] * outside
        for number, level in enumerate(levels[1:]):
            if level.uplink is not None:
                most = max(_crossings(groups, cluster, number, what).values(), default=0)
                times.append((beyond if number >= first - 1 else inside) * most / level.uplink)
        return max(times)

    if collective == "all-to-all":
        times = [(n - 1) / speed]
        for number, level in enumerate(levels[1:]):
            for group in groups:
                here = [_units(cluster, rank)[number] for rank in group]
                times += [sum(there != unit for there in here) / level.bandwidth for unit in here]
            if level.uplink is not None:
                times += [pairs / level.uplink for pairs in _crossings(groups, cluster, number, "pairs").values()]
        start = 6.6e-6 + (outer.latency if outside else near(0.6)) + (n - 1) * near(0.6)
        return [_total(start, b / n * max(times), (outer if outside else inner).latency)]
    if collective in ("send/recv", "ring"):
        transfer = over(b, b, 1, collective)
        hops = [far(us) if outside else near(inside) for us, inside in ((2.7, 0.6), (14, 3.4))]
        return [_total(6.6e-6 + hops[0], transfer / 0.5, hops[0]), _total(8.4e-6 + hops[1], transfer, hops[1])]
    low = H100.ll if count < 2 else 39e9 if count < 3 else 20.4e9
    size = b * n if collective == "all-gather" else b
    volume, steps, between = size * (n - 1) / n, n - 1, count - 1
    if collective == "all-reduce":
        volume, steps, between = 2 * volume, 2 * steps, 2 * between
    if collective == "broadcast":
        volume, steps = size, n
    found = []
    for protocol, (start, share) in enumerate(((6.6, 0.5), (14.0, 0.92), (8.4, 1.0))):
        inside, post = near((0.6, 1.9, 3.4)[protocol]), (1e-6, 1e-6, 3e-6)[protocol]
        inside = max(inside, post) if outside else inside
        beyond = far(((2.7, 4.0, 14.0) if ports > 1 else (5.0, 8.5, 14.0))[protocol])
        latency = (steps - between) * inside + between * beyond
        latency *= 1.4 if outside and protocol == 2 and collective == "all-reduce" else 1
        transfer = over(volume, volume, ports, "around") / share
        transfer = max(transfer, volume / low) if protocol == 0 else transfer
        found.append(_total(start * 1e-6 + latency, transfer, beyond if outside else inside))
    if collective == "all-reduce":
        found += _trees(size, n, ports, count, low, outside, near, far, over)
    return found


def _trees(size, n, ports, count, low, outside, near, far, over):
    up, depth = size if count < 3 else 2 * size, floor(log2(count))
    for protocol, (start, share) in enumerate(((6.8, 0.242), (14.0, 0.8625), (8.4, 0.92))):
        inside, beyond = near((0.6, 1.25, 4.0)[protocol]), far((5.0, 8.5, 14.0)[protocol])
        transfer = max(over(2 * size, up, ports, "around") / share, 2 * size / H100.trees[min(count, 3) - 1])
        transfer = max(transfer, 2 * size / low) if protocol == 0 else transfer
        hops = 2 * ((ports - 1) * inside + depth * beyond)
        yield _total(start * 1e-6 + hops, transfer, beyond if outside else inside)
    if ports > 1:
        transfer = over(size * (1 + 1 / ports) / H100.nvls, up, min(ports, 8), "around")
        transfer = max(transfer, 2 * size * (n - 1) / n / H100.switch)
        yield _total(25e-6 + 2 * depth * far(14.0), transfer, far(14.0) if outside else near(4.0))


def _total(start, transfer, hop):
    """The data, and a pipeline of chunks of the best size."""
    return start + transfer + 2 * sqrt(hop * transfer)


def _widest(group, cluster):
    return sum(len({_units(cluster, rank)[number] for rank in group}) > 1 for number in range(len(cluster.levels)))


def _crossings(groups, cluster, number, what):
    """How often the groups leave each unit of a level: hops of their rings, or pairs of member and peer."""
    leaving = Counter()
    for group in groups:
        units = [_units(cluster, rank)[number] for rank in group]
        if what == "pairs":
            for unit in units:
                leaving[unit] += sum(other != unit for other in units)
        elif what == "around":
            leaving.update(unit for unit in set(units) if len(set(units)) > 1)
        else:
            following = [*units[1:], *(units[:1] if what == "ring" else ())]
            leaving.update(here for here, there in zip(units, following, strict=False) if here != there)
    return leaving


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
