"""What survival costs: a commit, on two gloo ranks with 100 MiB of state; a loss (`lost`); a change (`relayout`).

A commit in `examples/train_gpt`:

```
without     step                               in turn, in the same processes
commit      step, commit                       a snapshot of everything
copies      step, commit, the copies arrive    the same, and each rank keeps the other's shards: redundancy=1
guard       step, guard.step                   as much that both ranks hold, compared in each step: every=1
```

``hold`` and ``commit`` at several sizes (`hold`).

``python -m bench.survive [--rounds 8] [--losses 2] [--changes 2] [--hold 1]``
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import rankmesh as rm
from bench.hold import CASES, measured_hold
from bench.lost import measured_losses
from bench.processes import run_world
from bench.relayout import SIZES, measured_changes
from bench.report import record
from rankmesh.rendezvous.waiting import submit
from rankmesh.survival.redundancy import StateLayout
from rankmesh.survival.state import EpochState

__all__ = ["measured"]

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt"
RANKS = 2
# 24 · hidden² weights in 4 layers, half of them on each rank, and two moments of each.
HIDDEN = 608
WARM = 3


def on_thread(call: Callable[[], object]) -> None:
    """Wait for other ranks on a thread, as a job does."""
    submit(call, "rankmesh-gloo").result()


def _kept(tensors: dict[str, torch.Tensor], rank: int, redundancy: int) -> EpochState:
    """Return everything that one rank has, as shards that no other rank has."""
    mesh = rm.Mesh(tp=RANKS)
    shardings = {
        name: rm.Sharding(
            mesh,
            ("tp", *(None,) * (tensor.dim() - 1)),
            (RANKS * tensor.shape[0], *tensor.shape[1:]),
            str(tensor.dtype).removeprefix("torch."),
        )
        for name, tensor in tensors.items()
    }
    layout = StateLayout(mesh, shardings, ("",) * RANKS, redundancy)
    return EpochState(0, layout, tensors, rank=rank, device=torch.device("cpu"))


def _memory(state: EpochState) -> int:
    """Return the bytes of memory that all snapshots take, also those of other ranks' shards."""
    others = () if state.copies is None else state.copies.kept.values()
    return sum(one.memory.nbytes for snapshots in (state.snapshots, *others) for one in snapshots.values())


def _body(rounds: int, hidden: int) -> Callable[[int, Any], dict[str, Any]]:
    sys.path.insert(0, str(EXAMPLE))
    loop, layout, model = (__import__(f"gpt.{name}", fromlist=["gpt"]) for name in ("loop", "layout", "model"))

    def body(rank: int, store: Any) -> dict[str, Any]:
        shape = model.Shape(hidden=hidden, heads=8, experts=0)
        with layout.rankmesh(layout.Sizes(tp=RANKS)) as groups:
            trainer = loop.Trainer(loop.Run(shape), groups, torch.device("cpu"))
            trainer.step(0)  # the moments exist from now on
            tensors: dict[str, torch.Tensor] = {}
            for number, share in enumerate(trainer.optimizer.shares):
                moments = share.adam.state[share.part]
                tensors |= {f"values{number}": share.part.detach()}
                tensors |= {f"{name}{number}": moments[name] for name in ("exp_avg", "exp_avg_sq")}
            variants: dict[str, Any] = {
                "without": None,
                "commit": _kept(tensors, rank, 0),
                "copies": _kept(tensors, rank, 1),
            }
            variants["guard"] = _guard(tensors)
            times: dict[str, list[list[float]]] = {"commit alone": [], **{name: [] for name in variants}}
            for step in range(1, WARM + rounds + 1):
                for name, one in variants.items():
                    whole, commit_only = _step(trainer, step, one)
                    if step > WARM:
                        times[name].append(whole)
                        times["commit alone"] += [commit_only] * (name == "commit")
        state = sum(tensor.nbytes for tensor in tensors.values())
        memory = {name: _memory(one) for name, one in variants.items() if isinstance(one, EpochState)}
        medians = {name: [median(column) for column in zip(*each, strict=True)] for name, each in times.items()}
        return {"medians": medians, "state": state, "memory": memory}

    return body


def _guard(tensors: dict[str, torch.Tensor]) -> rm.Guard:
    """Return a guard of as many tensors as one rank holds, which both ranks have."""
    whole = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    groups = rm.connect(f"dp={RANKS}")
    mesh, dtypes = groups.plan.mesh, {name: str(tensor.dtype) for name, tensor in whole.items()}
    shardings = {name: rm.Sharding(mesh, shape=tuple(one.shape), dtype=dtypes[name]) for name, one in whole.items()}
    return rm.Guard(groups, whole, shardings, every=1)


def _step(trainer: Any, step: int, kept: EpochState | rm.Guard | None) -> tuple[list[float], list[float]]:
    """Time a step with its commit, and the commit: seconds, and processor seconds of all threads of this rank."""
    marks = [(time.perf_counter(), time.process_time())]
    if isinstance(kept, EpochState):
        kept.commit(step, on_thread, tuple)
    marks.append((time.perf_counter(), time.process_time()))
    trainer.step(step)
    if isinstance(kept, rm.Guard):
        kept.step(step)
    elif kept is not None and kept.copies is not None:
        kept.copies.wait(tuple)
    marks.append((time.perf_counter(), time.process_time()))
    start, committed, end = marks
    return [after - before for before, after in zip(start, end, strict=True)], [
        after - before for before, after in zip(start, committed, strict=True)
    ]


def measured(rounds: int, *, hidden: int = HIDDEN, limit: float = 540.0) -> dict[str, Any]:
    """Measure median seconds, wall and processor, of the rank that takes longest, and the bytes of its state."""
    outcome = run_world(RANKS, _body(rounds, hidden), limit=limit)
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    first, *_ = reports = outcome.reports
    seconds, processor = (
        {name: max(report["medians"][name][column] for report in reports) for name in first["medians"]}
        for column in range(2)
    )
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    load = round(os.getloadavg()[0], 1)
    sizes = {"state": first["state"], "memory": first["memory"], "rounds": rounds}
    return {"seconds": seconds, "processor": processor, **sizes, "machine": machine, "load": load}


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.survive", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="steps of each kind for the cost of a commit; 0: keep it")
    parser.add_argument("--losses", type=int, default=2, help="rounds in which ranks are lost; 0: keep them")
    parser.add_argument("--changes", type=int, default=2, help="rounds in which the layout changes; 0: keep them")
    parser.add_argument("--hold", type=int, default=1, help="measure hold and commit at each size; 0: keep them")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("survive.json"))
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else {}
    for name, option, number in (
        ("commit", "--rounds", given.rounds),
        ("losses", "--losses", given.losses),
        ("changes", "--changes", given.changes),
        ("hold", "--hold", given.hold),
    ):
        if not number and name not in found:
            parser.error(f"{given.json} has no figures to keep where {option} is 0; give {option} above 0")
    if given.rounds:
        found["commit"] = measured(given.rounds)
    if given.losses:
        found["losses"] = measured_losses(given.losses)
        found["load"] = round(os.getloadavg()[0], 1)
    if given.changes:
        found["changes"] = [measured_changes(given.changes, ranks=ranks) for ranks in SIZES]
    if given.hold:
        found["hold"] = [measured_hold(ranks, count) for ranks, count in CASES]
    record(given.json, found)


if __name__ == "__main__":
    _main()
