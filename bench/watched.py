"""What the watch costs: a training step, a program that sleeps; and what torch's recorder beneath it costs a call.

```
switch      parent ── steps ──> world without RANKMESH=watch    a block     seconds of it     a pair
                   ── steps ──> world with it                   a block     seconds of it
alone       one pair of processes that sleep, in turn without a watch, with one, with one, without ...
recorder    pairs of processes in turn, whose recorder keeps nothing and 2,000 calls: processor time of one small call
```

A step is that of ``DistributedDataParallel``. A world that waits for its turn makes no calls. A block lasts as long
as the watch needs to look twice, and the order changes with each pair: what else the machine does is in both. The
ratios scatter by more than a watch costs on a machine with other work; the processor time of the watch's own threads
does not.

Torch 2.13 has its recorder on by itself, so the watch is what ``record=True`` adds. While the program sleeps it is
measured with a recorder that is full.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.processes import run_world
from bench.report import load
from bench.results import spread, taken, turns
from rankmesh.debug import watch

__all__ = ["recorded", "switched"]

_BLOCK, _RANKS = 2.0, 2
_SIZE = 512
# Seconds of sleep; a watch looks once a second.
_SLEEP, _CALLS = 10.0, 10_000


def _rank(number: int, meeting: str) -> None:
    """Time the blocks whose numbers of steps come on standard input, in seconds of a clock and of the processor."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=_RANKS)
    torch.set_num_threads(1)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(_SIZE, _SIZE), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(256, _SIZE)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    for line in sys.stdin:
        dist.barrier()
        before, both = _watch_time(), taken(partial(train, int(line)))
        sys.stdout.write(json.dumps([both["wall"], both["processor"], _watch_time() - before]) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def _watch_time() -> float:
    """Return the processor seconds of the watch's threads so far."""
    idents = (thread.ident for thread in threading.enumerate() if thread.name.startswith("rankmesh"))
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


class _World:
    """The ranks of a world, each of which waits for a number of steps."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKMESH")}
        self._ranks = [
            subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "bench.watched", str(rank), str(folder / "meeting")],
                env={**kept, "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(_RANKS)
        ]

    def block(self, steps: int) -> tuple[float, float, float]:
        """Return the seconds of a step: by the clock, of the processor, and of that what the watch's threads used.

        Those of the clock are of the slower rank, the others of both.
        """
        for rank in self._ranks:
            assert rank.stdin is not None  # noqa: S101
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        taken = [json.loads(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None]
        wall, processor, watch = zip(*taken, strict=True)
        return max(wall) / steps, sum(processor) / steps, sum(watch) / steps

    def end(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.communicate(timeout=60)


def switched(pairs: str = "36") -> dict[str, Any]:
    """Measure pairs of blocks in turn; what is found has the ratios with and without the variable."""
    before = load()
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as name:
        folders = {side: Path(name, side) for side in ("without", "with")}
        for folder in folders.values():
            folder.mkdir()
        hangs = folders["with"] / "hangs"
        variables = {"without": {}, "with": {"RANKMESH": f"watch:dir={hangs}"}}
        worlds = {side: _World(folder, variables[side]) for side, folder in folders.items()}
        for world in worlds.values():
            world.block(20)
        steps = max(1, int(_BLOCK / worlds["without"].block(20)[0]))
        found: dict[str, list[tuple[float, float, float]]] = {side: [] for side in worlds}
        for side in turns(int(pairs)):
            found[side].append(worlds[side].block(steps))
        for world in worlds.values():
            world.end()
        watched = len(list(hangs.glob("rank*.json.gz")))
    if watched != _RANKS:
        raise RuntimeError(f"{watched} of {_RANKS} ranks were watched")
    blocks = list(zip(found["without"], found["with"], strict=True))
    return {
        "load": [before, load()],
        "pairs": len(blocks),
        "step": statistics.median(without[0] for without, _ in blocks),
        "watch": _quartiles([watched[2] / watched[1] for _, watched in blocks]),
        "wall": _quartiles([watched[0] / without[0] for without, watched in blocks]),
        "processor": _quartiles([watched[1] / without[1] for without, watched in blocks]),
    }


def _quartiles(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median, its interval of 95 % (by the order of the ratios), and the quartiles."""
    ordered, half = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = int(len(ratios) / 2 - half), min(len(ratios) - 1, int(len(ratios) / 2 + half))
    quartile, median, other_quartile = statistics.quantiles(ordered, n=4)
    return {
        "median": median,
        "low": ordered[max(0, low)],
        "high": ordered[high],
        "quartile": quartile,
        "other_quartile": other_quartile,
    }


# -- asleep, and one call ----------------------------------------------------------------------------------------------


def _mean(seconds: float) -> float:
    """Return the mean over both ranks."""
    mean = torch.tensor(seconds / _RANKS, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item()


def _asleep(folder: str) -> dict[str, list[float]]:
    """Take the processor seconds of each second of sleep, with a recorder that is full."""
    for _ in range(2500):
        dist.all_reduce(torch.ones(4))
    found: dict[str, list[float]] = {"without": [], "with": []}
    for side in turns(3):
        here = watch.start(folder) if side == "with" else None
        dist.barrier()
        time.sleep(2)
        found[side].append(_mean(taken(lambda: time.sleep(_SLEEP))["processor"] / _SLEEP))
        if here is not None:
            here.close()
    return found


def _small_call() -> float:
    """Return the processor seconds of one small reduction."""
    one = torch.ones(4)

    def calls(count: int) -> None:
        for _ in range(count):
            dist.all_reduce(one)

    calls(500)
    return _mean(taken(lambda: calls(_CALLS))["processor"] / _CALLS)


def _on_ranks(program: Callable[[], Any], kept: int = 2000) -> Any:
    """Run a program on two ranks whose recorder keeps that many calls; return its value."""

    def body(rank: int, store: Any) -> Any:
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(kept)  # read at the first call
        dist.init_process_group("gloo", rank=rank, world_size=_RANKS, store=store)
        return program()

    return run_world(_RANKS, body, limit=300, backend=None).checked()[0]


def recorded() -> dict[str, Any]:
    """Measure both: the watch's processor time a second, and that of one call."""
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as folder:
        asleep = _on_ranks(lambda: _asleep(folder))
    calls: dict[str, list[float]] = {"without": [], "with": []}
    for side in turns(5):
        calls[side].append(_on_ranks(_small_call, kept=2000 if side == "with" else 0))
    ratios = sorted(one / other for one, other in zip(calls["with"], calls["without"], strict=True))
    return {
        "load": load(),
        "alone": {side: sorted(spread(values)) for side, values in asleep.items()},
        "call": {side: statistics.median(seconds) for side, seconds in calls.items()},
        # The lowest, the quartiles, the highest.
        "call_ratio": [ratios[0], *statistics.quantiles(ratios, n=4), ratios[-1]],
    }


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])
