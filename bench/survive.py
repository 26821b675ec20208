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

import json
from statistics import median
from typing import Any

import torch

import rankmesh as rm
from bench.cluster import load_example
from bench.hold import CASES, measured_hold
from bench.lost import measured_losses
from bench.processes import run_world
from bench.relayout import SIZES, measured_changes
from bench.report import load, machine, options, record
from bench.results import Sample, taken
from rankmesh.rendezvous.waiting import submit
from rankmesh.survival.redundancy import StateLayout
from rankmesh.survival.state import EpochState

__all__ = ["measured"]

RANKS = 2
# 24 · hidden² weights in 4 layers, half of them on each rank, and two moments of each.
HIDDEN = 608
WARM = 3


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


def _measure(rounds: int, hidden: int, rank: int) -> dict[str, Any]:
    """Measure on one rank: the samples of each kind of step, and the bytes of the state and its snapshots."""
    from gpt import layout, loop, model

    with layout.rankmesh(layout.Sizes(tp=RANKS)) as groups:
        shape = model.Shape(hidden=hidden, heads=8, experts=0)
        trainer = loop.Trainer(loop.Run(shape), groups, torch.device("cpu"))
        trainer.step(0)  # the moments exist from now on
        tensors: dict[str, torch.Tensor] = {}
        for number, share in enumerate(trainer.optimizer.shares):
            moments = share.adam.state[share.part]
            tensors |= {f"values{number}": share.part.detach()}
            tensors |= {f"{name}{number}": moments[name] for name in ("exp_avg", "exp_avg_sq")}
        commit, copies = (_kept(tensors, rank, redundancy) for redundancy in (0, 1))
        kinds = {"without": None, "commit": commit, "copies": copies, "guard": _guard(tensors)}
        found: dict[str, list[Sample]] = {"commit alone": [], **{name: [] for name in kinds}}
        for step in range(1, WARM + rounds + 1):
            for name, kept in kinds.items():
                whole, commit_only = _step(trainer, step, kept)
                if step > WARM:
                    found[name].append(whole)
                    found["commit alone"] += [commit_only] * (name == "commit")
    state = sum(tensor.nbytes for tensor in tensors.values())
    return {"found": found, "state": state, "memory": {"commit": _memory(commit), "copies": _memory(copies)}}


def _guard(tensors: dict[str, torch.Tensor]) -> rm.Guard:
    """Return a guard of as many tensors as one rank holds, which both ranks have."""
    whole = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    groups = rm.connect(f"dp={RANKS}")
    mesh, dtypes = groups.plan.mesh, {name: str(tensor.dtype) for name, tensor in whole.items()}
    shardings = {name: rm.Sharding(mesh, shape=tuple(one.shape), dtype=dtypes[name]) for name, one in whole.items()}
    return rm.Guard(groups, whole, shardings, every=1)


def _step(trainer: Any, step: int, kept: EpochState | rm.Guard | None) -> tuple[Sample, Sample]:
    """Return what a step with its commit took this rank, and what the commit took."""

    def commit() -> None:
        if isinstance(kept, EpochState):
            # On a thread, as a job waits for other ranks.
            kept.commit(step, lambda call: submit(call, "rankmesh-gloo").result(), tuple)

    def train() -> None:
        trainer.step(step)
        if isinstance(kept, rm.Guard):
            kept.step(step)
        elif kept is not None and kept.copies is not None:
            kept.copies.wait(tuple)

    commit_only, rest = taken(commit), taken(train)
    return {clock: commit_only[clock] + rest[clock] for clock in rest}, commit_only


def measured(rounds: int, *, hidden: int = HIDDEN, limit: float = 540.0) -> dict[str, Any]:
    """Measure median seconds, wall and processor, of the rank that takes longest, and the bytes of its state."""
    load_example()
    reports = run_world(RANKS, lambda rank, _store: _measure(rounds, hidden, rank), limit=limit).checked()

    def medians(clock: str) -> dict[str, float]:
        samples = [report["found"] for report in reports]
        return {name: max(median(one[clock] for one in found[name]) for found in samples) for name in samples[0]}

    sizes = {"state": reports[0]["state"], "memory": reports[0]["memory"], "rounds": rounds}
    clocks = {"seconds": medians("wall"), "processor": medians("processor")}
    return {**clocks, **sizes, "machine": machine(), "load": load()}


def _main() -> None:
    parser = options("survive", __doc__, rounds=8)
    parser.add_argument("--losses", type=int, default=2, help="rounds in which ranks are lost; 0: keep them")
    parser.add_argument("--changes", type=int, default=2, help="rounds in which the layout changes; 0: keep them")
    parser.add_argument("--hold", type=int, default=1, help="measure hold and commit at each size; 0: keep them")
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else {}
    for name, option in (("commit", "rounds"), ("losses", "losses"), ("changes", "changes"), ("hold", "hold")):
        if not getattr(given, option) and name not in found:
            parser.error(f"{given.json} has no figures to keep where --{option} is 0; give --{option} above 0")
    if given.rounds:
        found["commit"] = measured(given.rounds)
    if given.losses:
        found["losses"], found["load"] = measured_losses(given.losses), load()
    if given.changes:
        found["changes"] = [measured_changes(given.changes, ranks=ranks) for ranks in SIZES]
    if given.hold:
        found["hold"] = [measured_hold(ranks, count) for ranks, count in CASES]
    record(given.json, found)


if __name__ == "__main__":
    _main()
