"""One process of a training that loses ranks: ``python -m bench.lost_rank FOLDER``; it writes when what happened.

16 ranks of examples/train_gpt (tp=2, pp=2, dp=4) in ``rm.survive`` with spares. ``deaths.json`` in the folder has who
dies in which step, by member, and how.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import rankmesh as rm
from rankmesh.survival.rounds import Rounds
from rankmesh.survival.session import Session

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt"
LAYOUT = "tp=2,pp=2"
TIMEOUT = 5.0


class Log:
    """What happened when in this process, as lines of a file."""

    def __init__(self, folder: Path, member: int) -> None:
        self.member, self._folder = member, folder
        self._file = (folder / f"log-{member}-{os.getpid()}.jsonl").open("a", buffering=1, encoding="utf-8")
        deaths = folder / "deaths.json"
        self._deaths = json.loads(deaths.read_text(encoding="utf-8")) if deaths.exists() else []

    def __call__(self, what: str, **more: Any) -> None:
        """Write that something happens now."""
        self._file.write(json.dumps({"what": what, "time": time.time(), "member": self.member, **more}) + "\n")

    def step(self, step: int) -> None:
        """Die at the beginning of a step, if that is due."""
        for number, death in enumerate(self._deaths):
            if [death["member"], death["step"]] == [self.member, step]:
                self("death", how=death["how"], step=step)
                (self._folder / f"died-{number}").touch()
                os.kill(os.getpid(), getattr(signal, death["how"]))


def _example(steps: int) -> tuple[Any, Any, Any]:
    sys.path.insert(0, str(EXAMPLE))
    from gpt import layout, loop, model

    return loop, layout, loop.Run(model.Shape(experts=0, sequence=64), steps=steps)


def survives(log: Log, steps: int, spares: int) -> None:
    """Train in a job that survives."""
    loop, layout, run = _example(steps)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # as the example does, for the spares
    epoch = [0]
    mark(Session, "_abort", "", "noticed", log, epoch)
    mark(Rounds, "agree", "freed", "agreed", log, epoch)

    def train(job: Any) -> None:
        log("connected", epoch=job.epoch)
        epoch[0] = job.epoch
        trainer = loop.Trainer(run, layout.of(job.groups), job.device)
        log("built", epoch=job.epoch)
        job.hold(trainer.state(), trainer.shardings)
        trainer.restore(job.step)
        log("transferred", epoch=job.epoch)
        for step in range(job.step, steps):
            log.step(step)
            trainer.step(step)
            job.commit(step + 1)
            log("stepped", epoch=job.epoch, step=step)

    rm.survive(train, f"megatron:{LAYOUT}", spares=spares, redundancy=1, timeout=TIMEOUT)


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


def _main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    log = Log(folder, int(os.environ["RANK"]))
    log("started")
    given = json.loads((folder / "given.json").read_text(encoding="utf-8"))
    survives(log, given["steps"], given["spares"])
    log("ended")


if __name__ == "__main__":
    _main()
