"""One rank of ``bench.slow``: steps of a small model, with a detector in every other block of seconds."""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.slow import BLOCK, SECONDS, STEP


class Rankmesh:
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

    def step(self, train: Callable[[], None]) -> None:
        """Train one step."""
        train()

    def reading(self) -> float:
        """Processor time, of each second, of reading the recorder once in so many windows."""
        from rankmesh.backend.recorder import calls_kept
        from rankmesh.debug.watch import slow_watch, speed

        began = time.thread_time()
        self.slow._sampler._learn(calls_kept(0))
        return (time.thread_time() - began) / speed._READ / slow_watch.window_seconds(dist.get_world_size())


class Nvidia:
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
        self.on = False

    def switch(self, *, on: bool) -> None:
        """Use the detector, or not."""
        self.on = on

    def seconds(self) -> float:
        """Nothing: it has no thread."""
        return 0.0

    def step(self, train: Callable[[], None]) -> None:
        """Train one step in a section."""
        if not self.on:
            train()
            return
        with self.detector.detection_section("step", profile_cuda=False):
            train()
        self.detector.generate_report_if_interval_elapsed()

    def reading(self) -> float:
        """Nothing: it has no recorder."""
        return 0.0


def main() -> None:
    """Train, in turns with and without the detector."""
    kind, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    detector: Rankmesh | Nvidia = Rankmesh() if kind == "rankmesh" else Nvidia()
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


if __name__ == "__main__":
    main()
