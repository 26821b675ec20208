"""Live: real gloo ranks on this machine, from an initialised world to groups that have all been used once.

```
world ready ──▶ built ──▶ used: one all-reduce on every group, each answer checked
      │ descriptors, threads │ …of the same rank again
```

Times are the slowest rank's, counts are of the rank with most. Store operations are counted in a run of their
own, through a store that counts each call and hands it on; so nothing that is timed goes through it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.contests import Contest, Make, Sizes, missing
from bench.processes import Outcome, run_world
from bench.results import Comparison, Sample, alternate

__all__ = ["live", "live_sizes", "slowest", "use"]

_PROCESS = Path("/proc/self")


def live_sizes(ranks: int) -> Sizes:
    """Return the layout of the live worlds: two of every axis, and the rest data parallel."""
    return Sizes(ranks, tp=2, cp=2, pp=2, ep=2)


def live(contest: Contest, ranks: int, rounds: int, limit: float) -> Comparison:
    """Compare both sides of a contest on ``ranks`` processes."""
    sizes = live_sizes(ranks)
    makes = {"ours": contest.ours, "theirs": contest.theirs}
    absent = missing(contest)
    operations = {side: _operations(make, sizes, limit) for side, make in makes.items() if side == "ours" or not absent}
    return alternate(
        "live",
        contest.what,
        ranks,
        contest.peer,
        {side: _timed(make, sizes, limit, operations.get(side)) for side, make in makes.items()},
        rounds,
        reduce=slowest,
        absent=absent,
    )


def _timed(make: Make, sizes: Sizes, limit: float, operations: float | None) -> Any:
    known = {} if operations is None else {"store_operations": operations}
    return lambda: run_world(sizes.world, lambda rank, store: _measure(make, sizes) | known, limit=limit)


def slowest(outcome: Outcome) -> Sample:
    """Return the largest value of each figure over the ranks."""
    return {name: max(report[name] for report in outcome.reports) for name in outcome.reports[0]}


def _measure(make: Make, sizes: Sizes) -> dict[str, float]:
    before = _kept()
    started = time.perf_counter()
    groups = make(sizes)
    built = time.perf_counter()
    use(groups)
    used = time.perf_counter()
    kept = _kept()
    added = {f"added_{name}": count - before[name] for name, count in kept.items()}
    return {"built": built - started, "used": used - started} | kept | added | {"groups": len(groups)}


def use(groups: list[Any]) -> None:
    """Run one all-reduce on every group and check its result; on a bare backend too."""
    import torch
    import torch.distributed as dist

    for group in groups:
        one = torch.ones(1)
        if isinstance(group, dist.ProcessGroup):
            dist.all_reduce(one, group=group)
        else:
            group.allreduce([one]).wait()
        if int(one) != group.size():
            raise RuntimeError(f"received {int(one)} from a group of {group.size()}")


def _kept() -> dict[str, float]:
    """Count open descriptors and threads of this process; return nothing where the system has no /proc."""
    if not _PROCESS.exists():
        return {}
    # The listing has a descriptor of its own.
    return {
        "descriptors": len(list((_PROCESS / "fd").iterdir())) - 1,
        "threads": len(list((_PROCESS / "task").iterdir())),
    }


def _operations(make: Make, sizes: Sizes, limit: float) -> float | None:
    """Count the store operations of the busiest rank, until its groups have been used; None if it fails."""
    from bench.counting import CountingStore

    def body(rank: int, store: CountingStore) -> dict[str, float]:
        before = store.operations
        use(make(sizes))
        return {"store_operations": store.operations - before}

    outcome = run_world(sizes.world, body, limit=limit, wrap=CountingStore)
    return None if outcome.failure else slowest(outcome)["store_operations"]
