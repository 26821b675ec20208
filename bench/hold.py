"""What keeping state costs beside the memory itself: job.hold, job.commit, one copy and one read in one process.

```
epoch 0   dp=all            hold, commits    every rank holds everything: BYTES
epoch 1   dp=half,tp=2      hold, commits    a half of it: nothing is sent
epoch 2   the same          hold, commits    on a rank that is left after a loss
```

A copy of all that a rank holds into memory that is there is the limit of a commit, and of ``hold`` after a change where
the rank held all of it before; else two: one into the program's tensors, one into the snapshot.

One rank is ``python -m bench.hold FOLDER BYTES``, under torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import rankmesh as rm
from bench.memory import highest, resident
from bench.processes import lines, torchrun
from bench.results import Sample, taken

__all__ = ["CASES", "measured_hold"]

# Ranks, and bytes that each holds at first.
CASES = ((4, 1 << 20), (4, 64 << 20), (4, 512 << 20), (8, 64 << 20), (16, 64 << 20))
TENSORS, COLUMNS, COMMITS, TIMES = 16, 1024, 4, 3


def measured_hold(ranks: int, count: int, *, limit: float = 300.0) -> dict[str, Any]:
    """Measure one job: for each epoch medians over the ranks, but for the highest peak."""
    with tempfile.TemporaryDirectory(prefix="rankmesh-hold-") as name:
        torchrun(ranks, "bench.hold", name, count, limit=limit)
        found = lines(Path(name))
    return {"ranks": ranks, "epochs": [_epoch([line for line in found if line["epoch"] == each]) for each in range(3)]}


def _epoch(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    parts = {name: _median([line[name] for line in found]) for name in ("hold", "copy", "read")}
    # The first two commits of an epoch allocate their snapshots.
    parts["commit"] = _median([commit for line in found for commit in line["commits"][2:]])
    return {"bytes": found[0]["bytes"], "peak": max(line["peak"] for line in found), **parts}


def _median(found: Sequence[Sample]) -> Sample:
    return {name: median(one[name] for one in found) for name in found[0]}


# -- one rank ----------------------------------------------------------------------------------------------------------


def _limits(tensors: list[torch.Tensor]) -> dict[str, Sample]:
    """Return what one read of the tensors takes, and one copy into memory that is there."""
    into = [torch.ones_like(one) for one in tensors]
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: [to.copy_(one) for to, one in zip(into, tensors, strict=True)],
        "read": lambda: [one.view(torch.int64).max() for one in tensors],
    }
    return {name: _median([taken(call) for _ in range(TIMES)]) for name, call in calls.items()}


def program(rows: int, size: int, report: Callable[[dict[str, Any]], object]) -> Callable[[rm.survival.Job], None]:
    """Return the function that ``rm.survive`` calls, on ``size`` ranks, with tensors of so many rows."""
    before = resident()

    def epoch(job: rm.survival.Job) -> None:
        sharding = rm.Sharding(job.plan.mesh, ("tp" if "tp" in job.plan.mesh.axes else None, None), (rows, COLUMNS))
        shape = sharding.of(job.rank).shape
        tensors = {f"weight{n}": torch.full(shape, 0.0 if job.epoch else 1.0 + n) for n in range(TENSORS)}
        found: dict[str, Any] = {"epoch": job.epoch, "bytes": sum(one.nbytes for one in tensors.values())}
        found["hold"] = taken(lambda: job.hold(tensors, dict.fromkeys(tensors, sharding)))
        if not all((one == 1.0 + n).all() for n, one in enumerate(tensors.values())):
            raise RuntimeError("tensors have other values after hold() than before")
        found["commits"] = [taken(lambda: job.commit(job.step + 1)) for _ in range(COMMITS)]
        found["peak"] = highest() - before
        report(found | _limits(list(tensors.values())))
        resident()  # the peak of the next epoch begins here

    def train(job: rm.survival.Job) -> None:
        epoch(job)
        if job.epoch < 2:
            job.relayout((f"dp={size // 2},tp=2", f"dp={size // 2},tp=2,pp=1")[job.epoch])

    return train


def _main() -> None:
    torch.set_num_threads(1)
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    size, rows = int(os.environ["WORLD_SIZE"]), max(2, count // (4 * TENSORS * COLUMNS) // 2 * 2)
    with (folder / f"rank-{os.environ['RANK']}.jsonl").open("a", buffering=1, encoding="utf-8") as file:
        train = program(rows, size, lambda found: file.write(json.dumps(found) + "\n"))
        rm.survive(train, f"dp={size}", timeout=60)


if __name__ == "__main__":
    _main()
