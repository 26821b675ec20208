"""One rank whose state goes from layout to layout: ``python -m bench.hold_rank FOLDER BYTES REDUNDANCY``.

```
epoch 0   dp=all            hold, commits    every rank holds everything: BYTES
epoch 1   dp=half,tp=2      hold, commits    a half of it: nothing is sent
epoch 2   the same          hold, commits    on a rank that is left after a loss
```

In each epoch the process also reads the tensors once, and copies them once into memory that is there: the limits.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import rankmesh as rm
from bench.memory import highest, resident

TENSORS, COLUMNS, COMMITS, TIMES = 16, 1024, 4, 3


def _taken(call: Callable[[], object]) -> dict[str, float]:
    """Return the seconds, the processor seconds of all threads, and the page faults of a call."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, processor = time.perf_counter(), time.process_time()
    call()
    found = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
    return found | {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults}


def _median(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(one[name] for one in found) for name in found[0]}


def _limits(tensors: list[torch.Tensor]) -> dict[str, dict[str, float]]:
    """Return what one read of the tensors takes, one copy into memory that is there, and one into new pages."""
    into = [torch.ones_like(one) for one in tensors]

    def copy() -> None:
        for to, one in zip(into, tensors, strict=True):
            to.copy_(one)

    calls: dict[str, Callable[[], object]] = {
        "copy": copy,
        "fresh": lambda: [torch.empty_like(one).copy_(one) for one in tensors],
        "read": lambda: [one.view(torch.int64).max() for one in tensors],
    }
    return {name: _median([_taken(call) for _ in range(TIMES)]) for name, call in calls.items()}


def program(rows: int, size: int, report: Callable[[dict[str, Any]], object]) -> Callable[[rm.survival.Job], None]:
    """Return the function that ``rm.survive`` calls, on ``size`` ranks, with tensors of so many rows."""
    before = resident()

    def epoch(job: rm.survival.Job) -> None:
        sharding = rm.Sharding(job.plan.mesh, ("tp" if "tp" in job.plan.mesh.axes else None, None), (rows, COLUMNS))
        shape = sharding.of(job.rank).shape
        tensors = {f"weight{n}": torch.full(shape, 0.0 if job.epoch else 1.0 + n) for n in range(TENSORS)}
        found: dict[str, Any] = {"epoch": job.epoch, "bytes": sum(one.nbytes for one in tensors.values())}
        found["hold"] = _taken(lambda: job.hold(tensors, dict.fromkeys(tensors, sharding)))
        if not all((one == 1.0 + n).all() for n, one in enumerate(tensors.values())):
            raise RuntimeError("tensors have other values after hold() than before")
        found["commits"] = [_taken(lambda: job.commit(job.step + 1)) for _ in range(COMMITS)]
        found |= {"phases": dict(job.seconds), "peak": highest() - before}
        report(found | _limits(list(tensors.values())))
        resident()  # the peak of the next epoch begins here

    def train(job: rm.survival.Job) -> None:
        epoch(job)
        if job.epoch < 2:
            job.relayout((f"dp={size // 2},tp=2", f"dp={size // 2},tp=2,pp=1")[job.epoch])

    return train


def _main() -> None:
    torch.set_num_threads(1)
    folder, count, redundancy = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    size, rows = int(os.environ["WORLD_SIZE"]), max(2, count // (4 * TENSORS * COLUMNS) // 2 * 2)
    with (folder / f"rank-{os.environ['RANK']}.jsonl").open("a", buffering=1, encoding="utf-8") as file:
        report = lambda found: file.write(json.dumps(found) + "\n")  # noqa: E731
        rm.survive(program(rows, size, report), f"dp={size}", timeout=60, redundancy=redundancy)


if __name__ == "__main__":
    _main()
