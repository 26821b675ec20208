"""Dry: the groups of one rank of a world of up to 131,072, made on the backend "fake" in a fresh process."""

from __future__ import annotations

import time
from typing import Any

from bench.contests import Contest, Make, Sizes, missing
from bench.processes import run_isolated
from bench.results import Comparison, alternate

__all__ = ["dry", "dry_sizes", "fake_world"]


def dry_sizes(world: int) -> Sizes:
    """Return the layout of the large worlds, experts over eight ranks; a small world has two of every axis."""
    if world < 1024:
        return Sizes(world, tp=2, cp=2, pp=2, ep=2, etp=1)
    return Sizes(world, tp=8, cp=2, pp=8, ep=8, etp=1)


def dry(contest: Contest, world: int, rounds: int, limit: float) -> Comparison:
    """Compare both sides of a contest, for a rank in the middle of the world."""
    sizes = dry_sizes(world)
    makes = {"ours": contest.ours, "theirs": contest.theirs}
    return alternate(
        "dry",
        contest.what,
        world,
        contest.peer,
        {side: _timed(make, sizes, limit) for side, make in makes.items()},
        rounds,
        reduce=lambda outcome: outcome.reports[0],
        absent=missing(contest),
    )


def _timed(make: Make, sizes: Sizes, limit: float) -> Any:
    return lambda: run_isolated(lambda: _measure(make, sizes), limit=limit)


def _measure(make: Make, sizes: Sizes) -> dict[str, float]:
    fake_world(sizes.world)
    started = time.perf_counter()
    groups = make(sizes)
    return {"built": time.perf_counter() - started, "groups": len(groups)}


def fake_world(size: int) -> int:
    """Initialise a world without its other ranks, as one in the middle; return that rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = size // 3
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return rank
