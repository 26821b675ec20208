"""A comparison of layouts: time and memory of ``sim.compare`` on a two-layer model, eight layouts of up to 16 ranks.

The model is that of ``examples/train_gpt``, with every kind of parallelism that it has; it trains two steps in float64
and sees each loss, norm, weight and moment. Each round is a process of its own, which imports everything first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.memory import highest, resident
from bench.report import record

__all__ = ["LAYOUTS", "compared", "measured", "program_of"]

LAYOUTS = tuple(
    f"megatron:{sizes}"
    for sizes in (
        "tp=2,dp=1", "cp=2,dp=1", "dp=2", "pp=2,dp=1", "dp=2,ep=2", "tp=2,dp=2", "tp=2,pp=2,dp=2",
        "tp=2,cp=2,pp=2,dp=2,ep=2",
    )
)  # fmt: skip
# The cores that a round may use.
CORES = 2
_ROOT = Path(__file__).parent.parent


def program_of(package: str, *, steps: int = 2) -> Callable[[Any], None]:
    """What is compared: some steps of the example in ``package``, and every weight and moment after them."""
    import torch

    from rankmesh import sim

    layout, loop, model = (import_module(f"{package}.{name}") for name in ("layout", "loop", "model"))
    shape = model.Shape(layers=2, hidden=8, heads=2, experts=4, top=2, sequence=8, batch=4, microbatches=1)
    run = loop.Run(shape, steps=steps, rate=0.01, clip=0.25, dtype="float64")

    def program(groups: Any) -> None:
        trainer = loop.Trainer(run, layout.of(groups), torch.device("cpu"))
        for step in trainer.steps():
            sim.see("loss", step.loss)
            sim.see("norm", step.norm)
        state = trainer.state()
        for name, sharding in trainer.shardings.items():
            if name in state:
                sim.see(name, state[name], sharding.cut, view=sharding.view, at=sharding.at)

    return program


def compared(layouts: Sequence[str] = LAYOUTS) -> dict[str, Any]:
    """One comparison in this process: seconds, processor seconds, the most resident bytes, and what it saw."""
    from rankmesh import sim

    program = program_of("examples.train_gpt.gpt")
    before = resident()
    wall, processor = time.perf_counter(), time.process_time()
    result = sim.compare(program, layouts)
    return {
        "seconds": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
        "resident": max(highest(), before),  # the kernel counts pages in batches, the highest with fewer of them
        "before": before,
        "same": result.same,
        "values": len({name for errors in result.errors.values() for name in errors}),
    }


def measured(rounds: int) -> dict[str, Any]:
    """The figures of some rounds, one after the other."""
    load = os.getloadavg()[0]
    runs = []
    for _ in range(rounds):
        command = [sys.executable, "-m", "bench.compare", "--once"]
        done = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True)  # noqa: S603  - our own
        runs.append(json.loads(done.stdout))
        sys.stderr.write(f"{runs[-1]}\n")
    return {
        "layouts": list(LAYOUTS),
        "cores": CORES,
        "torch": version("torch"),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "runs": runs,
    }


def _main(message: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="one round, in this process; its figures go to stdout")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("compare.json"))
    given = parser.parse_args(message)
    if given.once:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        sys.stdout.write(json.dumps(compared()))
        return
    record(given.json, measured(given.rounds))


if __name__ == "__main__":
    _main(sys.argv[1:])
