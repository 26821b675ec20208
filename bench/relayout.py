"""What a change of the layout costs: job.relayout, beside a restart with torchrun from a checkpoint of torch DCP.

```
relayout   asked ──free──agree──connect──build──transfer──step──>
restart    asked ──save──stop──start──connect──build──load──step──>
```

Each phase ends when the last rank has come to its end; the first begins when the last rank asks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lost import environment

__all__ = ["PHASES", "SIZES", "measured_changes"]

SIZES = (8, 16)
# For each way its phases, and the mark at which each ends.
PHASES = {
    "relayout": {
        "free": "freed",
        "agree": "agreed",
        "connect": "connected",
        "build": "built",
        "transfer": "moved",
        "step": "stepped",
    },
    "restart": {
        "save": "saved",
        "stop and start": "started",
        "connect": "connected",
        "build": "built",
        "load": "moved",
        "step": "stepped",
    },
}
_ROOT = Path(__file__).parents[1]


def measured_changes(rounds: int, *, ranks: int, limit: float = 400.0) -> dict[str, Any]:
    """Measure both ways in turn: the seconds of each phase, of each round."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in PHASES}
    for _ in range(rounds):
        for way, runs in (("relayout", ("relayout",)), ("restart", ("save", "load"))):
            with tempfile.TemporaryDirectory(prefix="rankmesh-relayout-") as name:
                for how in runs:
                    _run(Path(name), how, ranks, limit)
                found[way].append(_phases(Path(name), PHASES[way], ranks))
    return {"ranks": ranks, "rounds": rounds, "phases": found}


def _run(folder: Path, how: str, ranks: int, limit: float) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "bench.relayout_rank", str(folder), how]
    done = subprocess.run(  # noqa: S603 - this program's own
        command, env=environment(), cwd=_ROOT, capture_output=True, text=True, timeout=limit, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{how} failed with status {done.returncode}: {done.stderr[-1500:]}")


def _phases(folder: Path, phases: Mapping[str, str], ranks: int) -> dict[str, float]:
    """Return the seconds of each phase, of the last rank to end it."""
    lines = [json.loads(line) for path in folder.glob("log-*.jsonl") for line in path.read_text().splitlines()]
    begun = min(line["time"] for line in lines if line["what"] == "asked")
    ends = [max(line["time"] for line in lines if line["what"] == "asked")]
    for mark in phases.values():
        first: dict[int, float] = {}
        for line in lines:
            if line["what"] == mark and line["time"] > begun:
                first[line["member"]] = min(first.get(line["member"], float("inf")), line["time"])
        if len(first) < ranks:
            raise RuntimeError(f"{ranks - len(first)} ranks did not come to the mark {mark!r}")
        ends.append(max(first.values()))
    return {name: end - start for name, start, end in zip(phases, ends, ends[1:], strict=False)}
