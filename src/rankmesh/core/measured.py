"""Measured: what live groups took, in the words of nccl-tests; and the slow hosts.

```
size S of nccl-tests    all-reduce, reduce-scatter, all-to-all: what a rank holds      all-gather: n times that
algorithm bandwidth     S / seconds
bus bandwidth           all-reduce 2 (n − 1) / n,  all-gather, reduce-scatter, all-to-all (n − 1) / n,  send/recv 1
```

Each collective is taken with all groups of a kind *at once*, as in a step, and with one group alone. A group is as slow
as its slowest member. Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankmesh.core.plan import Plan

__all__ = ["HOP", "GroupTime", "Measured", "Measurement", "measurement"]

# A group counts as slow from so many times the quicker ones of its kind; a host when nearly all of its groups are.
_SLOW, _MOST = 1.4, 0.9
# The time of a message from the member before: of a pair of ranks, not of a group of the plan.
HOP = "hop"
_FACTORS = {"all-reduce": 2.0, "broadcast": 0.0}


@dataclass(frozen=True)
class GroupTime:
    """One group: its members, seconds with all groups of its kind at once, and alone (None: not taken alone)."""

    ranks: tuple[int, ...]
    together: float
    isolated: float | None


@dataclass(frozen=True)
class Measured:
    """One collective of one kind at one size: ``bytes`` that a rank holds, all groups in the plan's order."""

    name: str
    collective: str
    bytes: int
    groups: tuple[GroupTime, ...]

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0].ranks)

    @property
    def seconds(self) -> float:
        """The slowest group, all of them at once: what a step waits for."""
        return max(group.together for group in self.groups)

    @property
    def isolated(self) -> float:
        """The slowest of the groups that were taken alone."""
        return max(group.isolated for group in self.groups if group.isolated is not None)

    @property
    def slowest(self) -> GroupTime:
        """The group that took longest."""
        return max(self.groups, key=lambda group: group.together)

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, bytes/s, of all groups at once."""
        return self.bytes * (self.size if self.collective == "all-gather" else 1) / self.seconds

    @property
    def busbw(self) -> float:
        """Bus bandwidth, bytes/s, of all groups at once."""
        if self.collective in ("send/recv", "ring", "broadcast"):
            return self.algbw
        return self.algbw * _FACTORS.get(self.collective, 1.0) * (self.size - 1) / self.size


@dataclass(frozen=True)
class Measurement:
    """All that was measured: the host of each rank, a row for each kind, collective and size, and the hops of rings.

    ``speed``: FLOP/s of a large matrix product on the slowest rank, while all ranks compute one.
    """

    hosts: tuple[str, ...]
    backend: str
    rows: tuple[Measured, ...]
    hops: tuple[Measured, ...] = ()
    speed: float | None = None

    @property
    def largest(self) -> tuple[Measured, ...]:
        """The rows of the largest size of each kind and collective, hops too: there links count, not latencies."""
        last = {(row.name, row.collective): row for row in sorted((*self.rows, *self.hops), key=lambda row: row.bytes)}
        return tuple(last.values())

    def latency(self, name: str, collective: str) -> float:
        """Seconds of the smallest size of one kind and collective, all groups at once."""
        rows = [row for row in self.rows if (row.name, row.collective) == (name, collective)]
        return min(rows, key=lambda row: row.bytes).seconds

    @property
    def slow_hosts(self) -> tuple[str, ...]:
        """The hosts nearly all of whose groups are slow, among those on several hosts or among those on one.

        A group, or a hop from one member to the next, is slow against the quicker ones of its kind at the largest size.
        """
        slow: dict[tuple[str, bool], list[bool]] = {}
        for row in self.largest:
            found = [(self.hosts_of(group.ranks), group.isolated or group.together) for group in row.groups]
            for inside in (True, False):
                comparable = [(hosts, seconds) for hosts, seconds in found if (len(hosts) == 1) == inside]
                if len({frozenset(hosts) for hosts, _ in comparable}) < 2:
                    continue
                quick = float(np.quantile([seconds for _, seconds in comparable], 0.25, method="lower"))
                for hosts, seconds in comparable:
                    for host in hosts:
                        slow.setdefault((host, inside), []).append(seconds > _SLOW * quick)
        named = {host for (host, _), flags in slow.items() if np.mean(flags) >= _MOST}
        return tuple(host for host in dict.fromkeys(self.hosts) if host in named)

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the hosts of these ranks, each once."""
        return tuple(dict.fromkeys(self.hosts[rank] for rank in ranks))

    def to_dict(self) -> dict[str, object]:
        """Return the data of ``rankmesh measure --json``; ``groups``: seconds of each, in the order of the plan."""
        return {
            "backend": self.backend,
            "kinds": [
                {
                    "name": row.name,
                    "collective": row.collective,
                    "bytes": row.bytes,
                    "seconds": row.seconds,
                    "alone": row.isolated,
                    "latency": self.latency(row.name, row.collective),
                    "algbw": row.algbw,
                    "busbw": row.busbw,
                    "slowest": {"ranks": list(row.slowest.ranks), "hosts": list(self.hosts_of(row.slowest.ranks))},
                    "groups": [group.together for group in row.groups],
                }
                for row in self.rows
            ],
            "slow_hosts": list(self.slow_hosts),
            "speed": self.speed,
        }


def measurement(
    plan: Plan,
    hosts: Sequence[str],
    backend: str,
    gathered: Mapping[int, Iterable[tuple[str, str, int, float, float | None]]],
) -> Measurement:
    """Combine what each rank measured: rows of kind, collective, bytes, seconds at once, seconds alone or None."""
    times: dict[tuple[str, str, int], dict[int, tuple[float, float | None]]] = {}
    for rank, measured in gathered.items():
        for name, collective, size, together, isolated in measured:
            times.setdefault((name, collective, size), {})[rank] = together, isolated
    order = {name: number for number, name in enumerate(plan.kinds)}
    keys = sorted(times, key=lambda key: (order[key[0]], key[1], key[2]))
    rows = tuple(_row(plan, *key, times[key]) for key in keys if key[1] != HOP)
    hops = tuple(_hops(plan, *key, times[key]) for key in keys if key[1] == HOP)
    return Measurement(tuple(hosts), backend, rows, hops)


def _hops(
    plan: Plan, name: str, collective: str, size: int, times: Mapping[int, tuple[float, float | None]]
) -> Measured:
    starts = plan.groups(name).array
    pairs = zip(starts.reshape(-1).tolist(), np.roll(starts, -1, axis=-1).reshape(-1).tolist(), strict=True)
    return Measured(name, collective, size, tuple(GroupTime(pair, times[pair[1]][0], None) for pair in pairs))


def _row(
    plan: Plan, name: str, collective: str, size: int, times: Mapping[int, tuple[float, float | None]]
) -> Measured:
    groups = []
    for ranks in plan.groups(name).tolist():
        together = [times[rank][0] for rank in ranks]
        isolated = [found for rank in ranks if (found := times[rank][1]) is not None]
        groups.append(GroupTime(tuple(ranks), max(together), max(isolated) if isolated else None))
    return Measured(name, collective, size, tuple(groups))
