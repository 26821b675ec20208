"""One rank that changes its layout: ``python -m bench.relayout_rank FOLDER HOW``; it writes when what happened.

```
relayout   one job of rm.survive, which calls job.relayout
save       torch DCP saves the shards of the first layout, and the process ends
load       a new process loads them, sharded for the second layout
```

Tensors are cut by rows in the first layout, by rows and columns in the second one: half of each shard moves.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rankmesh as rm
from bench.lost_rank import Log, mark
from rankmesh.survival.rounds import Rounds

ROWS, COLUMNS = 1024, 6400
# Tensors for each rank: 100 MiB of float32.
EACH = 4


def _layouts(size: int) -> tuple[str, str]:
    return f"dp={size}", f"dp={size // 2},tp=2"


def _names(size: int) -> list[str]:
    return [f"weight{number}" for number in range(EACH * size)]


def _step(tensors: dict[str, Tensor], *groups: Any) -> float:
    """Return the sum of all numbers of all ranks."""
    total = torch.stack([tensor.sum(dtype=torch.float64) for tensor in tensors.values()]).sum()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.item()


def _check(found: float, size: int) -> None:
    expected = ROWS * COLUMNS * sum(range(1, EACH * size + 1))
    if not math.isclose(found, expected):
        raise RuntimeError(f"the sum of all numbers is {found} after the change, not {expected}")


def relayout(log: Log, size: int) -> None:
    """Change the layout in one job."""
    mark(Rounds, "agree", "freed", "agreed", log, [0])

    def train(job: rm.survival.Job) -> None:
        log("connected")
        mesh, cut = job.plan.mesh, ("dp", "tp" if job.epoch else None)
        sharding = rm.Sharding(mesh, cut, (ROWS, COLUMNS))
        shape = sharding.of(job.rank).shape
        tensors = {
            name: torch.full(shape, 0.0 if job.epoch else 1.0 + number) for number, name in enumerate(_names(size))
        }
        log("built")
        job.hold(tensors, dict.fromkeys(tensors, sharding))
        log("moved")
        _check(_step(tensors, *(job.groups[axis].pg for axis in mesh.axes)), size)
        log("stepped")
        job.commit(job.step + 1)
        if not job.epoch:
            dist.barrier(group=job.groups["dp"].pg)
            log("asked")
            job.relayout(_layouts(size)[1])

    rm.survive(train, _layouts(size)[0], timeout=60)


def restart(log: Log, size: int, folder: Path, *, again: bool) -> None:
    """Save the shards of the first layout, or load them in the second one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Shard

    dist.init_process_group("gloo")
    if again:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("tp", "dp"))
        placements: list[Placement] = [Shard(1), Shard(0)]
        shape: tuple[int, ...] = (ROWS // (size // 2), COLUMNS // 2)
    else:
        mesh, placements, shape = init_device_mesh("cpu", (size,)), [Shard(0)], (ROWS // size, COLUMNS)
    log("connected")
    local = {name: torch.full(shape, 0.0 if again else 1.0 + number) for number, name in enumerate(_names(size))}
    state = {name: DTensor.from_local(one, mesh, placements, run_check=False) for name, one in local.items()}
    log("built")
    if again:
        dcp.load(state, checkpoint_id=folder / "checkpoint")  # type: ignore[attr-defined]  # absent from its __all__
        log("moved")
        _check(_step({name: one.to_local() for name, one in state.items()}, None), size)
        log("stepped")
    else:
        _check(_step(local, None), size)
        dist.barrier()
        log("asked")
        dcp.save(state, checkpoint_id=folder / "checkpoint")  # type: ignore[attr-defined]  # absent from its __all__
        log("saved")
    dist.destroy_process_group()


def _main() -> None:
    torch.set_num_threads(1)
    folder, how = Path(sys.argv[1]), sys.argv[2]
    log, size = Log(folder, int(os.environ["RANK"])), int(os.environ["WORLD_SIZE"])
    log("started")
    if how == "relayout":
        relayout(log, size)
    else:
        restart(log, size, folder, again=how == "load")


if __name__ == "__main__":
    _main()
