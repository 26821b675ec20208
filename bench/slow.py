"""What it costs to look for slow ranks: ``python -m bench.slow`` prints it; docs/decisions.md has how that works.

```
step        processor time of the watch's thread on 4 gloo ranks, with and without, in turns; and the same program with
            nvidia-resiliency-ext's straggler detector, which is told of each step (its CPU part: no CUPTI here)
store       bytes to the store of 64 ranks, a rank and second
16,384      one evaluation: merging 128 messages, finding, writing, on rank 0
```
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.processes import torchrun

SECONDS, BLOCK, STEP = 112.0, 8.0, 0.1


def main() -> None:
    """Print what each part costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("step", "store", "large"), help="one part; default: all")
    parts = {"step": _step, "store": _store, "large": _large}
    chosen = parser.parse_args().part
    for name, part in parts.items():
        if chosen in (None, name):
            for line in part():
                sys.stdout.write(f"{name:6} {line}\n")
                sys.stdout.flush()


# -- a step ---------------------------------------------------------------------------------------------------------


def _step() -> list[str]:
    lines = []
    for detector in ("rankmesh", "nvidia"):
        with tempfile.TemporaryDirectory() as folder:
            switch = {"RANKMESH": f"watch:dir={folder}"} if detector == "rankmesh" else {}
            try:
                torchrun(4, "bench.slow", "rank", detector, folder, limit=600, **switch)
            except RuntimeError:
                lines.append(f"{detector}: not measured, as it failed")
                continue
            ranks = [json.loads(path.read_text()) for path in Path(folder).glob("bench*.json")]
        on, off = (np.mean([rank[name] for rank in ranks]) for name in ("on", "off"))
        step, thread = (np.mean([rank[name] for rank in ranks]) for name in ("step", "thread"))
        text = f"{detector}: processor time of a step {1000 * off:.2f} ms without, {1000 * on:.2f} ms with"
        if detector == "rankmesh":
            text += f"; of the thread {1e6 * thread:.0f} us more in a step of {1000 * step:.0f} ms"
            text += f": {100 * thread / step:.3f} % of the step, {100 * thread / off:.3f} % of its processor time"
        lines.append(text)
    return lines


class Detector:
    """A detector of slow ranks that can be switched off, without a thread and a recorder of its own."""

    on = False

    def switch(self, *, on: bool) -> None:
        """Use it, or not."""
        self.on = on

    def step(self, train: Callable[[], None]) -> None:
        """Train one step."""
        train()

    def seconds(self) -> float:
        """Processor time of its thread."""
        return 0.0

    def reading(self) -> float:
        """Processor time, of each second, of reading the recorder once in so many windows."""
        return 0.0


class Rankmesh(Detector):
    """The watch of this process, and whether it looks for slow ranks."""

    def __init__(self) -> None:
        from rankmesh.runtime.world import World

        (ask,) = World.current().diagnosing
        self.watch = ask.__self__  # type: ignore[attr-defined]
        self.slow = self.watch._slow
        self.thread = self.watch._thread.native_id

    def switch(self, *, on: bool) -> None:
        """Have the watch look, or not."""
        self.watch._slow = self.slow if on else None

    def seconds(self) -> float:
        """Processor time of the watch's thread."""
        return int(Path(f"/proc/self/task/{self.thread}/schedstat").read_text().split()[0]) / 1e9

    def reading(self) -> float:
        """Processor time, of each second, of reading the recorder once in so many windows."""
        from rankmesh.backend.recorder import calls_kept
        from rankmesh.debug.watch import slow_watch, speed

        began = time.thread_time()
        self.slow._sampler._learn(calls_kept(0))
        return (time.thread_time() - began) / speed._READ / slow_watch.window_seconds(dist.get_world_size())


class Nvidia(Detector):
    """The detector of nvidia-resiliency-ext, without CUPTI, whose section is the step; it reports every 4 s."""

    def __init__(self) -> None:
        straggler: Any = importlib.import_module("nvidia_resiliency_ext.straggler.straggler")

        class NoCupti:
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def __getattr__(self, name: str) -> Any:
                return lambda *_, **__: {}

        straggler.CuptiManager = NoCupti
        # It sends its numbers on a GPU's group; here they stay on the CPU.
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda *_: None
        self.detector = straggler.Detector
        self.detector.initialize(scores_to_compute="all", gather_on_rank0=True, report_time_interval=4)

    def step(self, train: Callable[[], None]) -> None:
        """Train one step, in a section."""
        if not self.on:
            train()
            return
        with self.detector.detection_section("step", profile_cuda=False):
            train()
        self.detector.generate_report_if_interval_elapsed()


