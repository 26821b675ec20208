"""What ``RANKMESH=watch`` costs a training step: two worlds of two gloo ranks, of which one is watched, in turn.

```
parent ── steps ──> world without the variable   a block     seconds of it     a pair
       ── steps ──> world with the variable      a block     seconds of it
```

A step is that of ``DistributedDataParallel``. A world that waits for its turn makes no calls. A block lasts as long
as the watch needs to look twice, and the order changes with each pair: what else the machine does is in both.

The ratios scatter by more than a watch costs on a machine with other work; the processor time of the watch's
own threads does not.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["measured"]

_BLOCK, _RANKS = 2.0, 2
_SIZE = 512


def _rank(number: int, meeting: str) -> None:
    """Time the blocks whose numbers of steps come on standard input, in seconds of a clock and of the processor."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=_RANKS)
    torch.set_num_threads(1)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(_SIZE, _SIZE), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(256, _SIZE)
    for line in sys.stdin:
        dist.barrier()
        wall, processor, before = time.perf_counter(), time.process_time(), _watch_time()
        for _ in range(int(line)):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        taken = [time.perf_counter() - wall, time.process_time() - processor, _watch_time() - before]
        sys.stdout.write(json.dumps(taken) + "\n")
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
                [sys.executable, "-m", "bench.switch", str(rank), str(folder / "meeting")],
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


def measured(pairs: str = "36") -> dict[str, Any]:
    """Measure pairs of blocks in turn; what is found has the ratios with and without the variable."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="rankmesh-bench-") as name:
        folders = [Path(name, what) for what in ("without", "with")]
        for folder in folders:
            folder.mkdir()
        worlds = [_World(folders[0], {}), _World(folders[1], {"RANKMESH": f"watch:dir={folders[1] / 'hangs'}"})]
        for world in worlds:
            world.block(20)
        steps = max(1, int(_BLOCK / worlds[0].block(20)[0]))
        found = []
        for pair in range(int(pairs)):
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            times = {which: worlds[which].block(steps) for which in order}
            found.append((times[0], times[1]))
        for world in worlds:
            world.end()
        watched = len(list((folders[1] / "hangs").iterdir()))
    if watched != _RANKS:
        raise RuntimeError(f"{watched} of {_RANKS} ranks were watched")
    return {
        "load": [before, os.getloadavg()[0]],
        "pairs": len(found),
        "step": statistics.median(without[0] for without, _ in found),
        "watch": _spread([watched[2] / watched[1] for _, watched in found]),
        "wall": _spread([watched[0] / without[0] for without, watched in found]),
        "processor": _spread([watched[1] / without[1] for without, watched in found]),
    }


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median, its interval of 95 % (by the order of the ratios), and the quartiles."""
    ordered, half = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = int(len(ratios) / 2 - half), min(len(ratios) - 1, int(len(ratios) / 2 + half))
    quartiles = statistics.quantiles(ordered, n=4)
    return {
        "median": statistics.median(ordered),
        "low": ordered[max(0, low)],
        "high": ordered[high],
        "quartile": quartiles[0],
        "other_quartile": quartiles[2],
    }


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])
