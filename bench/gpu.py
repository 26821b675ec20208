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

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench.contests import CONTESTS, MEGATRON, Contest, Make, Sizes, contested, load, missing
from bench.live import live_sizes, timed
from bench.processes import Outcome, run_isolated, run_world
from bench.report import options, record
from bench.results import Comparison

__all__ = ["contest_on_gpus"]


def _machine() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        raise RuntimeError("no GPU")
    if not dist.is_nccl_available():
        raise RuntimeError("torch without NCCL")
    return {
        "gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _comparisons(ranks: int, rounds: int, limit: float) -> Iterator[Comparison]:
    yield contest_on_gpus(MEGATRON, 1, rounds, limit, bound=False)
    for contest in CONTESTS:
        for bound in (False, True):
            yield contest_on_gpus(contest, ranks, rounds, limit, bound=bound)


def contest_on_gpus(contest: Contest, ranks: int, rounds: int, limit: float, *, bound: bool) -> Comparison:
    """Compare both sides of a contest on NCCL; ``bound``: in worlds that are bound to their device."""
    sizes = live_sizes(ranks) if ranks > 1 else Sizes(1)

    def run(make: Make) -> Outcome:
        def body(rank: int, store: Any) -> dict[str, float]:
            load(contest.module)  # here, not before the fork: importing Megatron-Core begins to use the GPU
            return _measure(make, sizes, rank, store, bound)

        return run_world(ranks, body, limit=limit, backend=None)

    def absent(contest: Contest) -> str | None:
        why: str | None = run_isolated(lambda: missing(contest), limit=limit).checked()[0]
        return why

    note = ", world bound to its device" if bound else ""
    return contested("gpu", contest, ranks, rounds, run, note=note, absent=absent)


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
    return timed(make, sizes, "cuda") | {"device_bytes": free - _free_when_all_are_here()}


def _free_when_all_are_here() -> int:
    """Return the free bytes of the device, read while every rank waits."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        free: int = torch.cuda.mem_get_info()[0]
    return free


def _main() -> None:
    parser = options("gpu", __doc__, rounds=3)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one run may take")
    given = parser.parse_args()
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    # In another process, since CUDA does not survive a fork.
    here = run_isolated(_machine, limit=given.limit)
    if here.failure is not None:
        parser.exit(2, f"nothing measured: {here.failure}\n")
    tests, done = json.loads(given.json.read_text(encoding="utf-8"))["tests"], []
    about = {"machine": here.reports[0], "rounds": given.rounds, "cores": os.cpu_count()}
    for compared in _comparisons(given.ranks, given.rounds, given.limit):
        done.append(asdict(compared))
        record(given.json, {"tests": tests, **about, "comparisons": done})
        sys.stderr.write(f"{compared.what}, {compared.ranks} ranks: done\n")


if __name__ == "__main__":
    _main()
