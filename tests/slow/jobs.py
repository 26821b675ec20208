"""Jobs whose slowness is known: ranks that compute, then wait in the calls of their groups, step by step."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rankmesh.debug.slow.findings import Window
from rankmesh.debug.slow.summary import SHARE, Group, merged, summary_of

# Seconds of a window, and of a step without any fault.
WINDOW, COMPUTE, CALL = 4.0, 0.5, 0.02


@dataclass
class Job:
    """``tp`` by ``dp`` by ``pp`` ranks, ``per_host`` on each host; faults are seconds by step and rank, or group.

    A step: each rank computes, calls its tp group, its dp group, and the world.
    """

    tp: int
    dp: int
    pp: int = 1
    per_host: int = 4
    noise: float = 0.01
    seed: int = 0
    compute: Callable[[int, int], float] = lambda step, rank: 0.0
    call: Callable[[int, Group], float] = lambda step, group: 0.0
    reads: frozenset[int] = frozenset()
    places: Callable[[int], object] = lambda rank: ""
    world: int = field(init=False)

    def __post_init__(self):
        self.world = self.tp * self.dp * self.pp
        ranks = np.arange(self.world).reshape(self.pp, self.dp, self.tp)
        made = [("tp", row) for row in ranks.reshape(-1, self.tp)]
        made += [("dp", row) for row in ranks.transpose(0, 2, 1).reshape(-1, self.dp)]
        self.groups = [
            Group(f"{kind}{n}", kind, f"{kind}@{n}", "all_reduce", tuple(map(int, row)))
            for n, (kind, row) in enumerate(made)
            if len(row) > 1
        ]
        self.groups.append(Group("0", "world", "world", "all_reduce", tuple(range(self.world))))

    def windows(self, count):
        """What the ranks report of so many windows."""
        random, now = np.random.default_rng(self.seed), np.zeros(self.world)
        kinds, found, step, end = ("tp", "dp", "world"), [], 0, 0.0
        waits, stretch = {group.name: np.zeros(self.world) for group in self.groups}, np.zeros(self.world)
        began, steps = 0.0, 0
        while len(found) < count:
            more = np.array([self.compute(step, rank) for rank in range(self.world)])
            spent = np.maximum(0.01, COMPUTE + more + random.normal(0, self.noise * COMPUTE, self.world))
            now += spent
            stretch = np.maximum(stretch, spent)
            for kind in kinds:
                for group in self.groups:
                    if group.kind == kind:
                        members = list(group.ranks)
                        done = now[members].max() + CALL + self.call(step, group)
                        waits[group.name][members] += done - now[members]
                        now[members] = done
            step, steps, end = step + 1, steps + 1, float(now.max())
            if end - began >= WINDOW:
                found.append(self._window(end, end - began, steps, waits, stretch))
                waits = {name: np.zeros(self.world) for name in waits}
                began, steps, stretch = end, 0, np.zeros(self.world)
        return found

    def _window(self, end, seconds, steps, waits, stretch):
        ranks = []
        for rank in range(self.world):
            shares = {group: float(waits[group.name][rank]) / seconds for group in self.groups if rank in group.ranks}
            computes = 1 - sum(shares.values())
            row = {
                "rank": rank,
                "host": f"node{rank // self.per_host}",
                "place": f"{rank // (self.tp * self.dp)}{self.places(rank)}",
                "step": 1e6 * seconds / steps,
                "computes": SHARE * computes,
                "stretch": 1000 * stretch[rank],
                "queued": 0,
                "reading": SHARE * computes * 0.9 if rank in self.reads else 0,
                "site": "/job/train.py:31 in step",
                "data": "/job/train.py:88 in next_batch" if rank in self.reads else "",
            }
            ranks.append(summary_of(row, shares))
        return Window(1e9 + end, seconds, self.world, merged(ranks))


def parts(summary, size=1):
    """The summaries of each rank, or of so many."""
    for start in range(0, len(summary.rows), size):
        here = (summary.waits[:, 0] >= start) & (summary.waits[:, 0] < start + size)
        yield replace(summary, rows=summary.rows[start : start + size], waits=summary.waits[here] - [start, 0, 0])
