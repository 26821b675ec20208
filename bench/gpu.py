"""GPU: all Megatron groups of a one-rank NCCL world, device memory and time, where there is a GPU.

A communicator of one rank still allocates device memory when it is first used; rankmesh makes none for one rank.
The whole device is read, so nothing else may run on it.
"""

from __future__ import annotations

import time
from typing import Any

from bench.contests import MEGATRON, Make, Sizes, missing
from bench.processes import run_alone
from bench.results import Comparison
from bench.rounds import alternate

__all__ = ["absent_gpu", "gpu"]


def absent_gpu(limit: float) -> str | None:
    """Why nothing can be measured on a GPU here; asked in a process of its own, since CUDA does not survive a fork."""
    outcome = run_alone(_ask, limit=limit)
    return outcome.failure or (outcome.reports[0]["reason"] or None)


def _ask() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return {"reason": "no GPU"}
    return {"reason": "" if dist.is_nccl_available() else "torch without NCCL"}


def gpu(rounds: int, limit: float) -> Comparison:
    """Both sides on the first GPU."""
    sides = {"ours": MEGATRON.ours, "theirs": MEGATRON.theirs}
    return alternate(
        "gpu",
        MEGATRON.what,
        1,
        MEGATRON.peer,
        {side: _timed(make, limit) for side, make in sides.items()},
        rounds,
        reduce=lambda outcome: outcome.reports[0],
        absent=missing(MEGATRON),
    )


def _timed(make: Make, limit: float) -> Any:
    return lambda: run_alone(lambda: _measure(make), limit=limit)


def _measure(make: Make) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # absent from its __all__

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=HashStore())
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    started = time.perf_counter()
    groups = make(Sizes(1))
    built = time.perf_counter()
    for group in groups:
        dist.all_reduce(one, group=group)
    torch.cuda.synchronize()
    used = time.perf_counter()
    return {
        "built": built - started,
        "used": used - started,
        "device_bytes": free - torch.cuda.mem_get_info()[0],
        "groups": len(groups),
    }
