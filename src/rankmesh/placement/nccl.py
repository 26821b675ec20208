"""NCCL: seconds of a collective by the quickest algorithm and protocol, over all ports that a group has on a host.

```
n ranks, N hosts (NVLink domains), k = the fewest members of a group on one of its hosts, S bytes of the result

                inside, each device        leaves a host, over k ports      steps inside           steps between hosts
ring            V                          V                                s - s'                 s'
tree            2 S                        2 S, over two hosts S            2 (k - 1)              2 log2 N
NVLS, NVLS tree S (1 + 1/k) / efficiency   2 S, over two hosts S, one: 0    25 us                  2 log2 N
SHARP           S (1 + 1/k) / efficiency   S                                25 us                  1
all-to-all      b (n - 1) / n              b, to members on other hosts, over the member's port    1, and 0.6 us a peer
send            b                          b, over the member's port                               1

V    all-reduce 2 S (n - 1) / n,  all-gather, reduce-scatter S (n - 1) / n,  broadcast S        b: what a member holds
s    all-reduce 2 (n - 1), of which s' = 2 (N - 1) between hosts;  others n - 1, N - 1;  broadcast n, N - 1

seconds = start + steps + T + 2 sqrt(h T)         T  the longest of all links and shared uplinks, h  a step of the last
```

The last term is the pipeline's: chunks of the best size each cost a step, and the last one passes all of them. NCCL
leaves a host by the ports of the members there: rings, trees and channels are spread over them. Trees and NVLS reduce
inside a host first. Ring and tree have three protocols (LL, LL128, Simple), with less latency or more bandwidth.

Start costs, steps and shares come from NCCL's tuning (``hardware.toml``); over a level of another latency the steps
are longer in proportion. Left out: collectives of NVSwitch hosts over CollNet but all-reduce, PAT, copy engines,
the channels of single sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rankmesh.core.clusters.hardware import NCCL

if TYPE_CHECKING:
    from rankmesh.placement.cost import HopCounts

__all__ = ["Cost", "cost"]

Values = npt.NDArray[np.float64]
_MICRO = 1e-6
# Latencies of steps are those of NCCL's table over levels of its latencies, inside hosts and outside.
_INSIDE, _OUTSIDE = NCCL["ring_inside"][2] * _MICRO, NCCL["ring_outside"][2] * _MICRO
_NVLS = NCCL["nvls"] * _MICRO
_PROTOCOLS = (0, 1, 2)


@dataclass(frozen=True)
class Cost:
    """One collective under each placement: seconds before data flow, of the data alone, and of one more chunk."""

    start: Values
    transfer: Values
    hop: Values

    @property
    def seconds(self) -> Values:
        """Seconds of the collective."""
        found: Values = self.start + self.transfer + 2 * np.sqrt(self.hop * self.transfer)
        return found


def cost(collective: str, size: float, counts: HopCounts) -> Cost:
    """Return the cost of the quickest algorithm; ``size``: bytes that a rank holds."""
    links = _Links(counts)
    found = list(_ways(collective, size, links))
    best = np.argmin([each.seconds for each in found], axis=0)
    return Cost(*(np.choose(best, [getattr(each, part) for each in found]) for part in ("start", "transfer", "hop")))


def _step(latency: Values, usual: float, microseconds: float | Values) -> Values:
    """Return the seconds of a step over a level of this latency, from its microseconds at the usual latency."""
    known = np.asarray(microseconds) * _MICRO
    found: Values = known * np.minimum(1.0, latency / usual) + np.maximum(0.0, latency - usual)
    return found


class _Links:
    """Ports, hosts, bandwidths and latencies of the groups of one kind under each placement."""

    def __init__(self, counts: HopCounts) -> None:
        levels, machine = counts.machine.levels, counts.machine
        self.counts, self.ranks, self.device = counts, counts.size, machine.device
        last, self.nvlink = machine.domain
        self.ports, self.hosts = counts.spread
        widest = counts.widest
        self.outside = widest > last
        inner = np.minimum(widest, max(last, 0))
        latency = np.array([level.latency for level in levels])
        rates = np.array([level.bandwidth for level in levels])
        within = np.minimum.accumulate(rates[: last + 1]) if last >= 0 else np.array([np.inf])
        beyond = np.minimum.accumulate(rates[last + 1 :]) if last + 1 < len(levels) else np.array([np.inf])
        self.inside = within[inner]
        self.port = np.where(self.outside, beyond[np.clip(widest - last - 1, 0, len(beyond) - 1)], np.inf)
        self.near, self.far = partial(_step, latency[inner], _INSIDE), partial(_step, latency[widest], _OUTSIDE)
        self.slow = np.where(self.outside, latency[widest], latency[inner])
        self.sharp = bool(levels[last + 1 :]) and all(level.sharp for level in levels[last + 1 :])
        self._last = last

    def over(self, inner: Values | float, outer: Values | float, what: str, ports: Values | float) -> Values:
        """Seconds of these bytes: of each device inside, and of each host over its ports and over shared uplinks."""
        with np.errstate(invalid="ignore"):
            time: Values = np.maximum(inner / self.inside, np.where(self.outside, outer / (ports * self.port), 0.0))
        for number, level in enumerate(self.counts.machine.levels[1:]):
            if level.uplink is not None:
                edges = self.counts.edges(what, number)
                time = np.maximum(time, (outer if number >= self._last else inner) * edges / level.uplink)
        return time


def _ways(collective: str, size: float, links: _Links) -> Iterator[Cost]:
    n = links.ranks
    if collective == "all-to-all":
        yield _all_to_all(size / n, links)
    elif collective in ("send/recv", "ring"):
        yield from _sends(collective, size, links)
    else:
        whole = size * n if collective == "all-gather" else size
        yield from _rings(collective, whole, links)
        if collective == "all-reduce":
            yield from _trees(size, links)
            yield from _switched(size, links)


def _rings(collective: str, size: float, links: _Links) -> Iterator[Cost]:
    n, hosts = links.ranks, links.hosts
    volume, steps, between = size * (n - 1) / n, n - 1.0, hosts - 1.0
    if collective == "all-reduce":
        volume, steps, between = 2 * volume, 2 * steps, 2 * between
    elif collective == "broadcast":
        volume, steps = size, n
    time = links.over(volume, volume, collective, links.ports)
    single = links.ports < 2
    for protocol in _PROTOCOLS:
        near = links.near(NCCL["ring_inside"][protocol])
        near = np.where(links.outside, np.maximum(near, NCCL["posting"][protocol] * _MICRO), near)
        far = links.far(np.where(single, NCCL["tree_outside"][protocol], NCCL["ring_outside"][protocol]))
        latency = (steps - between) * near + between * far
        if protocol == 2 and collective == "all-reduce":
            latency = np.where(links.outside, NCCL["plateau"], 1.0) * latency
        transfer = time / NCCL["ring_speed"][protocol]
        if protocol == 0:
            transfer = np.maximum(transfer, volume / _low_latency(links))
        hop = np.where(links.outside, far, near)
        yield Cost(NCCL["ring_start"][protocol] * _MICRO + latency, transfer, hop)


def _low_latency(links: _Links) -> Values:
    """Bytes/s that the LL protocol reaches: inside hosts by the device, between them by what their processors do."""
    two, more = (rate * 1e9 for rate in NCCL["ll_outside"])
    return np.where(links.hosts < 2, links.device.ll, np.where(links.hosts < 3, two, more))


def _log(hosts: Values) -> Values:
    return np.floor(np.log2(hosts))


def _trees(size: float, links: _Links) -> Iterator[Cost]:
    time = links.over(2 * size, np.where(links.hosts < 3, size, 2 * size), "all-reduce", links.ports)
    most = np.take(links.device.trees, np.minimum(links.hosts, 3).astype(int) - 1)
    for protocol in _PROTOCOLS:
        near = links.near(NCCL["tree_inside"][protocol])
        far = links.far(NCCL["tree_outside"][protocol])
        latency = 2 * ((links.ports - 1) * near + _log(links.hosts) * far)
        transfer = np.maximum(time / NCCL["tree_speed"][protocol], 2 * size / most)
        if protocol == 0:
            transfer = np.maximum(transfer, 2 * size / _low_latency(links))
        yield Cost(NCCL["tree_start"][protocol] * _MICRO + latency, transfer, np.where(links.outside, far, near))


def _switched(size: float, links: _Links) -> Iterator[Cost]:
    """Reductions in the NVLink switch, between hosts by a tree or in the switches of the network (SHARP)."""
    if not links.device.nvls or not links.nvlink:
        return
    inner = size * (1 + 1 / links.ports) / links.device.nvls
    single = np.where(links.ports < 2, np.inf, 0.0)  # one device of a host has nothing to reduce there
    near, far = links.near(NCCL["tree_inside"][2]), links.far(NCCL["tree_outside"][2])
    hop = np.where(links.outside, far, near)
    channels = 2 * size * (links.ranks - 1) / links.ranks / links.device.switch
    ports = np.minimum(links.ports, NCCL["nvls_ports"])
    time = links.over(inner, np.where(links.hosts < 3, size, 2 * size), "all-reduce", ports)
    time = np.maximum(time, channels)
    yield Cost(single + _NVLS + 2 * _log(links.hosts) * far, time, hop)
    if links.sharp:
        time = np.maximum(links.over(inner, size, "all-reduce", ports), channels)
        yield Cost(single + _NVLS + np.where(links.outside, far, 0.0), time, hop)


def _all_to_all(part: float, links: _Links) -> Cost:
    counts, peers = links.counts, links.ranks - 1
    time: Values = part * peers / links.inside
    for number, level in enumerate(counts.machine.levels[1:]):
        time = np.maximum(time, part * counts.most("beyond", number) / level.bandwidth)
        if level.uplink is not None:
            time = np.maximum(time, part * counts.edges("all-to-all", number) / level.uplink)
    peer = links.near(NCCL["ring_inside"][0])
    start = NCCL["ring_start"][0] * _MICRO + np.where(links.outside, links.slow, peer) + peers * peer
    return Cost(start, time, links.slow)


def _sends(collective: str, size: float, links: _Links) -> Iterator[Cost]:
    time = links.over(size, size, collective, 1.0)
    for protocol in (0, 2):
        near = links.near(NCCL["ring_inside"][protocol])
        far = links.far(NCCL["ring_outside"][protocol])
        hop = np.where(links.outside, far, near)
        start = NCCL["ring_start"][protocol] * _MICRO
        yield Cost(start + hop, time / NCCL["ring_speed"][protocol], hop)
