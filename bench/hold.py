"""What keeping state costs beside the memory itself: job.hold, job.commit, one copy and one read in one process.

A copy of all that a rank holds into memory that is there is the limit of a commit, and of ``hold`` after a change where
the rank held all of it before; else two: one into the program's tensors, one into the snapshot. The limit of the first
``hold`` is a copy into new pages (``fresh``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.lost import environment

__all__ = ["CASES", "measured_hold"]

# Ranks, and bytes that each holds at first.
CASES = ((4, 1 << 20), (4, 64 << 20), (4, 512 << 20), (8, 64 << 20), (16, 64 << 20))
_ROOT = Path(__file__).parents[1]


def measured_hold(ranks: int, count: int, *, redundancy: int = 0, limit: float = 300.0) -> dict[str, Any]:
    """Measure one job: for each epoch medians over the ranks, but for the highest peak."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory(prefix="rankmesh-hold-") as name:
        command = [*launcher, "-m", "bench.hold_rank", name, str(count), str(redundancy)]
        done = subprocess.run(  # noqa: S603 - this program's own
            command, env=environment(), cwd=_ROOT, capture_output=True, text=True, timeout=limit, check=False
        )
        if done.returncode:
            raise RuntimeError(f"bench.hold_rank failed with status {done.returncode}: {done.stderr[-1500:]}")
        lines = [json.loads(line) for path in Path(name).glob("*.jsonl") for line in path.read_text().splitlines()]
    return {"ranks": ranks, "bytes": count, "epochs": [_epoch(lines, number) for number in range(3)]}


def _epoch(lines: list[dict[str, Any]], number: int) -> dict[str, Any]:
    found = [line for line in lines if line["epoch"] == number]

    def all_ranks(each: list[dict[str, float]]) -> dict[str, float]:
        return {name: median(one[name] for one in each) for name in each[0]}

    parts = {name: all_ranks([line[name] for line in found]) for name in ("hold", "copy", "fresh", "read")}
    # The first two commits of an epoch allocate their snapshots.
    parts["commit"] = all_ranks([commit for line in found for commit in line["commits"][2:]])
    peak = max(line["peak"] for line in found)
    return {"bytes": found[0]["bytes"], "peak": peak, "phases": all_ranks([line["phases"] for line in found]), **parts}
