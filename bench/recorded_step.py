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

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench.processes import run_world
from rankmesh.debug import watch

__all__ = ["measured"]

# Seconds of one block; a watch looks once a second.
_BLOCK = 2.0
_CALLS, _ROUNDS = 10_000, 5

Block = Callable[[], Sequence[float]]


def _with_and_without(block: Block, pairs: int, folder: str) -> dict[str, list[list[float]]]:
    """Time each block, the sum over both ranks: with a watch and without one in turn."""
    found: dict[str, list[list[float]]] = {"without": [], "with": []}
    for pair in range(pairs):
        for what in ("without", "with") if pair % 2 == 0 else ("with", "without"):
            here = watch.start(folder) if what == "with" else None
            dist.barrier()
            taken = torch.tensor(block(), dtype=torch.float64)
            dist.all_reduce(taken)
            found[what].append(taken.tolist())
            if here is not None:
                here.close()
    return found


def _steps(pairs: int, folder: str) -> dict[str, list[list[float]]]:
    """Time blocks of steps: eight matrix products and eight reductions each."""
    weight, inputs = torch.randn(512, 512), torch.randn(256, 512)

    def block(steps: int) -> tuple[float, float]:
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            out = inputs
            for _ in range(8):
                out = torch.relu(out @ weight) * 0.01
                dist.all_reduce(out)
        return (time.perf_counter() - wall) / steps, (time.process_time() - processor) / steps

    block(50)
    steps = torch.tensor(max(10, int(_BLOCK / block(100)[0])))
    dist.broadcast(steps, 0)

    def settled() -> tuple[float, float]:
        time.sleep(0.2)
        wall, processor = block(int(steps))
        return wall / 2, processor

    return _with_and_without(settled, pairs, folder)


def _asleep(pairs: int, folder: str) -> dict[str, list[list[float]]]:
    """Time blocks of sleep, with a recorder that is full."""
    for _ in range(2500):
        dist.all_reduce(torch.ones(4))

    def block() -> tuple[float]:
        time.sleep(2)
        began = time.process_time()
        time.sleep(5 * _BLOCK)
        return ((time.process_time() - began) / (5 * _BLOCK) / 2,)

    return _with_and_without(block, pairs, folder)


def _small_call(_pairs: int, _folder: str) -> float:
    """Return the processor seconds of one small reduction."""
    one = torch.ones(4)
    for _ in range(500):
        dist.all_reduce(one)
    started = time.process_time()
    for _ in range(_CALLS):
        dist.all_reduce(one)
    taken = torch.tensor(time.process_time() - started, dtype=torch.float64)
    dist.all_reduce(taken)
    return taken.item() / 2 / _CALLS


def _run(program: Callable[[int, str], Any], pairs: int = 0, kept: int = 2000) -> Any:
    """Run a program on two ranks whose recorder keeps that many calls; return its value."""
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as folder:

        def body(rank: int, store: Any) -> dict[str, Any]:
            os.environ["TORCH_FR_BUFFER_SIZE"] = str(kept)  # read at the first call
            dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
            return {"rank": rank, "found": program(pairs, folder)}

        outcome = run_world(2, body, limit=300, backend=None)
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    return outcome.reports[0]["found"]


def measured(pairs: int = 10) -> dict[str, Any]:
    """Measure all three: seconds of each block and of one call, and the watch's processor time a second."""
    blocks, single = _run(_steps, pairs), _run(_asleep, 3)
    calls: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(_ROUNDS):
        for what in ("without", "with") if turn % 2 == 0 else ("with", "without"):
            calls[what].append(_run(_small_call, kept=2000 if what == "with" else 0))
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
    """Return the lowest ratio of the blocks pair by pair, the quartiles, and the highest."""
    ratios = sorted(one / other for one, other in zip(with_it, without, strict=True))
    return [ratios[0], *statistics.quantiles(ratios, n=4), ratios[-1]]
