"""Live: real ranks on this machine, from an initialised world to groups that have all been used once.

```
world ready ──▶ built ──▶ used: one all-reduce on every group, each answer checked     descriptors, threads
```

Times are the slowest rank's, counts are of the rank with most. Store operations are counted in a run of their
own, through a store that counts each call and hands it on; so nothing that is timed goes through it.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.contests import Contest, Make, Sizes, contested
from bench.processes import Outcome, run_world
from bench.results import Comparison

__all__ = ["live", "live_sizes", "timed"]

_PROCESS = Path("/proc/self")


def live_sizes(ranks: int) -> Sizes:
    """Return the layout of the live worlds: two of every axis, and the rest data parallel."""
    return Sizes(ranks, tp=2, cp=2, pp=2, ep=2)


def live(contest: Contest, ranks: int, rounds: int, limit: float) -> Comparison:
    """Compare both sides of a contest on ``ranks`` processes."""
    sizes, counted = live_sizes(ranks), dict[Make, dict[str, float]]()

    def run(make: Make) -> Outcome:
        if make not in counted:
            counted[make] = _operations(make, sizes, limit)
        return run_world(ranks, lambda _rank, _store: timed(make, sizes) | _open() | counted[make], limit=limit)

    return contested("live", contest, ranks, rounds, run)


def timed(make: Make, sizes: Sizes, device: str = "cpu") -> dict[str, float]:
    """Time making the groups, and one all-reduce on each, whose result is checked."""
    import torch
    import torch.distributed as dist

    started = time.perf_counter()
    groups = make(sizes)
    built = time.perf_counter()
    for group in groups:
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=group)
        if int(one) != group.size():
            raise RuntimeError(f"received {int(one)} from a group of {group.size()}")
    return {"built": built - started, "used": time.perf_counter() - started, "groups": len(groups)}


def _open() -> dict[str, float]:
    """Count open descriptors and threads of this process; return nothing where the system has no /proc."""
    if not _PROCESS.exists():
        return {}
    # The listing has a descriptor of its own.
    return {
        "descriptors": len(list((_PROCESS / "fd").iterdir())) - 1,
        "threads": len(list((_PROCESS / "task").iterdir())),
    }


def _operations(make: Make, sizes: Sizes, limit: float) -> dict[str, float]:
    """Count the store operations of the busiest rank, until its groups have been used; nothing if it fails."""
    from bench.counting import CountingStore

    def body(_rank: int, store: CountingStore) -> int:
        before = store.operations
        timed(make, sizes)
        return store.operations - before

    outcome = run_world(sizes.world, body, limit=limit, wrap=CountingStore)
    return {} if outcome.failure else {"store_operations": max(outcome.reports)}