def _rank(kind: str, folder: str) -> None:
    """Train on one rank, in turns with and without the detector."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    detector = Rankmesh() if kind == "rankmesh" else Nvidia()
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(64, 256)

    def train() -> None:
        time.sleep(STEP * 0.6)
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    end, spent = torch.zeros(1), {True: list[list[float]](), False: list[list[float]]()}
    for _ in range(20):
        train()
    for block in range(int(SECONDS / BLOCK)):
        on = block % 2 == 0
        dist.barrier()
        detector.switch(on=on)
        began, cpu, thread, steps = time.monotonic(), time.process_time(), detector.seconds(), 0
        while True:
            detector.step(train)
            steps += 1
            if steps % 10 == 0:
                end.fill_(float(time.monotonic() - began > BLOCK))
                dist.broadcast(end, 0)
                if end.item():
                    break
        now = (time.monotonic() - began, time.process_time() - cpu, detector.seconds() - thread)
        spent[on].append([value / steps for value in now])
    # Of the median block: in some of the first ones the watch reads the recorder, which it does more rarely later.
    cost = {on: [median(values) for values in zip(*blocks, strict=True)] for on, blocks in spent.items()}
    found = {
        "on": cost[True][1],
        "off": cost[False][1],
        "step": cost[False][0],
        "thread": cost[True][2] - cost[False][2] + detector.reading() * cost[False][0],
    }
    (Path(folder) / f"bench{dist.get_rank()}.json").write_text(json.dumps(found))
    detector.switch(on=True)
    dist.barrier()
    dist.destroy_process_group()


# -- messages -------------------------------------------------------------------------------------------------------


def _summary(ranks: int, per_host: int) -> Any:
    from rankmesh.debug.slow.summary import Group, merged, summary_of

    random, tp, made = np.random.default_rng(0), 8, []
    for rank in range(ranks):
        first = rank - rank % tp
        groups = [
            Group(f"tp{first}", "tp", f"tp@dp{first // tp}", "all_reduce", tuple(range(first, first + tp))),
            Group(f"dp{rank % tp}", "dp", f"dp@tp{rank % tp}", "all_reduce", tuple(range(rank % tp, ranks, tp))),
            Group("0", "world", "world", "barrier", tuple(range(ranks))),
        ]
        shares = random.uniform(0.05, 0.1, 3)
        row: dict[str, Any] = {
            "rank": rank,
            "host": f"node{rank // per_host}",
            "place": "5f3a9c21",
            "step": 1e6 * random.normal(2, 0.01),
        }
        row |= {"computes": 10_000 * (1 - shares.sum()), "stretch": 400, "queued": random.integers(100), "reading": 0}
        row |= {"site": f"/job/train.py:{80 + rank % 5} in step", "data": ""}
        made.append(summary_of(row, dict(zip(groups, map(float, shares), strict=True))))
    return merged(made)


def _texts(whole: Any, parts: int) -> list[str]:
    """Return the summaries of so many parts of the ranks."""
    from dataclasses import replace

    texts = []
    for rows in np.array_split(np.arange(len(whole.rows)), parts):
        waits = whole.waits[np.isin(whole.waits[:, 0], rows)].copy()
        waits[:, 0] -= rows[0]
        used, waits[:, 1] = np.unique(waits[:, 1], return_inverse=True)
        groups = tuple(whole.groups[number] for number in used)
        texts.append(replace(whole, rows=whole.rows[rows], waits=waits, groups=groups).to_text())
    return texts


def _store() -> list[str]:
    from rankmesh.debug.watch.slow_watch import window_seconds

    rate = np.mean([*map(len, _texts(_summary(64, 8), 64))]) / window_seconds(64)
    return [f"64 ranks: {rate:.0f} bytes a rank and second to the store"]


def _large() -> list[str]:
    from rankmesh.debug.slow.findings import MEMORY, Window
    from rankmesh.debug.slow.job import JobSpeed
    from rankmesh.debug.slow.summary import Summary, merged
    from rankmesh.debug.watch.slow_watch import window_seconds

    ranks, lines = 16_384, []
    whole = _summary(ranks, 8)
    parts = _texts(whole, 128)
    job = JobSpeed(60)
    with tempfile.TemporaryDirectory() as folder:
        times = []
        for number in range(MEMORY):
            began = time.thread_time()
            window = Window(float(number), window_seconds(ranks), ranks, merged([*map(Summary.from_text, parts)]))
            read = time.thread_time()
            report = job.add(window)
            found = time.thread_time()
            report.write(folder)
            times.append((read - began, found - read, time.thread_time() - found))
        size = (Path(folder) / "slow.json").stat().st_size
    seconds = np.median(times, axis=0)
    share = 100 * seconds.sum() / window_seconds(ranks)
    text = "reading {:.2f} s, finding {:.2f} s, writing {:.2f} s".format(*seconds)
    lines.append(f"16,384 ranks, every {window_seconds(ranks):.0f} s on rank 0: {text} ({share:.1f} % of its time)")
    lines.append(f"messages that it reads: 128 of {max(map(len, parts)) / 1e6:.2f} MB; slow.json {size / 1e6:.2f} MB")
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _rank(*sys.argv[2:])
    else:
        main()
