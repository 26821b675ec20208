"""What a lost rank costs a job of rm.survive.

```
death of a rank ──notice──free──agree──connect──build──transfer──step──> the end of the first step after it
```

Each phase ends when the last member has come to its end. 16 ranks of examples/train_gpt (tp=2, pp=2, dp=4) train with
spares; one process is ``python -m bench.lost FOLDER``, and writes when what happened.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import rankmesh as rm
from bench.processes import ROOT, environment, free_port, lines
from rankmesh.survival.driver import Driver
from rankmesh.survival.rounds import Rounds

__all__ = ["Log", "first_times", "mark", "measured_losses"]

RANKS = 16
# For each phase the mark at which it ends.
PHASES = {
    "notice": "noticed",
    "free": "freed",
    "agree": "agreed",
    "connect": "connected",
    "build": "built",
    "transfer": "transferred",
    "step": "stepped",
}
# Members of different places: on both stages, the one that serves the store, a spare that took over.
DEATHS = [{"member": member, "step": step, "how": "SIGKILL"} for member, step in ((3, 2), (0, 4), (14, 6), (7, 8))] + [
    {"member": 9, "step": 10, "how": "SIGSTOP"}
]
STEPS = 12


def measured_losses(rounds: int, *, limit: float = 240.0) -> list[dict[str, Any]]:
    """Return what was lost at each death of each round."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="rankmesh-lost-") as name:
            _run(Path(name), RANKS + len(DEATHS), limit)
            found += _losses(lines(Path(name)), _output(Path(name)))
    return found


def _run(folder: Path, size: int, limit: float) -> None:
    """Start one process for each rank, as a launcher does that leaves the others alone; wait for those that live."""
    from rankmesh.launch.table import torchrun_variables

    port, running = free_port(), []
    for rank in range(size):
        variables = torchrun_variables(rank, size, local_rank=rank, local_world_size=size, port=port)
        with (folder / f"output-{rank}").open("w") as output:
            command = [sys.executable, "-m", "bench.lost", str(folder)]
            given = {**environment(), **variables}
            running.append(subprocess.Popen(command, env=given, stdout=output, stderr=output, cwd=ROOT))  # noqa: S603
    end = time.monotonic() + limit
    stopped = sum(death["how"] == "SIGSTOP" for death in DEATHS)
    try:
        while sum(one.poll() is None for one in running) > stopped and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
            one.wait()


def _losses(found: Sequence[Mapping[str, Any]], output: str) -> list[dict[str, Any]]:
    """Of each death: how it was, the seconds until the last rank had done the step, by phase; the steps done again."""
    deaths = sorted((line for line in found if line["what"] == "death"), key=lambda line: line["time"])
    if not deaths:
        raise RuntimeError(f"nobody came to the step in which to die: {output}")
    losses = []
    for death, until in zip(deaths, [*(death["time"] for death in deaths[1:]), float("inf")], strict=True):
        after = [line for line in found if death["time"] < line["time"] < until]
        begun, phases = death["time"], {}
        for phase, what in PHASES.items():
            # To the end of the step of the death, which may be done a second time.
            marks = [line for line in after if line["what"] != "stepped" or line["step"] == death["step"]]
            times = first_times(marks, what).values()
            if times and begun is not None:
                phases[phase] = max(times) - begun
            begun = max(times, default=None)
        if begun is None:
            raise RuntimeError(f"no step was done after {death}: {output}")
        epoch = max(line.get("epoch", 0) for line in found if line["time"] <= death["time"])
        done = [line for line in after if line["what"] == "stepped" and line["epoch"] > epoch]
        again = {line["step"] for line in done if line["step"] < death["step"]}
        seconds = begun - death["time"]
        losses.append({"how": death["how"], "seconds": seconds, "phases": phases, "steps": len(again) + 1})
    return losses


def first_times(found: Sequence[Mapping[str, Any]], what: str) -> dict[int, float]:
    """Return when each member first came to a mark."""
    first: dict[int, float] = {}
    for line in found:
        if line["what"] == what:
            first[line["member"]] = min(first.get(line["member"], float("inf")), line["time"])
    return first


def _output(folder: Path) -> str:
    texts = (path.read_text(errors="replace")[-300:] for path in sorted(folder.glob("output-*")))
    return " | ".join(text for text in texts if text)[-1500:]


# -- one process -------------------------------------------------------------------------------------------------------


class Log:
    """What happened when in this process, as lines of a file."""

    def __init__(self, folder: Path) -> None:
        self.member = int(os.environ["RANK"])
        self._file = (folder / f"log-{self.member}-{os.getpid()}.jsonl").open("a", buffering=1, encoding="utf-8")

    def __call__(self, what: str, **more: Any) -> None:
        """Write that something happens now."""
        self._file.write(json.dumps({"what": what, "time": time.time(), "member": self.member, **more}) + "\n")


def mark(owner: type, name: str, before: str, after: str, log: Log, epoch: list[int]) -> None:
    """Log each call of a method, and its return."""
    call = getattr(owner, name)

    def marked(*args: Any, **named: Any) -> Any:
        if before:
            log(before, epoch=epoch[0])
        result = call(*args, **named)
        log(after, epoch=epoch[0])
        return result

    setattr(owner, name, marked)


def survives(log: Log) -> None:
    """Train in a job that survives."""
    from bench.cluster import load_example

    load_example()
    from gpt import layout, loop, model

    run, epoch = loop.Run(model.Shape(experts=0, sequence=64), steps=STEPS), [0]
    mark(Driver, "_abort", "", "noticed", log, epoch)
    mark(Rounds, "agree", "freed", "agreed", log, epoch)

    def train(job: Any) -> None:
        log("connected", epoch=job.epoch)
        epoch[0] = job.epoch
        trainer = loop.Trainer(run, layout.of(job.groups), job.device)
        log("built", epoch=job.epoch)
        job.hold(trainer.state(), trainer.shardings)
        trainer.restore(job.step)
        log("transferred", epoch=job.epoch)
        for step in range(job.step, STEPS):
            for death in DEATHS:
                if [death["member"], death["step"]] == [log.member, step]:
                    log("death", how=death["how"], step=step)
                    os.kill(os.getpid(), getattr(signal, str(death["how"])))
            trainer.step(step)
            job.commit(step + 1)
            log("stepped", epoch=job.epoch, step=step)

    rm.survive(train, "megatron:tp=2,pp=2", spares=len(DEATHS), redundancy=1, timeout=5.0)


def _main() -> None:
    torch.set_num_threads(1)
    log = Log(Path(sys.argv[1]))
    log("started")
    survives(log)
    log("ended")


if __name__ == "__main__":
    _main()
