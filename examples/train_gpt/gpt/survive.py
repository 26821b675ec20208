"""The same training in a job that loses ranks or changes its layout; rm.survive calls ``train`` again each time.

```
state    every weight, and this rank's columns of its moments     the loss and the norm of each step, on every rank
```

All are held as they are in memory. Columns of moments have no replica: with ``redundancy`` other ranks keep copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

import rankmesh as rm
from rankmesh.survival import Job

from .layout import Sizes, of
from .loop import Run, Step, Trainer

RECORD = "record"


def survive(
    run: Run,
    layout: str,
    spares: int,
    shrink: bool,
    timeout: float,
    progress: Callable[[Sizes, Step], object],
    changes: Mapping[int, str] | None = None,
    redundancy: int = 1,
) -> tuple[Sizes, list[Step]] | None:
    """Train; on the first rank the sizes at the end, and the steps. ``progress`` gets each step there.

    ``changes`` are the sizes to go on with after some steps. ``redundancy`` is how many other ranks keep a
    copy of what one rank alone holds, such as its columns of the moments.
    """

    def train(job: Job) -> tuple[Sizes, list[Step]] | None:
        sizes = Sizes(**{axis: job.plan.mesh.axes[axis] for axis in ("tp", "cp", "dp", "pp")}, ep=_ep(job.plan))
        run.shape.check(sizes)
        trainer = Trainer(run, of(job.groups), job.device)
        # Rows of loss and norm, which a spare that takes over gets from the others.
        record = torch.zeros(run.steps, 2, dtype=torch.float64, device=job.device)
        whole = rm.Sharding(job.plan.mesh, None, (run.steps, 2), "float64")
        job.hold({**trainer.state(), RECORD: record}, {**trainer.shardings, RECORD: whole})
        trainer.restore(job.step)
        for index in range(job.step, run.steps):
            if changes and index in changes:  # asked again where a rank is lost before all have asked
                with suppress(rm.PlanError):  # too few ranks are left for it
                    job.relayout(f"megatron:{changes[index]}")
            step = trainer.step(index)
            record[index] = torch.tensor([step.loss, step.norm], dtype=torch.float64)
            job.commit(index + 1)
            if job.rank == 0:
                progress(sizes, step)
        if job.rank:
            return None
        return sizes, [Step(index, loss, norm) for index, (loss, norm) in enumerate(record.tolist())]

    # A spare builds its first model when it takes over, and torch loads its compiler with the first optimizer.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    axes = ",".join(part for part in layout.replace(" ", "").split(",") if part and not part.startswith("dp="))
    along = "dp" if shrink else None
    return rm.survive(train, f"megatron:{axes}", spares=spares, shrink=along, redundancy=redundancy, timeout=timeout)


def _ep(plan: rm.Plan) -> int:
    return plan.mesh.view("expert").axes["ep"]
