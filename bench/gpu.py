"""GPU: groups on NCCL, from an initialised world to groups that have all been used once; time and device memory.

```
world of NCCL, used ──▶ built ──▶ used: one all-reduce on every group, each answer checked
                 free memory of the device                                    ... again, when all ranks are through
```

Where there are fewer GPUs than ranks they are shared (NCCL 2.30 and later): then a time says little of a job with a GPU
for each rank, and a ratio of two says who makes fewer communicators. A world that is bound to its device splits its
groups from its own communicator; another makes each anew. The whole device is read, so nothing else may run on it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.contests import CONTESTS, MEGATRON, Contest, Make, Sizes, load, missing
from bench.live import live_sizes, slowest
from bench.processes import run_isolated, run_world
from bench.report import record
from bench.results import Comparison, alternate

__all__ = ["absent_gpu", "contest_on_gpus", "measured"]


def absent_gpu(limit: float) -> str | None:
    """Return why nothing can be measured on a GPU here, from another process, since CUDA does not survive a fork."""
    outcome = run_isolated(_machine, limit=limit)
    return outcome.failure or (outcome.reports[0]["reason"] or None)


def _machine() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return {"reason": "no GPU"}
    if not dist.is_nccl_available():
        return {"reason": "torch without NCCL"}
    return {
        "reason": "",
        "gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def measured(ranks: int, rounds: int, limit: float) -> Iterator[dict[str, Any]]:
    """Yield the comparisons so far as plain data, after each one, with what they were measured on."""
    about = {"machine": dict(run_isolated(_machine, limit=limit).reports[0]), "rounds": rounds, "cores": os.cpu_count()}
    kept: list[dict[str, Any]] = []
    for compared in _comparisons(ranks, rounds, limit):
        kept.append(asdict(compared))
        yield {**about, "comparisons": kept}


def _comparisons(ranks: int, rounds: int, limit: float) -> Iterator[Comparison]:
    yield contest_on_gpus(MEGATRON, 1, rounds, limit, bound=False)
    for contest in CONTESTS:
        for bound in (False, True):
            yield contest_on_gpus(contest, ranks, rounds, limit, bound=bound)


def contest_on_gpus(contest: Contest, ranks: int, rounds: int, limit: float, *, bound: bool) -> Comparison:
    """Compare both sides of a contest on NCCL; ``bound``: in worlds that are bound to their device."""
    sizes = live_sizes(ranks) if ranks > 1 else Sizes(1)
    sides = {"ours": contest.ours, "theirs": contest.theirs}
    return alternate(
        "gpu",
        f"{contest.what}, world bound to its device" if bound else contest.what,
        ranks,
        contest.peer,
        {side: _timed(contest, make, sizes, limit, bound) for side, make in sides.items()},
        rounds,
        reduce=slowest,
        absent=run_isolated(lambda: {"reason": missing(contest)}, limit=limit).reports[0]["reason"],
    )


def _timed(contest: Contest, make: Make, sizes: Sizes, limit: float, bound: bool) -> Any:
    def body(rank: int, store: Any) -> dict[str, float]:
        load(contest.module)  # here, not before the fork: importing Megatron-Core begins to use the GPU
        return _measure(make, sizes, rank, store, bound)

    return lambda: run_world(sizes.world, body, limit=limit, backend=None)


def _measure(make: Make, sizes: Sizes, rank: int, store: Any, bound: bool) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # absent from its __all__

    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl",
        rank=rank,
        world_size=sizes.world,
        store=PrefixStore("nccl", store),
        device_id=device if bound else None,
    )
    free = _free_when_all_are_here()
    started = time.perf_counter()
    groups = make(sizes)
    built = time.perf_counter()
    for group in groups:
        one = torch.ones(1, device=device)
        dist.all_reduce(one, group=group)
        if int(one) != group.size():
            raise RuntimeError(f"a group of {group.size()} adds up to {int(one)}")
    used = time.perf_counter()
    return {
        "built": built - started,
        "used": used - started,
        "device_bytes": free - _free_when_all_are_here(),
        "groups": len(groups),
    }


def _free_when_all_are_here() -> int:
    """Return the free bytes of the device, read while every rank waits."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        free: int = torch.cuda.mem_get_info()[0]
    return free


def _main(message: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one run may take")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("gpu.json"))
    given = parser.parse_args(message)
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    reason = absent_gpu(given.limit)
    if reason is not None:
        parser.exit(2, f"nothing measured: {reason}\n")
    tests = json.loads(given.json.read_text(encoding="utf-8"))["tests"]
    for document in measured(given.ranks, given.rounds, given.limit):
        record(given.json, {"tests": tests, **document})
        last = document["comparisons"][-1]
        sys.stderr.write(f"{last['what']}, {last['ranks']} ranks: done\n")


if __name__ == "__main__":
    _main(sys.argv[1:])
