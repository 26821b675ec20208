"""What recording costs two gloo ranks: the watch by itself, and torch's recorder beneath it.

```
alone       one pair of processes that sleep, in turn without a watch, with one, with one, without ...
recorder    pairs of processes in turn, whose recorder keeps nothing and 2,000 calls: processor time of one small call
```

Torch 2.13 has its recorder on by itself, so the watch is what ``record=True`` adds. It is measured with a recorder
that is full; ``bench.switch`` measures it in a training step.
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
_BLOCK = 10.0
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


def _asleep(pairs: int, folder: str) -> dict[str, list[list[float]]]:
    """Time blocks of sleep, with a recorder that is full."""
    for _ in range(2500):
        dist.all_reduce(torch.ones(4))

    def block() -> tuple[float]:
        time.sleep(2)
        began = time.process_time()
        time.sleep(_BLOCK)
        return ((time.process_time() - began) / _BLOCK / 2,)

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


def measured() -> dict[str, Any]:
    """Measure both: the watch's processor time a second, and that of one call."""
    single = _run(_asleep, 3)
    calls: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(_ROUNDS):
        for what in ("without", "with") if turn % 2 == 0 else ("with", "without"):
            calls[what].append(_run(_small_call, kept=2000 if what == "with" else 0))
    return {
        "load": os.getloadavg()[0],
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
