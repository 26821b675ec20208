"""The same training in a job that loses ranks or changes its layout; rm.survive calls ``train`` again each time.

```
state    every weight and its moments, whole on each replica     the loss and the norm of each step, on every rank
```

Moments are gathered for each commit. A job that cannot afford that holds its parts of them, with ``redundancy=1``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

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
    redundancy: int = 0,
) -> tuple[Sizes, list[Step]] | None:
    """Train; on the first rank the sizes at the end, and the steps. ``progress`` gets each step there.

    ``changes`` are the sizes to go on with after some steps. ``redundancy`` is how many other ranks keep a
    copy of what one rank alone holds, such as its experts.
    """

    def train(job: Job) -> tuple[Sizes, list[Step]] | None:
        sizes = Sizes(**{axis: job.plan.mesh.axes[axis] for axis in ("tp", "cp", "dp", "pp")}, ep=_ep(job.plan))
        run.shape.check(sizes)
        trainer = Trainer(run, of(job.groups), job.device)
        # Rows of loss and norm, which a spare that takes over gets from the others.
        record = torch.zeros(run.steps, 2, dtype=torch.float64, device=job.device)
        state = {**trainer.empty(), RECORD: record}
        keep(trainer, state)
        job.hold(state, {**trainer.shardings, RECORD: rm.Sharding(job.plan.mesh, None, (run.steps, 2), "float64")})
        if job.step:
            trainer.restore(job.step, state)
        for index in range(job.step, run.steps):
            if changes and index in changes:  # asked again where a rank is lost before all have asked
                with suppress(rm.PlanError):  # too few ranks are left for it
                    job.relayout(f"megatron:{changes[index]}")
            step = trainer.step(index)
            record[index] = torch.tensor([step.loss, step.norm], dtype=torch.float64)
            keep(trainer, state)
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


def keep(trainer: Trainer, state: dict[str, Tensor]) -> None:
    """Copy the state to where it is held."""
    with torch.no_grad():
        for name, tensor in trainer.state().items():
            state[name].copy_(tensor)
