"""What a change of the layout costs: job.relayout, beside a restart with torchrun from a checkpoint of torch DCP.

```
relayout   asked ──free──agree──connect──build──transfer──step──>
restart    asked ──save──stop──start──connect──build──load──step──>
```

Each phase ends when the last rank has come to its end; the first begins when the last rank asks. Tensors are cut by
rows in the first layout, by rows and columns in the second one: half of each shard moves.

One rank is ``python -m bench.relayout FOLDER HOW``, under torchrun, and writes when what happened:

```
relayout   one job of rm.survive, which calls job.relayout
save       torch DCP saves the shards of the first layout, and the process ends
load       a new process loads them, sharded for the second layout
```
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rankmesh as rm
from bench.lost import Log, first_times, mark
from bench.processes import lines, torchrun
from rankmesh.survival.rounds import Rounds

__all__ = ["SIZES", "measured_changes"]

SIZES = (8, 16)
# For each way its phases, and the mark at which each ends.
PHASES = {
    "relayout": {
        "free": "freed",
        "agree": "agreed",
        "connect": "connected",
        "build": "built",
        "transfer": "moved",
        "step": "stepped",
    },
    "restart": {
        "save": "saved",
        "stop and start": "started",
        "connect": "connected",
        "build": "built",
        "load": "moved",
        "step": "stepped",
    },
}
ROWS, COLUMNS = 1024, 6400
# Tensors for each rank: 100 MiB of float32.
EACH = 4


def measured_changes(rounds: int, *, ranks: int, limit: float = 400.0) -> dict[str, Any]:
    """Measure both ways in turn: the seconds of each phase, of each round."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in PHASES}
    for _ in range(rounds):
        for way, runs in (("relayout", ("relayout",)), ("restart", ("save", "load"))):
            with tempfile.TemporaryDirectory(prefix="rankmesh-relayout-") as name:
                for how in runs:
                    torchrun(ranks, "bench.relayout", name, how, limit=limit)
                found[way].append(_phases(Path(name), PHASES[way], ranks))
    return {"ranks": ranks, "phases": found}


def _phases(folder: Path, phases: Mapping[str, str], ranks: int) -> dict[str, float]:
    """Return the seconds of each phase, of the last rank to end it."""
    found = lines(folder)
    asked = first_times(found, "asked").values()
    after, ends = [line for line in found if line["time"] > min(asked)], [max(asked)]
    for what in phases.values():
        first = first_times(after, what)
        if len(first) < ranks:
            raise RuntimeError(f"{ranks - len(first)} ranks did not come to the mark {what!r}")
        ends.append(max(first.values()))
    return {name: end - start for name, start, end in zip(phases, ends, ends[1:], strict=False)}


# -- one rank ----------------------------------------------------------------------------------------------------------


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
    log, size = Log(folder), int(os.environ["WORLD_SIZE"])
    log("started")
    if how == "relayout":
        relayout(log, size)
    else:
        restart(log, size, folder, again=how == "load")


if __name__ == "__main__":
    _main()
