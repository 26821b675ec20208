"""What recording costs a step of two gloo ranks: the watch, and torch's recorder beneath it.

```
watch       one pair of processes, blocks of steps in turn: without a watch, with one, with one, without ...
alone       the same with blocks in which the program sleeps: what is left is what the watch itself does
recorder    pairs of processes in turn, whose recorder keeps nothing and 2,000 calls: processor time of one small call
```

Torch 2.13 has its recorder on by itself, so the watch is what ``record=True`` adds. A step's wall time and its
processor time (of both ranks, with all their threads) are taken: the second says more on a machine with other work.
Both scatter by more than a watch costs, so what it does is also measured by itself, with a recorder that is full.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

__all__ = ["measured"]

# Seconds of one block; a watch looks once a second.
_BLOCK = 2.0
_CALLS, _ROUNDS = 10_000, 5

_BEGIN = """
import json, os, sys, time
from datetime import timedelta
rank, folder, arguments = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
os.environ["TORCH_FR_BUFFER_SIZE"] = str(arguments.get("kept", 2000))
import torch, torch.distributed as dist
torch.set_num_threads(1)
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=300))
"""

# With a watch and without one in turn: rank 0 tells what each block took, the sum over both ranks.
_IN_TURN = f"""{_BEGIN}
from rankmesh.debug import watch

def in_turn(block):
    found = {{"without": [], "with": []}}
    for pair in range(arguments["pairs"]):
        for what in ("without", "with") if pair % 2 == 0 else ("with", "without"):
            here = watch.start(f"{{folder}}/recordings") if what == "with" else None
            dist.barrier()
            taken = torch.tensor(block(), dtype=torch.float64)
            dist.all_reduce(taken)
            found[what].append(taken.tolist())
            if here:
                here.close()
    if rank == 0:
        print(json.dumps(found))
"""

_WATCH = f"""{_IN_TURN}
weight, batch = torch.randn(512, 512), torch.randn(256, 512)

def step():
    out = batch
    for _ in range(8):
        out = torch.relu(out @ weight) * 0.01
        dist.all_reduce(out)

def block(steps):
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return (time.perf_counter() - wall) / steps, (time.process_time() - processor) / steps

def settled():
    time.sleep(0.2)
    wall, processor = block(int(steps))
    return wall / 2, processor

block(50)
steps = torch.tensor(max(10, int(arguments["seconds"] / block(100)[0])))
dist.broadcast(steps, 0)
in_turn(settled)
"""

_ISOLATED = f"""{_IN_TURN}
def asleep():
    time.sleep(2)
    began = time.process_time()
    time.sleep(arguments["seconds"])
    return [(time.process_time() - began) / arguments["seconds"] / 2]

for _ in range(2500):
    dist.all_reduce(torch.ones(4))
in_turn(asleep)
"""

_RECORDER = f"""{_BEGIN}
one = torch.ones(4)
for _ in range(500):
    dist.all_reduce(one)
started = time.process_time()
for _ in range(arguments["calls"]):
    dist.all_reduce(one)
taken = torch.tensor(time.process_time() - started, dtype=torch.float64)
dist.all_reduce(taken)
if rank == 0:
    print(json.dumps(taken.item() / 2 / arguments["calls"]))
"""


def measured(pairs: int = 10) -> dict[str, Any]:
    """All three, as figures: seconds of each block and of one call, and processor time a second that a watch takes."""
    blocks = _run(_WATCH, pairs=pairs, seconds=_BLOCK)
    single = _run(_ISOLATED, pairs=3, seconds=5 * _BLOCK)
    calls: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(_ROUNDS):
        for what in ("without", "with") if turn % 2 == 0 else ("with", "without"):
            calls[what].append(_run(_RECORDER, calls=_CALLS, kept=2000 if what == "with" else 0))
    wall, processor = ([[block[i] for block in blocks[what]] for what in ("without", "with")] for i in (0, 1))
    return {
        "load": os.getloadavg()[0],
        "blocks": len(blocks["with"]),
        "step": statistics.median(wall[0]),
        "wall": _ratios(*wall),
        "processor": _ratios(*processor),
        "alone": {what: _spread([value for (value,) in values]) for what, values in single.items()},
        "call": {what: statistics.median(seconds) for what, seconds in calls.items()},
        "call_ratio": _ratios(calls["without"], calls["with"]),
    }


def _spread(values: Sequence[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)]


def _ratios(without: Sequence[float], with_it: Sequence[float]) -> list[float]:
    """Of the blocks pair by pair: the lowest ratio, the quartiles, and the highest."""
    ratios = sorted(one / other for one, other in zip(with_it, without, strict=True))
    return [ratios[0], *statistics.quantiles(ratios, n=4), ratios[-1]]


def _run(program: str, **arguments: float) -> Any:
    """What rank 0 of two prints."""
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as folder:
        ranks = [
            subprocess.Popen(  # noqa: S603
                [sys.executable, "-W", "ignore", "-c", program, str(rank), folder, json.dumps(arguments)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in (0, 1)
        ]
        output = [rank.communicate(timeout=300)[0] for rank in ranks]
    return json.loads(output[0])
